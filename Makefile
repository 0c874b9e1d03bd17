# `make demo` and `make test` each make $(VENV), install what they need and do their job.
PYTHON ?= python3
# What pip is given for torch. Options may stand in it too, such as --extra-index-url for the index of a CPU or ROCm build.
TORCH ?= torch==2.13.0 triton==3.7.1
VENV ?= .venv
WORKERS ?= 2
DEMO_ARGS ?=
PYTEST_ARGS ?=

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
# Named after the choice, so that another TORCH means another installation.
TORCH_STAMP := $(VENV)/.torch-$(shell printf '%s' '$(TORCH)' | cksum | cut -d ' ' -f 1)
DEMO_STAMP := $(VENV)/.installed-demo
TEST_STAMP := $(VENV)/.installed-test

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test lint wheel clean

help:  ## List the targets
	@sed -n 's/^\([a-z]*\):.*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 16
	@echo 'Variables: PYTHON=$(PYTHON)  TORCH="$(TORCH)"  VENV=$(VENV)  DEMO_ARGS  PYTEST_ARGS'

demo: $(DEMO_STAMP)  ## Train two small models here and report on them
	$(BIN)/advisor demo $(DEMO_ARGS)

# The workers are the parallelism: more threads in each would only get in one another's way.
# No worker is replaced: xdist may hang or fail itself over a replacement, and then names no test.
test: export OMP_NUM_THREADS ?= 1
test: export TRITON_INTERPRET = 1
test: lint  ## Lint, check types and walls, run the tests
	$(BIN)/pytest -n $(WORKERS) --dist loadfile --max-worker-restart=0 -m 'not gpu' $(PYTEST_ARGS)

lint: $(TEST_STAMP)  ## Style, format, types, import walls
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

wheel: $(TEST_STAMP)  ## Build the wheel into dist/
	$(BIN)/python -m build --wheel

clean:  ## Remove the environment, caches and build output
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' \
	  || { echo 'Python 3.10 or newer is needed: make PYTHON=/path/to/python3'; exit 1; }
	@$(PYTHON) -m venv --clear $(VENV) \
	  || { rm -rf $(VENV); echo 'Python lacks venv (on Debian and Ubuntu: apt install python3-venv)'; exit 1; }

# torch comes first and alone, so that its options do not govern the other packages.
$(TORCH_STAMP): | $(BIN)/python
	@echo 'Installing $(TORCH) into $(VENV) (once; some GB where it is the CUDA build) ...'
	$(PIP) install $(foreach word,$(TORCH),'$(word)')
	@rm -f $(VENV)/.torch-* && touch $@

$(DEMO_STAMP): pyproject.toml $(TORCH_STAMP)
	$(PIP) install --editable '.[lightning]'
	@touch $@

$(TEST_STAMP): pyproject.toml $(TORCH_STAMP)
	$(PIP) install --editable '.[dev]'
	@touch $(DEMO_STAMP) $@
