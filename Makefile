# Every target works on a fresh machine: the environment is made in .venv when it is missing.
# Python: the first of these that is 3.11 or newer and has venv; PYTHON=/path/to/python3 chooses another.
PYTHON ?= $(shell for p in python3 python3.12 python3.11 python3.13; do \
  "$$p" -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo "$$p" && break; done)
VENV := .venv
BIN := $(VENV)/bin
LOCKS := $(addprefix docker/,requirements.lock torch-cpu.lock torch-cuda.lock development.lock)
# An index with the build of torch to install: https://pypi.org/simple has the one for CUDA. Empty: as the machine is.
TORCH_INDEX ?=
# What is set in the environment for the service comes before the defaults here.
PORT ?= $(or $(RANKER_PORT),8000)
HOST ?= $(or $(RANKER_HOST),127.0.0.1)
CHECKPOINT ?= $(or $(RANKER_CHECKPOINT),weights/demo)
# What /retrieve and /recommend serve: what is set in the environment; else the demo's towers and posts with the demo, and nothing with
# another checkpoint.
DEMO = $(filter weights/demo,$(CHECKPOINT))
RETRIEVAL ?= $(or $(RANKER_RETRIEVAL__CHECKPOINT),$(if $(DEMO),$(wildcard weights/demo-towers)))
CORPUS ?= $(or $(RANKER_RETRIEVAL__CORPUS),$(if $(DEMO),$(wildcard weights/demo-posts)))

.PHONY: help install serve demo test test-quick test-changed test-long test-light test-ray check mutants bench bench-gpu kernels profile load peers soak fuzz files lock audit sbom site wheel image clean
.DEFAULT_GOAL := help

help: ## this list
	@awk -F':.*## ' '/^## /{print "\n" substr($$0, 4)} /^[a-z% -]+:.*## /{printf "  %-38s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

## The service

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "Needs Python 3.11 or newer with its venv module." \
	  "Debian and Ubuntu: apt-get install python3 python3-venv. Another one: make PYTHON=/path/to/python3 ..." >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.runtime: pyproject.toml $(LOCKS) | $(BIN)/python
	@echo "Installing the service into $(VENV): once, half a minute where the packages are near."
	.ci/install $(BIN)/python service "$(TORCH_INDEX)"
	@touch $@

$(VENV)/.installed: $(VENV)/.runtime app/client/pyproject.toml
	.ci/install $(BIN)/python development "$(TORCH_INDEX)"
	@touch $@

install: $(VENV)/.installed ## create the environment in .venv with everything

serve: $(VENV)/.runtime ## start the service: PORT=8100 CHECKPOINT=path RETRIEVAL=path CORPUS=path HOST=127.0.0.1
	RANKER_CHECKPOINT="$(CHECKPOINT)" RANKER_RETRIEVAL__CHECKPOINT="$(RETRIEVAL)" RANKER_RETRIEVAL__CORPUS="$(CORPUS)" RANKER_HOST="$(HOST)" RANKER_PORT="$(PORT)" exec $(BIN)/python -m app

demo: $(VENV)/.installed ## train weights/demo again, the same bytes on one machine: minutes of one core
	$(BIN)/python -m weights train-demo --out weights/demo

## Tests

# Debian's prometheus and promtool, unpacked below .cache; the tests that need them say so where this fails.
.cache/prometheus/.fetched: .ci/fetch-prometheus
	@.ci/fetch-prometheus .cache/prometheus

# More workers than cores, since many tests wait; of one thread each, since threads of several workers wait for each other.
WORKERS ?= 4

test: $(VENV)/.installed .cache/prometheus/.fetched ## every test that needs no GPU
	@.ci/debian chromium-headless-shell wrk haproxy nginx-light redis-server g++-aarch64-linux-gnu libc6-dev-arm64-cross qemu-user clang; .ci/fetch-types envoy $(BIN)/python
	@$(BIN)/python .ci/suite $(WORKERS)

test-quick: $(VENV)/.installed ## all but the files and folders that take longest, for between two edits: a minute and a half
	$(BIN)/python -m pytest --quick --numprocesses $(WORKERS) --dist loadfile $(ARGS)

test-long: $(VENV)/.installed ## the long forms of properties that no other target runs: half an hour
	@.ci/debian wrk haproxy nginx-light redis-server
	$(BIN)/python -m pytest -m long $(ARGS)

test-light: ## what needs no torch, in an environment without it: PYTHON=python3.12
	$(PYTHON) .ci/test-light

# Ray beside what is installed: an environment of its own that sees the other one, since Ray is a fifth of a gigabyte.
.cache/ray/.installed: pyproject.toml $(LOCKS) | $(VENV)/.installed
	$(BIN)/python -m venv .cache/ray
	$(BIN)/python -c 'import site; print(site.getsitepackages()[0])' >"$$(.cache/ray/bin/python -c 'import site; print(site.getsitepackages()[0])')/service.pth"
	$(BIN)/python -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["ray"], "ray[data]", sep="\n")' >.cache/ray/wanted
	.cache/ray/bin/python -m pip install --quiet --no-input --disable-pip-version-check -r .cache/ray/wanted
	@touch $@

test-ray: .cache/ray/.installed ## the service on a real Ray Serve, two replicas, and offline scoring on Ray Data: a few minutes, half a gigabyte a process; prints its figures
	PYTHONPATH="$(CURDIR)" .cache/ray/bin/python -m pytest tests/app/ray tests/weights/scoring/test_adapters.py $(ARGS)

test-changed: $(VENV)/.installed ## the tests that reach what has changed, by the records of make mutants: SINCE=main
	$(BIN)/python .ci/mutants/changed.py $(or $(SINCE),main)

check: $(VENV)/.installed ## lint, format, types, directions of imports, types of the page, links of the pages: what a commit must pass
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	@.ci/debian npm; .ci/fetch-types page
	[ ! -e .cache/page/.fetched ] || node .cache/page/node_modules/typescript/bin/tsc --project app/explore/jsconfig.json
	$(BIN)/python .ci/site build/site

site: $(VENV)/.installed ## the documentation as a searchable site in build/site, which also opens as a file
	$(BIN)/python .ci/site build/site

mutants: $(VENV)/.installed ## change a decision or drop wiring, run the tests that reach it: SAMPLE=200 SEED=0 ARGS="--only app/http --kinds guard,with"
	$(BIN)/python .ci/mutants --sample $(or $(SAMPLE),200) --seed $(or $(SEED),0) $(ARGS)

## Measurements: `python -m loadtest --help` shows all there are, ARGS=--help the options of one

bench: $(VENV)/.installed ## engines beside the dense definition, the service around them; one JSON line: ARGS="--vectors avx2"
	$(BIN)/python -m loadtest bench $(ARGS)

bench-% load-%: $(VENV)/.installed ## a command by its name: bench-front ARGS="--rounds 9 --before DIR", bench-retrieve, load-open ARGS="--rate 100", ...
	@.ci/debian wrk haproxy redis-server
	$(BIN)/python -m loadtest $(patsubst bench-%,%,$(@:load-%=%)) $(ARGS)

bench-gpu: ## the first half hour on one card, in guarded phases, with torch, numpy, safetensors and triton alone: ARGS='--device cpu --tiny'
	$(or $(wildcard $(BIN)/python),python3) -m loadtest.gpu $(ARGS)

kernels: ## the table of all kernels, compiled here without a card: registers, spills, copies, matrix and special instructions
	$(or $(wildcard $(BIN)/python),python3) -m model.split.kernels.build $(ARGS)

profile: $(VENV)/.installed ## where each microsecond of a request goes, as Markdown
	$(BIN)/python -m loadtest profile $(ARGS)

URL ?= http://$(HOST):$(PORT)
LOCUST = $(BIN)/python -m locust -f loadtest/locustfile.py --host $(URL) --users $(or $(USERS),24) --spawn-rate $(or $(SPAWN),4)
RESULTS := loadtest/results

load: $(VENV)/.installed ## locust's page on port 8089, or HEADLESS=1, on a running server: USERS=24 SHAPE=ramp|spike|soak PAYLOAD=production SECONDS=60
	@mkdir -p $(RESULTS)/locust
	$(LOCUST) --shape $(or $(SHAPE),steady) --payload $(or $(PAYLOAD),mix) $(if $(HEADLESS),--headless --only-summary --run-time $(or $(SECONDS),60)s \
	  --csv $(RESULTS)/locust/run --html $(RESULTS)/locust/report.html,$(if $(SECONDS),--run-time $(SECONDS)s)) $(ARGS)

.cache/peers/.installed: loadtest/peers/requirements.txt pyproject.toml $(LOCKS) | $(BIN)/python
	$(BIN)/python -m venv .cache/peers
	.ci/install .cache/peers/bin/python development "$(TORCH_INDEX)"
	.cache/peers/bin/python -m pip install --quiet --no-input -r loadtest/peers/requirements.txt
	@touch $@

peers: .cache/peers/.installed ## the same traffic and model behind FastAPI alone, LitServe and BentoML
	.cache/peers/bin/python -m loadtest peers --checkpoint "$(CHECKPOINT)" $(ARGS)

soak: $(VENV)/.installed ## long forms of the reliability matrix, one JSON line a row: SECONDS=1800; ARGS="--only NAME" for some
	@.ci/debian wrk haproxy nginx-light redis-server
	@failed=0; share() { expr $(or $(SECONDS),1800) \* $$1 / 100; }; loadtest="$(BIN)/python -m loadtest"; \
	$$loadtest soak --seconds $(if $(ARGS),$(or $(SECONDS),1800),$$(share 75)) $(ARGS) || failed=1; \
	if [ -z '$(ARGS)' ]; then \
	  $$loadtest fuzz --requests 1000000000 --seconds $$(share 10) || failed=1; \
	  $$loadtest fuzz --sockets --requests 1000000000 --seconds $$(share 5) || failed=1; \
	  $$loadtest fuzz --only-paths --requests 1000000 --seconds $$(share 5) || failed=1; \
	  $$loadtest fuzz --checkpoints --seconds $$(share 5) || failed=1; \
	fi; exit $$failed

fuzz: $(VENV)/.installed ## odd requests, REQUESTS=1000000 of them, for SECONDS=3600 at most: in process, or ARGS=--sockets
	$(BIN)/python -m loadtest fuzz --requests $(or $(REQUESTS),1000000) --seconds $(or $(SECONDS),3600) --checkpoint "$(CHECKPOINT)" $(ARGS)

## Files, packages, releases

files: ## the lists of files and decisions in docs/, from the modules' first sentences
	$(PYTHON) .ci/list-files

lock: $(VENV)/.installed ## resolve the lock files in docker/ anew, with hashes
	.ci/lock $(BIN)

# Exit code 75: no advisories can be had from here. One package of many that could not be looked up is a failure.
audit: $(VENV)/.installed ## known vulnerabilities in the locked dependencies
	$(BIN)/python .ci/audit

sbom: $(VENV)/.installed ## bills of materials of both images' packages, CycloneDX, in build/
	.ci/sbom $(BIN)

wheel: $(VENV)/.installed ## the sdist and the wheels with compiled kernels, in dist/: REPOSITORY=https://... for absolute links; then its test
	@.ci/debian g++ g++-aarch64-linux-gnu libc6-dev-arm64-cross
	$(BIN)/python .ci/wheel dist
	DIST=dist $(BIN)/python -m pytest tests/test_distribution.py

image: ## the CPU image by buildah on a base of Debian's packages, and a run of it: read-only, as its user, without a network; as root, 2 GB
	@.ci/debian buildah mmdebstrap iproute2 curl
	.ci/image cpu

clean: ## remove the environment and caches
	rm -rf $(VENV) .cache build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
