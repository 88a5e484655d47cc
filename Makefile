# Each target does its own set-up in .venv; PYTHON picks the interpreter that makes it.
PYTHON ?= python3
BIN := .venv/bin
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: demo test lint docs bench clean browser

demo: .venv/.models
	$(BIN)/moe-fusion demo

test: .venv/.test browser
	$(BIN)/python -m pytest -n 2

lint: .venv/.lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

docs: .venv/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

bench: .venv/.models
	$(BIN)/python benchmarks/pass_cost.py

# The report's page is tested in Chromium, which pip cannot install.
browser:
	@for name in chromium chromium-browser google-chrome; do \
		command -v $$name >/dev/null && exit 0; \
	done; \
	if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
		export DEBIAN_FRONTEND=noninteractive; \
		apt-get -qq update && apt-get -qq install -y --no-install-recommends chromium >/dev/null; \
	else \
		echo "no chromium on the path: the page's tests are skipped (in CI they fail)"; \
	fi

.venv/.python: constraints.txt pyproject.toml
	$(PYTHON) -m venv .venv
	$(INSTALL) torch==2.13.0
	touch $@

.venv/.models: .venv/.python
	$(INSTALL) -e ".[models]"
	touch $@

.venv/.test: .venv/.python
	$(INSTALL) -e ".[test]"
	touch $@ .venv/.models .venv/.docs

.venv/.docs: .venv/.python
	$(INSTALL) -e ".[docs]"
	touch $@

.venv/.lint: .venv/.test
	$(INSTALL) -e ".[test,lint]"
	touch $@

clean:
	rm -rf .venv build site *.egg-info .pytest_cache .mypy_cache .ruff_cache
