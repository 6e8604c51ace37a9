# make run    set up, train a small SpiralFormer on the Python standard library, evaluate, sample
# make test   set up and run the tests
# make check  format, lint and types
# make bench  speed and memory beside peers

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
READY  := $(VENV)/.ready
DEV    := $(VENV)/.ready-dev

.PHONY: run test test-slow check format bench clean

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
