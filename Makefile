.DEFAULT_GOAL := help
PYTHON ?= python3
BIN := .venv/bin
export TOKENIZERS_PARALLELISM := false

.PHONY: help quickstart demo test test-slow lint format bench clean

help:  ## List the targets
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "make %-12s %s\n", $$1, $$2}'

# torch goes first and alone, so that nothing that depends on it can choose another build.
.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet $$(grep '^torch==' constraints.txt)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[quickstart]'
	touch $@

.venv/installed-demo: .venv/installed
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[demo]'
	touch $@

.venv/installed-dev: .venv/installed
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

quickstart: .venv/installed  ## Fine-tune a real encoder at 12 granularities and ask it questions (5 to 10 minutes)
	$(BIN)/python -m scripts.quickstart

demo: .venv/installed-demo  ## Open a page to try what the quickstart made
	$(BIN)/python -m scripts.demo

test: .venv/installed-dev  ## Run the tests
	HF_HUB_OFFLINE=1 $(BIN)/python -m pytest --numprocesses auto --maxprocesses 4 --dist loadfile

test-slow: .venv/installed-dev  ## Run the tests that take minutes
	HF_HUB_OFFLINE=1 $(BIN)/python -m pytest -m slow

lint: .venv/installed-dev  ## Check style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: .venv/installed-dev  ## Rewrite the code in the project's style
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: .venv/installed-dev  ## Run the benchmarks
	for file in benchmarks/[a-z]*.py; do echo "== $$file"; $(BIN)/python -m benchmarks.$$(basename $$file .py) || exit 1; done

clean:  ## Remove the environment and what runs left behind
	rm -rf .venv build runs *.egg-info
