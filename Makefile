# Every target works on a fresh machine: the environment is made in .venv when it is missing.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
LOCK := docker/requirements.lock
PORT ?= 8000
HOST ?= 127.0.0.1
CHECKPOINT ?= weights/demo

.PHONY: serve test check bench bench-gpu lock clean install
.DEFAULT_GOAL := help

help: ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | expand -t 16

$(VENV)/.runtime: pyproject.toml $(wildcard $(LOCK))
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet $(addprefix -c ,$(wildcard $(LOCK))) -e .
	touch $@

$(VENV)/.installed: $(VENV)/.runtime
	$(BIN)/python -m pip install --quiet $(addprefix -c ,$(wildcard $(LOCK))) -e '.[dev,train,load,tracing]'
	touch $@

install: $(VENV)/.installed ## create the environment

serve: $(VENV)/.runtime ## start the service: PORT=8100 CHECKPOINT=path
	RANKER_CHECKPOINT=$(CHECKPOINT) RANKER_HOST=$(HOST) RANKER_PORT=$(PORT) $(BIN)/python -m app

test: $(VENV)/.installed ## every test that needs no GPU
	$(BIN)/python -m pytest

check: $(VENV)/.installed ## lint, format, types, import direction
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

clean: ## remove the environment and caches
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
