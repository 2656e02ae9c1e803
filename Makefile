# make run    set up an environment of its own (.venv) and run the main job on the built-in sample set
# make test   the default tests;  make test-all  the slow ones too
PYTHON ?= $(firstword $(shell command -v python3 python3.11))
VENV := .venv
BIN := $(abspath $(VENV))/bin
READY := $(VENV)/.ready

.PHONY: run test test-all clean

run: $(READY)
	$(BIN)/accelerate launch --config_file accelerate_configs/cpu.yaml trainkit/run.py recipes/adadistill.yaml

test: $(READY)
	$(BIN)/python -m pytest

test-all: $(READY)
	$(BIN)/python -m pytest -m "slow or not slow"

$(READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[dev]" -c constraints.txt
	touch $@

clean:
	rm -rf $(VENV)
