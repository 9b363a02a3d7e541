# Every target works on a fresh machine: the environment is made in .venv when it is missing.
# Python: the first of these that is 3.11 or newer and has venv; PYTHON=/path/to/python3 chooses another.
PYTHON ?= $(shell for p in python3 python3.12 python3.11 python3.13; do \
  "$$p" -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo "$$p" && break; done)
VENV := .venv
BIN := $(VENV)/bin
LOCKS := $(addprefix docker/,requirements.lock torch-cpu.lock torch-cuda.lock development.lock)
# An index with the build of torch to install: https://pypi.org/simple has the one for CUDA. Empty: as the machine is.
TORCH_INDEX ?=
PORT ?= 8000
HOST ?= 127.0.0.1
CHECKPOINT ?= weights/demo
# What /retrieve and /recommend serve: the demo's towers and posts with the demo, nothing with another checkpoint unless both are named.
# Several processes retrieve nothing.
DEMO = $(if $(filter-out 0,$(RANKER_FRONTS)),,$(filter weights/demo,$(CHECKPOINT)))
RETRIEVAL ?= $(if $(DEMO),$(wildcard weights/demo-towers))
CORPUS ?= $(if $(DEMO),$(wildcard weights/demo-posts))

.PHONY: emulators chromium haproxy nginx envoy istio screenshots wrk soak hostile-plot overload-plot help install serve test test-long test-light test-ray demo bench bench-front bench-retrieve bench-offline bench-train bench-cluster bench-gpu compare-gpu kernels profile load load-open load-search load-report load-compare peers test-bits fuzz check hooks audit mutants files lock sbom clean
.DEFAULT_GOAL := help

help: ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | expand -t 16

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

# Debian's prometheus and promtool, unpacked below .cache; the tests that need them say so where this fails.
.cache/prometheus/.fetched: .ci/fetch-prometheus
	@.ci/fetch-prometheus .cache/prometheus

install: $(VENV)/.installed ## create the environment in .venv with everything

serve: $(VENV)/.runtime ## start the service: PORT=8100 CHECKPOINT=path RETRIEVAL=path CORPUS=path HOST=127.0.0.1
	RANKER_CHECKPOINT="$(CHECKPOINT)" RANKER_RETRIEVAL__CHECKPOINT="$(RETRIEVAL)" RANKER_RETRIEVAL__CORPUS="$(CORPUS)" RANKER_HOST="$(HOST)" RANKER_PORT="$(PORT)" exec $(BIN)/python -m app

emulators: ## from Debian: a cross compiler for aarch64, qemu and clang; tests that need them are skipped without
	@{ command -v aarch64-linux-gnu-g++ && command -v qemu-aarch64 && command -v clang++; } >/dev/null || \
	  { apt-get -qq update && apt-get -qq install -y --no-install-recommends g++-aarch64-linux-gnu libc6-dev-arm64-cross qemu-user clang; } \
	  || echo "the emulators could not be installed"

# A worker more than cores, since many tests wait; of one thread each, since threads of several workers wait for each other.
WORKERS ?= 3

test: $(VENV)/.installed .cache/prometheus/.fetched emulators wrk haproxy nginx envoy ## every test that needs no GPU
	@$(BIN)/python .ci/suite $(WORKERS)

test-long: $(VENV)/.installed wrk haproxy nginx ## the long forms of properties that no other target runs: a quarter of an hour
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

demo: $(VENV)/.installed ## train weights/demo again, the same bytes on one machine: minutes of one core
	$(BIN)/python -m weights train-demo --out weights/demo

bench: $(VENV)/.installed ## targets table, cost curves, history; one JSON line: ARGS="--vectors avx2"
	$(BIN)/python -m loadtest.bench $(ARGS)

kernels: ## the table of all kernels, compiled here without a card: registers, spills, copies, matrix and special instructions
	$(or $(wildcard $(BIN)/python),python3) -m model.split.kernels.build $(ARGS)

compare-gpu: ## two files of the GPU bench, figure by figure: BEFORE=… AFTER=…
	$(or $(wildcard $(BIN)/python),python3) -m loadtest.gpu.compare $(BEFORE) $(AFTER)

bench-gpu: ## the first half hour on one card, in guarded phases, with torch, numpy, safetensors and triton alone: ARGS='--device cpu --tiny'
	$(or $(wildcard $(BIN)/python),python3) -m loadtest.gpu $(ARGS)

bench-front: $(VENV)/.installed wrk ## the table of the thin path in one alternated run, appended to the history: ARGS="--rounds 9 --before DIR"
	$(BIN)/python -m loadtest.bench.front $(ARGS)

bench-cluster: $(VENV)/.installed haproxy nginx ## two to three processes behind HAProxy and nginx: who moves, what is lost, what the hop costs
	$(BIN)/python -m loadtest.soak --only cluster $(ARGS)

bench-offline: $(VENV)/.installed ## scoring of logs beside the engine alone, and its memory: ARGS="--rows 10000000"
	$(BIN)/python -m loadtest.bench.offline $(ARGS)

bench-train: $(VENV)/.installed ## training on two processes beside one, killed and resumed, beside a bare loop, and from a log on disk: ARGS="--steps 200"
	$(BIN)/python -m loadtest.bench.train $(ARGS)

bench-retrieve: $(VENV)/.installed ## the exact search beside faiss and the memory's bandwidth: ARGS="--threads 1 --approximate 0"
	$(BIN)/python -m loadtest.bench.retrieve $(ARGS)

wrk: ## the C load generator, from Debian; without it what needs it says so
	@command -v wrk >/dev/null || apt-get install -y --no-install-recommends wrk || echo "wrk could not be installed"

haproxy: ## the balancer, from Debian; without it its tests are skipped
	@{ command -v haproxy || test -x /usr/sbin/haproxy; } >/dev/null || apt-get install -y --no-install-recommends haproxy \
	  || echo "haproxy could not be installed"

nginx: ## the other balancer, from Debian; without it its tests are skipped
	@{ command -v nginx || test -x /usr/sbin/nginx; } >/dev/null || apt-get install -y --no-install-recommends nginx-light \
	  || echo "nginx could not be installed"

# Apart from the environment: its modules have names that other packages have too.
envoy: $(VENV)/.installed ## Envoy's messages, from PyPI, which its file is read into; without them that test is skipped
	@test -e .cache/envoy/.fetched || { $(BIN)/python -m pip install --quiet --no-input --no-deps --target .cache/envoy xds-protos==1.85.0 \
	  && touch .cache/envoy/.fetched; } || echo "Envoy's messages could not be fetched"

istio: ## the types of Istio's and Envoy Gateway's objects, from npm; without them their test is skipped, as it is in CI
	@test -e .cache/istio/.fetched || { mkdir -p .cache/istio && npm install --silent --no-audit --no-fund --ignore-scripts --prefix .cache/istio typescript@5.9.3 \
	  @kubernetes-models/istio@3.0.1 @kubernetes-models/gateway-api@2.0.0 @kubernetes-models/envoy-gateway@2.0.0 && touch .cache/istio/.fetched; } \
	  || echo "the types of Istio's objects could not be fetched"

chromium: ## the browser of the pages' tests, from Debian; without it they are skipped
	@command -v chromium >/dev/null || { apt-get -qq update && DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends chromium; } \
	  || echo "chromium could not be installed: the tests of the pages will be skipped"

screenshots: $(VENV)/.installed chromium ## the page in light, dark and on a phone, as PNGs in docs/images
	SCREENSHOTS=docs/images $(BIN)/python -m pytest tests/e2e/test_explore.py -k pictures

profile: $(VENV)/.installed wrk ## where each microsecond of a request goes, as Markdown
	$(BIN)/python -m loadtest.profile

test-bits: $(VENV)/.installed ## the long form of the isolation property: COMPOSITIONS=100000 ARGS="--preset all --backend auto" or "--vectors avx2"
	$(BIN)/python -m loadtest.bits --compositions $(or $(COMPOSITIONS),100000) $(ARGS)

fuzz: $(VENV)/.installed ## odd requests, REQUESTS=1000000 of them, for SECONDS=3600 at most: in process, or ARGS=--sockets
	$(BIN)/python -m loadtest.fuzz --requests $(or $(REQUESTS),1000000) --seconds $(or $(SECONDS),3600) --checkpoint "$(CHECKPOINT)" $(ARGS)

# Load tests: a server has to run (make serve); load-open and load-search start one with URL=start. More: ARGS='--help'.
URL ?= http://$(HOST):$(PORT)
LOCUST = $(BIN)/python -m locust -f loadtest/locustfile.py --host $(URL) --users $(or $(USERS),24) --spawn-rate $(or $(SPAWN),4)
RESULTS := loadtest/results

load: $(VENV)/.installed ## locust's page on port 8089, or HEADLESS=1: USERS=24 SHAPE=ramp|spike|soak SECONDS=60
	@mkdir -p $(RESULTS)/locust
	$(LOCUST) --shape $(or $(SHAPE),steady) $(if $(HEADLESS),--headless --only-summary --run-time $(or $(SECONDS),60)s \
	  --csv $(RESULTS)/locust/run --html $(RESULTS)/locust/report.html,$(if $(SECONDS),--run-time $(SECONDS)s)) $(ARGS)

load-open: $(VENV)/.installed ## open loop at RATE=100 for SECONDS=30, with a report
	$(BIN)/python -m loadtest open --url $(URL) --rate $(or $(RATE),100) --seconds $(or $(SECONDS),30) $(ARGS)

load-search: $(VENV)/.installed ## the highest rate at which 99 % are answered within 50 ms
	$(BIN)/python -m loadtest search --url $(URL) $(ARGS)

load-report: $(VENV)/.installed ## the report of a stored run again: RUN=loadtest/results/open
	$(BIN)/python -m loadtest report $(or $(RUN),$(RESULTS)/open)

load-compare: $(VENV)/.installed ## two commits, servers or stored runs, in turns: A=HEAD~1 B=.
	$(BIN)/python -m loadtest compare $(or $(A),HEAD) $(or $(B),.) --checkpoint "$(CHECKPOINT)" $(ARGS)

soak: $(VENV)/.installed wrk haproxy nginx ## long forms of the reliability matrix, one JSON line a row: SECONDS=1800; ARGS="--only ..." for some
	@failed=0; share() { expr $(or $(SECONDS),1800) \* $$1 / 100; }; \
	$(BIN)/python -m loadtest.soak --seconds $(if $(ARGS),$(or $(SECONDS),1800),$$(share 75)) $(ARGS) || failed=1; \
	if [ -z '$(ARGS)' ]; then \
	  $(BIN)/python -m loadtest.fuzz --requests 1000000000 --seconds $$(share 10) || failed=1; \
	  $(BIN)/python -m loadtest.fuzz --sockets --requests 1000000000 --seconds $$(share 5) || failed=1; \
	  $(BIN)/python -m loadtest.fuzz --only-paths --requests 1000000 --seconds $$(share 5) || failed=1; \
	  $(BIN)/python -m loadtest.fuzz.checkpoints $$(share 5) || failed=1; \
	fi; exit $$failed

hostile-plot: $(VENV)/.installed ## memory and latency under hostile clients of every kind as a PNG: SECONDS=60
	$(BIN)/python -m loadtest.soak.hostile --seconds $(or $(SECONDS),60) $(ARGS)

overload-plot: $(VENV)/.installed ## offered load against goodput and p99 as a PNG: SECONDS=90
	$(BIN)/python -m loadtest.soak.plot --seconds $(or $(SECONDS),90) $(ARGS)

.cache/peers/.installed: loadtest/peers/requirements.txt pyproject.toml $(LOCKS) | $(BIN)/python
	$(BIN)/python -m venv .cache/peers
	.ci/install .cache/peers/bin/python development "$(TORCH_INDEX)"
	.cache/peers/bin/python -m pip install --quiet --no-input -r loadtest/peers/requirements.txt
	@touch $@

peers: .cache/peers/.installed ## the same traffic and model behind FastAPI alone, LitServe and BentoML
	.cache/peers/bin/python -m loadtest peers --checkpoint "$(CHECKPOINT)" $(ARGS)

check: $(VENV)/.installed ## lint, format, types, directions of imports: what a commit must pass
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

hooks: $(VENV)/.installed ## run make check before every commit
	$(BIN)/pre-commit install

# Exit code 75: no advisories can be had from here. One package of many that could not be looked up is a failure.
audit: $(VENV)/.installed ## known vulnerabilities in the locked dependencies
	$(BIN)/python .ci/audit

mutants: $(VENV)/.installed ## change one decision at a time, run the tests that reach it: SAMPLE=200 SEED=0 ARGS="--changed main --seconds 290"
	$(BIN)/python .ci/mutants --sample $(or $(SAMPLE),200) --seed $(or $(SEED),0) $(ARGS)

files: ## the lists of files and decisions in docs/, from the modules' first sentences
	$(PYTHON) .ci/list-files

lock: $(VENV)/.installed ## resolve the lock files in docker/ anew, with hashes
	.ci/lock $(BIN)

sbom: $(VENV)/.installed ## bills of materials of both images' packages, CycloneDX, in build/
	.ci/sbom $(BIN)

clean: ## remove the environment and caches
	rm -rf $(VENV) .cache build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
