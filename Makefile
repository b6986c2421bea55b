.PHONY: help demo test lint format bench clean

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

help:  ## list these commands
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 10

$(VENV)/base: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -c 'import sys; sys.exit(sys.version_info < (3, 11) and "ctxreuse needs Python 3.11 or newer: make PYTHON=python3.11")'
	$(BIN)/python -m pip install --quiet --upgrade 'pip>=25.1'
	$(BIN)/python -m pip install --quiet --editable '.[demo]'
	touch $@

$(VENV)/dev: $(VENV)/base
	$(BIN)/python -m pip install --quiet --editable '.[all]' --group dev
	touch $@

demo: $(VENV)/base  ## the main job on built-in data: tables, and a plot in demo-output/
	$(BIN)/ctxreuse demo

test: $(VENV)/dev  ## the whole test suite
	$(BIN)/python -m pytest

lint: $(VENV)/dev  ## formatting, style, types, directions of imports
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(VENV)/dev  ## mend formatting and what of style can be mended
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(VENV)/dev  ## speed, and hit ratios on the traces in $$CTXREUSE_DATA
	$(BIN)/python benchmarks/speed.py
	$(BIN)/python benchmarks/hit_ratio.py

clean:  ## remove the environment and everything that was made
	rm -rf $(VENV) demo-output dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
