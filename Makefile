# make run    set up an environment of its own (.venv) and run the main job on the built-in sample set
# make test   the default tests;  make test-all  the slow ones too
# make test-lowest, make test-newest   the default tests with the lowest and the newest versions that pyproject.toml
#                                      allows, each in an environment of its own (.venv-lowest, .venv-newest)
# make soak   every guarantee of docs/project/reliability.md with many trials, hours of them; SOAK=words for pytest
# make bench  contests with other ways of doing the same work, 3 rounds;  make bench-full  7 rounds, written to docs/project/performance.md
# make rehearsals   a tenth of the sizes the guides speak of: tables of docs/project/scale.md (SCALE=1 for all of it)
# make gpu    what trainkit does on a GPU, into docs/project/gpu.md, by the Python it is given: make gpu PYTHON=python3.12
#             PART=equality|memory|speed|claims does one part, of 8 minutes; all without it
# make docs   the pages of docs/reference that are generated from the code, and the site in docs/_build/html
# make screenshots   pictures of the MLflow page of the store, into docs/images (needs Chromium)
# make lock   constraints.lock anew: constraints.txt with the SHA-256 of its wheels, as the package index has them
# make audit  known holes of what is pinned, by pip-audit;  make sbom  the same as a bill of materials, build/sbom.json
PYTHON ?= $(firstword $(shell command -v python3 python3.11))
VENV := .venv
BIN := $(abspath $(VENV))/bin
READY := $(VENV)/.ready

.PHONY: run test test-all test-lowest test-newest soak bench bench-full rehearsals gpu docs screenshots lock audit sbom clean

run: $(READY)
	$(BIN)/accelerate launch --config_file accelerate_configs/cpu.yaml trainkit/run.py recipes/adadistill.yaml

test: $(READY)
	$(BIN)/python -m pytest

test-all: $(READY)
	$(BIN)/python -m pytest -m "slow or not slow"

test-lowest: RESOLUTION := lowest-direct
test-newest: RESOLUTION := highest
test-lowest test-newest: test-%:
	test -x $(VENV)-$*/bin/python || $(PYTHON) -m venv $(VENV)-$*
	$(VENV)-$*/bin/python -m pip install --quiet --disable-pip-version-check "uv>=0.9,<1"
	$(VENV)-$*/bin/uv pip install --quiet --upgrade --python $(VENV)-$*/bin/python --resolution $(RESOLUTION) -e ".[dev]"
	$(VENV)-$*/bin/python -m pytest

soak: $(READY)
	$(BIN)/python -m pytest -m 'slow or not slow' --soak $(SOAK)

bench: $(VENV)/.bench
	$(BIN)/python benchmarks/suite.py --rounds 3

bench-full: $(VENV)/.bench
	$(BIN)/python benchmarks/suite.py --rounds 7 --resume --write docs/project/performance.md

REHEARSALS := faces images volumes people_and_scenes
SCALE := 0.1

rehearsals: $(VENV)/.bench
	for name in $(REHEARSALS); do $(BIN)/python -m benchmarks.rehearsals.$$name --scale $(SCALE) || exit 1; done

gpu:
	$(if $(filter command,$(origin PYTHON)),$(PYTHON),$(firstword $(wildcard $(BIN)/python) $(PYTHON))) \
		-m benchmarks.gpu $(PART)

docs: $(READY)
	$(BIN)/python -m docs.generate_reference
	$(BIN)/python -m sphinx -E -a -n -W --keep-going -q docs docs/_build/html
	@echo "The site is docs/_build/html/index.html"

screenshots: $(READY)
	$(BIN)/python tests/support/screenshots.py

lock:
	$(PYTHON) tests/support/lock_constraints.py

# Strict: what the service does not know, or cannot be asked, fails too. Nothing of what is audited is installed.
AUDIT := $(VENV)-audit/bin/pip-audit --strict --progress-spinner off --requirement constraints.lock \
	--require-hashes --disable-pip

audit: $(VENV)-audit/.ready
	$(AUDIT)

sbom: $(VENV)-audit/.ready
	mkdir -p build
	$(AUDIT) --format cyclonedx-json --output build/sbom.json

$(VENV)-audit/.ready:
	test -x $(VENV)-audit/bin/python || $(PYTHON) -m venv $(VENV)-audit
	$(VENV)-audit/bin/python -m pip install --quiet --disable-pip-version-check "pip-audit>=2.10,<3"
	touch $@

$(VENV)/.bench: $(READY)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[dev,bench]" -c constraints.txt
	touch $@

$(READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[dev]" -c constraints.txt
	touch $@

clean:
	rm -rf $(VENV) $(VENV)-audit
