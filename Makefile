# Each target does its own set-up in .venv; PYTHON picks the interpreter that makes it.
PYTHON ?= python3
BIN := .venv/bin
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: demo test lint bench clean

demo: .venv/.models
	$(BIN)/moe-fusion demo

test: .venv/.test
	$(BIN)/python -m pytest -n 2

lint: .venv/.lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: .venv/.models
	$(BIN)/python benchmarks/pass_cost.py

.venv/.python: constraints.txt pyproject.toml
	$(PYTHON) -m venv .venv
	$(INSTALL) torch==2.13.0
	touch $@

.venv/.models: .venv/.python
	$(INSTALL) -e ".[models]"
	touch $@

.venv/.test: .venv/.python
	$(INSTALL) -e ".[test]"
	touch $@ .venv/.models

.venv/.lint: .venv/.test
	$(INSTALL) -e ".[test,lint]"
	touch $@

clean:
	rm -rf .venv build *.egg-info .pytest_cache .mypy_cache .ruff_cache
