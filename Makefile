# Everything one does with a clone. Needs Python 3.11 or newer, a C compiler and make; `make help` lists the targets.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.colibri-ready
ORACLE_READY := $(VENV)/.colibri-oracle
PEERS_READY := $(VENV)/.colibri-peers
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
CHROMIUM := $(shell command -v "$${COLIBRI_BROWSER:-chromium}" || command -v chromium-browser || command -v google-chrome)
# the locked versions and hashes are those of one platform; elsewhere pyproject's bounds decide
LOCKED := $(shell $(PYTHON) -c 'import platform as p, sys; print("yes" if (sys.version_info[:2], p.system(), p.machine(), p.libc_ver()[0]) == ((3, 11), "Linux", "x86_64", "glibc") else "no")' 2>/dev/null)

PYTEST := $(BIN)/python -m pytest -p no:nbval
NOTEBOOKS := COLIBRI_CACHE="$(CURDIR)/build/test-cache" $(BIN)/python -m pytest --nbval-lax -n 2 --dist loadscope notebooks

.PHONY: help env tools browser arm lab board demo test test-fast test-browser test-arm test-notebooks soak test-oracle mutants lint format bench lock wheel clean distclean

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-16s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

tools:
	@command -v $(PYTHON) >/dev/null || { echo "no $(PYTHON): install Python 3.11 or newer (Debian package python3)" >&2; exit 2; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "$(PYTHON) is $$($(PYTHON) -V): Python 3.11 or newer is needed; name one with make PYTHON=python3.12" >&2; exit 2; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { echo "$(PYTHON) cannot make virtual environments: install the Debian package python3-venv" >&2; exit 2; }
	@command -v $${CC:-cc} >/dev/null || command -v gcc >/dev/null || command -v clang >/dev/null || { echo "no C compiler: install the Debian package build-essential (macOS: xcode-select --install)" >&2; exit 2; }

browser:
	@test -n "$(CHROMIUM)" || { echo "no Chromium for the browser tests: install the Debian package chromium, or name one with COLIBRI_BROWSER" >&2; exit 2; }

arm:
	@command -v aarch64-linux-gnu-gcc >/dev/null && test -f "$$(aarch64-linux-gnu-gcc -print-file-name=libc.a)" || { echo "no compiler and C library for aarch64: install the Debian packages gcc-aarch64-linux-gnu and libc6-dev-arm64-cross" >&2; exit 2; }
	@command -v qemu-aarch64 >/dev/null || { echo "no emulator for aarch64: install the Debian package qemu-user" >&2; exit 2; }

env: $(READY) ## make or refresh the virtual environment in .venv

$(READY): pyproject.toml constraints.txt | tools
	@echo "making the environment in $(VENV) (some minutes the first time)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
ifeq ($(LOCKED),yes)
	@$(PIP) install --require-hashes -r constraints.txt
	@$(PIP) install --no-deps --no-build-isolation -e .
else
	@$(PIP) install -e '.[test]'
endif
	@touch $@

$(ORACLE_READY): $(READY)
	@echo "adding torch and transformers to $(VENV)"
	@$(PIP) install $$($(BIN)/python .ci/lock.py --extra oracle)
	@touch $@

$(PEERS_READY): $(READY)
	@echo "adding llama-cpp-python and gguf to $(VENV) (compiles llama.cpp: some minutes)"
	@$(PIP) install $$($(BIN)/python .ci/lock.py --extra peers)
	@touch $@

lab: env ## open JupyterLab on the quickstart, with the embedded model
	$(BIN)/colibri-lab lab

board: env ## the board alone, as a page in the browser: press Start
	$(BIN)/colibri-lab board --set expert_cache_bytes=4MiB --set pace=40

demo: env ## a run without a browser: text, the performance line, report.html
	@$(BIN)/python -m colibri_lab.demo

test: env browser arm lint test-notebooks test-browser ## everything: lint, types, imports, notebooks, browser, unit, property and golden tests
	$(PYTEST) -n 2 -m "not browser and not oracle"

test-fast: env ## unit, property and golden tests of this machine only
	$(PYTEST) -n 2 -m "not browser and not oracle and not wheel and not arm"

test-notebooks: env ## run the notebooks with nbval
	$(NOTEBOOKS)

test-browser: env browser ## drive the board in Chromium
	$(PYTEST) -n 2 -m "browser and not alone" tests/browser
	$(PYTEST) -m "browser and alone" tests/browser

MINUTES ?= 30
soak: env browser ## the lab in a browser for MINUTES=30: what kernel and page grow by (not part of make test)
	$(BIN)/python -m tests.browser.soak --minutes $(MINUTES)

test-arm: env arm ## the aarch64 levels of the kernels, cross-compiled and emulated
	$(PYTEST) -n 2 --dist loadscope -m arm tests/arm

test-oracle: $(ORACLE_READY) ## make the goldens afresh with transformers and compare
	$(PYTEST) -m oracle tests/oracle

mutants: env ## plant bugs in the CUDA kernels, one at a time, and see that each is found (some minutes)
	COLIBRI_CACHE="$(CURDIR)/build/test-cache" $(BIN)/python -m tests.cuda.mutants

lint: env ## ruff, mypy --strict, import contracts
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	@$(BIN)/lint-imports --no-logo

format: env ## let ruff put the code in form
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(PEERS_READY) ## decode speed against llama.cpp on random weights (m1, one thread)
	$(BIN)/colibri-lab bench decode --shape m1 --threads 1 --peer llama.cpp

wheel: env ## build the wheel into dist/
	$(BIN)/python -m build --wheel --no-isolation

lock: $(READY) ## write constraints.txt anew from pyproject.toml's bounds
	$(BIN)/python .ci/lock.py --write

clean: ## remove caches and what was built, keep the environment
	rm -rf build dist report.html trace.jsonl .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find colibri_lab tests data -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean ## remove the environment too
	rm -rf $(VENV)
