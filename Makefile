# Everything starts here, on a machine that has nothing but Python and make: `make demo`, `make test`.
# The only network used is PyPI.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

# The first Python 3.11 to 3.13 that really runs (a pyenv shim may exist for a version that is not installed).
PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3; do \
	$$p -c 'import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' \
	2>/dev/null && echo $$p && break; done)
VENV := .venv
LOW := .venv-low
BIN := $(VENV)/bin
TORCH := 2.13.0

# Two workers of one thread each: tests are many small tensors, for which a second thread costs more than it gives.
WORKERS ?= 2
PYTEST = OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false
ARGS ?=

CSRC = $(wildcard csrc/*.cu csrc/*.cuh csrc/*.h csrc/*.cpp)
define pip_install
$(1)/bin/python -m pip install --disable-pip-version-check --quiet --progress-bar on
endef

.PHONY: help setup setup-low demo test quick test-window lint types format overhead clean

help:  ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(VENV)/.ready  ## .venv with pinned versions (the other targets do this themselves)

$(VENV)/.ready: constraints.txt pyproject.toml
	@test -n "$(PYTHON)" || { echo "No Python 3.11, 3.12 or 3.13 (with venv) found; name one: make PYTHON=/path/to/python" >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "setting up $(VENV): torch $(TORCH), then the rest (once; a few minutes)"
	@$(call pip_install,$(VENV)) "torch==$(TORCH)"
	@$(call pip_install,$(VENV)) -c constraints.txt -e ".[test,dev]"
	@touch $@

# Lean and exact: constraints-low.txt is the whole list, nothing is resolved.
setup-low: $(LOW)/.ready
$(LOW)/.ready: constraints-low.txt pyproject.toml
	@test -x $(LOW)/bin/python || $(PYTHON) -m venv $(LOW)
	@echo "setting up $(LOW): torch 2.11.0, transformers 5.17.0 (once; downloads about 2 GB)"
	@$(call pip_install,$(LOW)) --no-deps -r constraints-low.txt
	@$(call pip_install,$(LOW)) --no-deps -e .
	@touch $@

demo: $(VENV)/.ready  ## a real model through the backend: a chat, tokens/s, the report, perplexities side by side
	@$(BIN)/python examples/demo.py $(ARGS)

test: lint  ## lint, types and every test that needs no GPU
	$(PYTEST) $(BIN)/python -m pytest -n $(WORKERS) -m "not gpu" $(ARGS)

# One end-to-end file and every unit: what shows a mistake while one works. The field cases and whole families take longer.
QUICK = tests/numerics tests/passes tests/e2e/test_options.py tests/e2e/test_report.py tests/e2e/test_bad_input.py

quick: $(VENV)/.ready  ## the tests that take seconds
	$(PYTEST) $(BIN)/python -m pytest -n $(WORKERS) -m "not gpu and not slow" $(QUICK) $(ARGS)

test-window: $(VENV)/.ready $(LOW)/.ready  ## every test at both ends of the support window
	$(PYTEST) $(BIN)/python -m pytest -n $(WORKERS) -m "not gpu" $(ARGS)
	$(PYTEST) $(LOW)/bin/python -m pytest -n $(WORKERS) -m "not gpu" $(ARGS)

lint: $(VENV)/.ready  ## ruff, mypy (make types), clang-format, codespell
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@$(MAKE) --no-print-directory types
	$(if $(CSRC),$(BIN)/clang-format --dry-run --Werror $(CSRC))
	$(BIN)/codespell

# mypy does not follow setuptools' package-dir: it gets a folder of links in which the package looks as it is installed.
types: $(VENV)/.ready  ## mypy
	rm -rf build/types && mkdir -p build/types/fu_compile
	ln -s $(CURDIR)/fu_compile/*.py build/types/fu_compile/
	ln -s $(CURDIR)/passes $(CURDIR)/lowerings $(CURDIR)/csrc build/types/fu_compile/
	cd build/types && $(CURDIR)/$(BIN)/mypy --config-file $(CURDIR)/pyproject.toml --cache-dir $(CURDIR)/.mypy_cache -p fu_compile

format: $(VENV)/.ready  ## rewrite the sources the way lint wants them
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(if $(CSRC),$(BIN)/clang-format -i $(CSRC))

overhead: $(VENV)/.ready  ## import, capture, runtime and packing costs against their bars
	@$(BIN)/python benchmarks/overhead.py $(ARGS)

clean:  ## remove environments, caches and build products
	rm -rf $(VENV) $(LOW) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
