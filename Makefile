# Everything a newcomer needs: `make demo` and `make test`. Both set up .venv first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: demo test lint types fast slow docs clean

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --upgrade pip
	$(BIN)/python -m pip install -q -c constraints.txt torch
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[dev]'
	@touch $(STAMP)

demo: $(STAMP)
	$(BIN)/fedveil demo

test: $(STAMP) lint types
	$(BIN)/python -m pytest

fast: $(STAMP)
	$(BIN)/python -m pytest -x

slow: $(STAMP)
	$(BIN)/python -m pytest -m slow

# The JavaScript is checked where `npm ci` has been run; nothing is fetched here.
lint: $(STAMP)
	$(BIN)/ruff check src tests benchmarks docs/figures
	$(BIN)/ruff format --check src tests benchmarks docs/figures
	@if [ -x node_modules/.bin/eslint ]; then npm run --silent lint; else echo "JavaScript not checked: run npm ci first"; fi

types: $(STAMP)
	$(BIN)/mypy

clean:
	rm -rf $(VENV) node_modules runs .pytest_cache .mypy_cache .ruff_cache
