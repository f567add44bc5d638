# Everything a newcomer needs: `make demo` and `make test`. Both set up .venv first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# Two processes, each with whole files, in the order of the folders. Byte code is kept: to rewrite all assertions takes 15 s.
PYTEST := PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

.PHONY: demo test lint types fast slow site clean

$(STAMP): pyproject.toml constraints.txt examples/requirements.txt
	@echo "Installing into $(VENV): some minutes, 2 GB or more (docs/install.md)"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --upgrade pip
	$(BIN)/python -m pip install -q -c constraints.txt torch
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[train,dev,flower,nvflare,docs]'
	$(BIN)/python -m pip install -q --no-deps -r examples/requirements.txt
	@touch $(STAMP)

demo: $(STAMP)
	$(BIN)/fedveil demo

test: $(STAMP) lint types
	$(PYTEST)

# The inner loop: the rooms below the engines, the house, the documentation, and whole runs by the program that spend a budget.
CORE := accounting papers ledger data tasks training release models methods federation configuration statement platforms
fast: $(STAMP)
	$(PYTEST) -x -m 'not slow and not heavy' tests/test_*.py $(CORE:%=tests/%) tests/experiment/test_run_budget.py

# The documentation as a site in build/site, which opens from disk.
site: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

slow: $(STAMP)
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -m slow

# The JavaScript is checked where `npm ci` has been run; nothing is fetched here.
lint: $(STAMP)
	$(BIN)/ruff check src tests benchmarks docs/figures docs/site docs/notebooks examples .ci
	$(BIN)/ruff format --check src tests benchmarks docs/figures docs/site docs/notebooks examples .ci
	@if [ -x node_modules/.bin/eslint ]; then npm run --silent lint; else echo "JavaScript not checked: run npm ci first"; fi

types: $(STAMP)
	$(BIN)/mypy

clean:
	rm -rf $(VENV) node_modules build dist runs .pytest_cache .mypy_cache .ruff_cache
