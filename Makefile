.DEFAULT_GOAL := help
PYTHON ?= python3
BIN := .venv/bin
export TOKENIZERS_PARALLELISM := false

.PHONY: help quickstart demo pretrain-mini test test-default test-e2e test-slow test-versions test-loading lint format docs wheel bench bench-quick clean

help:  ## List the targets
	@grep -E '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "make %-13s %s\n", $$1, $$2}'

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

quickstart: .venv/installed  ## Fit a real encoder, measure, fine-tune and query it (about 10 minutes)
	$(BIN)/m3bert quickstart

demo: .venv/installed-demo  ## Open a page to try the quickstart's encoder
	$(BIN)/m3bert demo

pretrain-mini: .venv/installed-dev  ## Pretrain a small m3BERT through its three stages on local text (about 20 minutes)
	$(BIN)/python -m benchmarks.pretrain_mini

test: .venv/installed-dev  ## Run the tests
	HF_HUB_OFFLINE=1 $(BIN)/python -m pytest --numprocesses auto --maxprocesses 4 --dist loadfile

test-default: .venv/installed-dev  ## Run the numeric tests with the kernels that every processor has
	ATEN_CPU_CAPABILITY=default HF_HUB_OFFLINE=1 $(BIN)/python -m pytest --numprocesses auto --maxprocesses 4 \
		--dist loadfile tests/trainers tests/exits tests/modeling_m3bert tests/test_frozen.py

test-e2e: .venv/installed-dev  ## Check the wheel in an empty environment, the quickstart, the README and the studies
	HF_HUB_OFFLINE=1 $(BIN)/python -m pytest -m slow \
		tests/test_wheel.py::test_a_strangers_first_commands tests/scripts/test_quickstart.py \
		tests/benchmarks/test_start.py \
		tests/test_docs.py::test_the_first_steps_of_the_readme_run_for_a_stranger \
		"tests/test_docs.py::test_the_commands_and_the_code_of_a_page_run[README.md]"

test-slow: .venv/installed-dev  ## Run the tests that take minutes
	HF_HUB_OFFLINE=1 $(BIN)/python -m pytest -m slow --numprocesses auto --maxprocesses 4 --dist loadfile

# The lowest versions that pyproject.toml allows, and the newest; torch stays as it is.
.venv-lowest/installed .venv-newest/installed: pyproject.toml .venv/installed-dev
	$(PYTHON) -m venv $(@D)
	grep '^torch==' constraints.txt > $(@D)/torch.txt
	$(BIN)/uv pip compile --quiet --extra dev --constraint $(@D)/torch.txt --output-file $(@D)/versions.txt \
		--resolution $(if $(findstring lowest,$@),lowest-direct,highest) pyproject.toml
	$(@D)/bin/pip install --quiet --requirement $(@D)/torch.txt
	$(@D)/bin/pip install --quiet --constraint $(@D)/versions.txt --editable '.[dev]'
	touch $@

test-versions: .venv-lowest/installed .venv-newest/installed  ## Run the tests with the lowest and the newest versions
	for python in 3.12 3.13; do \
		$(BIN)/uv pip compile --quiet --extra dev --constraint .venv-newest/torch.txt --python-version $$python \
			--output-file .venv-newest/python-$$python.txt pyproject.toml || exit 1; \
		$(BIN)/ruff check --quiet --select E9,F --target-version py$$(echo $$python | tr -d .) . || exit 1; \
	done
	for which in lowest newest; do \
		HF_HUB_OFFLINE=1 .venv-$$which/bin/python -m pytest --numprocesses auto --maxprocesses 4 --dist loadfile \
			|| exit 1; \
	done

# transformers-sentence_transformers of the same time. They share one torch.
LOADING := 4.57.6-5.1.2 5.0.0-5.2.2 5.5.4-5.4.1 5.12.1-5.5.1 5.18.0-6.1.0 5.24.0-6.2.0
SITE_PACKAGES := 'import sysconfig; print(sysconfig.get_path("purelib"))'

.venv-loading/torch/installed: constraints.txt
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/pip install --quiet $$(grep '^torch==' constraints.txt) numpy scikit-learn
	touch $@

.venv-loading/%/installed: .venv-loading/torch/installed
	$(PYTHON) -m venv $(@D)
	$(<D)/bin/python -c $(SITE_PACKAGES) > $$($(@D)/bin/python -c $(SITE_PACKAGES))/torch.pth
	$(@D)/bin/pip install --quiet transformers==$(firstword $(subst -, ,$*)) \
		sentence-transformers==$(lastword $(subst -, ,$*))
	touch $@

test-loading: .venv/installed-dev $(LOADING:%=.venv-loading/%/installed)  ## Load what we write in older and newer versions
	rm -rf build/loading
	$(BIN)/python -m tests.loading.write build/loading
	failed=0; for versions in $(LOADING); do \
		HF_HUB_OFFLINE=1 HF_HOME=build/loading/$$versions \
			.venv-loading/$$versions/bin/python -I tests/loading/check.py build/loading || failed=1; \
	done; exit $$failed

lint: .venv/installed-dev  ## Check style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: .venv/installed-dev  ## Rewrite the code in the project's style
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: .venv/installed-dev  ## Check the words of the documentation and build it into build/site
	$(BIN)/python docs/words.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

wheel: .venv/installed-dev  ## Build the wheel into dist
	$(BIN)/python -m build --wheel

bench: .venv/installed-dev  ## Run the benchmarks (an hour or two)
	$(BIN)/python -m benchmarks

bench-quick: .venv/installed-dev  ## Run the benchmarks at small sizes (10 minutes at most)
	$(BIN)/python -m benchmarks --quick

clean:  ## Remove the environment and the output of runs
	rm -rf .venv .venv-lowest .venv-newest .venv-loading build dist runs *.egg-info
