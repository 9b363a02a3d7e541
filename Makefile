# Every target works on a fresh machine: the environment is made in .venv when it is missing. Begin with `make serve`.
PYTHON ?= $(shell for p in python3 python3.12 python3.11 python3.13; do \
  "$$p" -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo "$$p" && break; done)
SHELL := /bin/bash
# Python keeps what it compiles: without that, every process that imports torch takes seconds more.
unexport PYTHONDONTWRITEBYTECODE
VENV := .venv
BIN := $(VENV)/bin
PORT ?= $(or $(RANKER_PORT),8000)
HOST ?= $(or $(RANKER_HOST),127.0.0.1)
CHECKPOINT ?= $(or $(RANKER_CHECKPOINT),weights/demo)
# The demo comes with two towers and posts to retrieve; another checkpoint serves what it is given.
DEMO = $(filter weights/demo,$(CHECKPOINT:/=))
RETRIEVAL ?= $(or $(RANKER_RETRIEVAL__CHECKPOINT),$(if $(DEMO),$(wildcard weights/demo-towers)))
CORPUS ?= $(or $(RANKER_RETRIEVAL__CORPUS),$(if $(DEMO),$(wildcard weights/demo-posts)))

.PHONY: help install serve demo demo-loop test test-slow test-ray test-lowest check bench bench-gpu load peers soak lock wheel image clean
.DEFAULT_GOAL := help

help: ## show this list; begin with `make serve`, then open http://127.0.0.1:8000/explore
	@awk -F':.*## ' '/^[a-z-]+:.*## /{printf "  %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "Needs Python 3.11 or newer with its venv module (Debian: apt-get install python3 python3-venv)." >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.serving: pyproject.toml docker/requirements.lock .ci/install | $(BIN)/python
	.ci/install $(VENV) redis
	@touch $@

$(VENV)/.installed: pyproject.toml docker/requirements.lock app/client/pyproject.toml .ci/install | $(BIN)/python
	.ci/install $(VENV) dev,redis,tracing,fetch,served,train,tensorboard,load
	@touch $@ $(VENV)/.serving

install: $(VENV)/.installed ## make the environment in .venv with everything that tests and measurements need

serve: $(VENV)/.serving ## start the service: PORT=8100 HOST=:: CHECKPOINT=path RETRIEVAL=path CORPUS=path
	RANKER_CHECKPOINT="$(CHECKPOINT)" RANKER_RETRIEVAL__CHECKPOINT="$(RETRIEVAL)" RANKER_RETRIEVAL__CORPUS="$(CORPUS)" \
	  RANKER_HOST="$(HOST)" RANKER_PORT="$(PORT)" exec $(BIN)/python -m app

demo: $(VENV)/.installed ## train weights/demo again; takes ten minutes on one core
	$(BIN)/python -m weights train-demo --out weights/demo

demo-loop: $(VENV)/.installed ## run the service for fourteen days of a synthetic world, with a nightly turn each, and draw what it earned
	$(BIN)/python -m loadtest demo-loop $(ARGS)

WORKERS ?= 4
PYTEST = $(BIN)/python -m pytest --numprocesses $(WORKERS) --dist worksteal

DEBIAN = chromium-headless-shell wrk haproxy redis-server prometheus docker-compose default-jdk-headless netcat-openbsd
TESTS = @.ci/debian $(DEBIAN) && mkdir -p .cache && set -o pipefail && $(PYTEST) --ignore=tests/builds

test: $(VENV)/.installed ## run the tests that need no GPU, without the slow ones: about six minutes on two cores
	$(TESTS) -m "not slow" $(ARGS) | tee .cache/test.log

test-slow: $(VENV)/.installed ## run the slow tests: trainings, servers that are flooded and killed, the page in a browser
	$(TESTS) -m slow $(ARGS) | tee .cache/test-slow.log

check: $(VENV)/.installed ## lint and check types, then build the wheel, and the kernels with sanitizers and other compilers
	@.ci/debian clang g++-aarch64-linux-gnu qemu-user
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy docs/examples/*.py
	$(BIN)/lint-imports
	$(PYTEST) tests/builds $(ARGS)

bench: $(VENV)/.installed ## measure the engines and HTTP here: ARGS="--before DIR" takes turns with another checkout
	@.ci/debian wrk
	$(BIN)/python -m loadtest bench $(ARGS)

bench-gpu: ## check and measure one GPU; needs only torch, numpy, safetensors and triton: ARGS="--device cpu --tiny"
	$(or $(wildcard $(BIN)/python),python3) -m loadtest.gpu $(ARGS)

# HOST is where the service listens: perhaps on several addresses, or on all of them. This is where it is asked.
comma := ,
FIRST = $(subst [,,$(subst ],,$(firstword $(subst $(comma), ,$(HOST)))))
REACHED = $(if $(filter * 0.0.0.0,$(FIRST)),127.0.0.1,$(if $(filter ::,$(FIRST)),::1,$(FIRST)))
URL ?= http://$(if $(findstring :,$(REACHED)),[$(REACHED)],$(REACHED)):$(PORT)
load: $(VENV)/.installed ## run locust against a server: URL=http://… SECONDS=60 USERS=24 SHAPE=ramp; WEB=1 for its page on port 8089
	$(BIN)/python -m loadtest load --url "$(URL)" --users $(or $(USERS),24) --seconds $(or $(SECONDS),60) --shape $(or $(SHAPE),steady) $(if $(WEB),--web) $(ARGS)

PEERS := .cache/peers
$(PEERS)/.installed: loadtest/peers/requirements.txt pyproject.toml docker/requirements.lock .ci/install | $(BIN)/python
	$(PYTHON) -m venv $(PEERS)
	@# the versions of the lock, except OpenTelemetry: BentoML needs its own
	grep -E '^[a-z0-9._-]+==' docker/requirements.lock | sed 's/ *\\$$//' | grep -v ^opentelemetry >$(PEERS)/versions.txt
	LOCK=$(PEERS)/versions.txt .ci/install $(PEERS) load --requirements loadtest/peers/requirements.txt
	@touch $@

peers: $(PEERS)/.installed ## compare with a plain FastAPI handler, LitServe and BentoML: the same model, the same traffic
	@.ci/debian wrk
	$(PEERS)/bin/python -m loadtest peers --checkpoint "$(CHECKPOINT)" $(ARGS)

RAY := .cache/ray
$(RAY)/.installed: pyproject.toml docker/requirements.lock .ci/install | $(BIN)/python
	$(PYTHON) -m venv $(RAY)
	@# the versions of the lock, except OpenTelemetry: Ray needs its own
	grep -E '^[a-z0-9._-]+==' docker/requirements.lock | sed 's/ *\\$$//' | grep -v ^opentelemetry >$(RAY)/versions.txt
	LOCK=$(RAY)/versions.txt .ci/install $(RAY) dev,ray,train 'ray[data]' polars
	@touch $@

test-ray: $(RAY)/.installed ## run the tests of Ray Serve, with two replicas, and of the join with Ray Data, in an environment of its own
	RAY_raylet_start_wait_time_s=60 $(RAY)/bin/python -m pytest tests/ops/ray_serve.py tests/ops/ray_join.py $(ARGS)

LOWEST := .cache/lowest
$(LOWEST)/.installed: pyproject.toml app/client/pyproject.toml .ci/install | $(BIN)/python
	$(PYTHON) -m venv $(LOWEST)
	LOCK=/dev/null .ci/install $(LOWEST) dev,redis,tracing,fetch,served,train,tensorboard,load --resolution lowest-direct
	@touch $@

test-lowest: $(LOWEST)/.installed ## run the tests of `make test` with the lowest versions of packages that pyproject.toml allows
	@# old packages warn of each other
	$(LOWEST)/bin/python -m pytest --numprocesses $(WORKERS) --dist worksteal -m "not slow" -W ignore::DeprecationWarning --ignore tests/ops $(ARGS)

soak: $(VENV)/.installed ## run the reliability tests for a minute each: SECONDS=600 for longer
	@.ci/debian wrk haproxy redis-server
	$(BIN)/python -m pytest tests/reliability --duration $(or $(SECONDS),60) --timeout 0 $(ARGS)

lock: $(VENV)/.installed ## resolve docker/requirements.lock again, after a change of dependencies
	.ci/lock $(VENV)

wheel: $(VENV)/.installed ## build the sdist and a wheel with compiled kernels for this processor family, in dist/
	@.ci/debian g++
	$(BIN)/python .ci/wheel dist

image: ## build the CPU image with buildah and run it once: read-only, as its user, without a network; needs root
	@.ci/debian buildah mmdebstrap iproute2 curl
	.ci/image cpu

clean: ## remove the environment and caches
	rm -rf $(VENV) .cache build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
