"""For all tests: the loop of coroutines and the order of files."""

from __future__ import annotations

import functools
import gc
import os
import sys
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

WHOLE = (
    "reliability/",
    "e2e/",
    "docker/",
    "ops/",
    "ci/",
    "loadtest/",
    "weights/training/",
)  # whole processes, images, runs
LONG = (  # the files that take longest, the longest first; of the first four one compiles the kernel of this machine, for all
    "model/test_kernels_build.py",
    "test_distribution.py",
    "loadtest/fuzz/test_run.py",
    "model/test_sanitizers.py",
    "e2e/test_explore_first.py",
    "reliability/test_endings.py",
    "reliability/test_cluster.py",
    "e2e/test_explore.py",
    "model/test_kernels.py",
    "e2e/test_notebook.py",
    "weights/training/test_processes.py",
    "weights/commands/test_training.py",
    "ops/test_rules.py",
    "app/fronts/test_supervisor.py",
    "test_drills.py",
    "e2e/test_conformance.py",
    "loadtest/gpu/test_checks.py",
    "ci/test_site.py",
    "reliability/test_rows.py",
    "loadtest/test_locustfile.py",
    "model/test_fusion.py",
    "e2e/test_explore_why.py",
    "model/test_emulated.py",
    "reliability/test_f8_logs.py",
    "reliability/test_replicas.py",
    "loadtest/fuzz/test_slowest.py",
    "test_project.py",
    "ci/test_mutants.py",
    "reliability/test_posts.py",
    "loadtest/report/test_pages.py",
    "reliability/test_fronts.py",
    "model/test_engines.py",
    "e2e/test_way.py",
    "reliability/test_b11_budgets.py",
    "app/http/test_grpc_server.py",
    "reliability/test_b4_slow.py",
    "weights/training/test_world.py",
    "weights/training/test_evaluate.py",
    "reliability/test_f9_excess.py",
    "weights/commands/test_explain.py",
    "model/test_native.py",
    "app/client/test_client.py",
    "reliability/test_b15_crowds.py",
    "app/server/test_process.py",
    "app/request/test_codec_sanitizers.py",
    "model/retrieval/test_engine.py",
    "loadtest/generate/test_generator.py",
    "weights/test_excessive_checkpoints.py",
    "weights/explain/test_panels.py",
    "loadtest/generate/test_traffic.py",
    "e2e/test_client_package.py",
    "e2e/test_process.py",
    "model/test_cache.py",
    "weights/training/test_towers.py",
    "model/test_split.py",
    "ops/test_live.py",
    "weights/scoring/test_job.py",
    "ci/test_suite.py",
    "weights/corpus/test_compaction.py",
    "app/http/test_asgi.py",
    "app/request/test_rules.py",
    "model/test_parity.py",
    "app/request/test_cost.py",
    "model/test_native_failures.py",
    "weights/corpus/test_changes.py",
    "e2e/test_watch.py",
    "weights/training/test_demo_retrieval.py",
    "weights/training/test_demo_taste.py",
    "test_imports.py",
    "app/request/test_schema.py",
)


sys.modules["rfc3987_syntax"] = None  # type: ignore[assignment]  # jsonschema imports it, for texts that we have none of: two seconds
# Read when torch is loaded: two of its threads that spin while they wait for each other take twenty times the processor time of the work.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
hypothesis.settings.register_profile("shared machine", deadline=None)  # a neighbour's load is no fault of an example
hypothesis.settings.load_profile("shared machine")


@pytest.fixture(autouse=True, scope="module")
def threads_of_torch() -> Iterator[None]:
    """An engine sets them for the whole process: each file leaves as many as it has found, for bits depend on them."""
    torch = sys.modules.get("torch")
    before = 0 if torch is None else torch.get_num_threads()
    yield
    if torch is not None:
        torch.set_num_threads(before)


@pytest.fixture(autouse=True, scope="session")
def tracebacks_are_plain() -> None:
    """In logs that nobody has configured: to write the values of variables takes seconds where one of them holds a model."""
    if structlog := sys.modules.get("structlog"):
        structlog.get_config()["processors"][-1].exception_formatter = structlog.dev.plain_traceback


@pytest.fixture(autouse=True, scope="session")
def what_libraries_make_for_each_call_is_made_once() -> None:
    """httpx reads all certificates of the world for each client, typer puts all commands together for each call: 20 ms each."""
    for module, name in (("httpx._transports.default", "create_ssl_context"), ("typer.testing", "_get_command")):
        if known := sys.modules.get(module):
            setattr(known, name, functools.cache(getattr(known, name)))


@pytest.fixture(autouse=True, scope="session")
def processors_are_measured_once() -> None:
    """By each library of the kernel, not for each engine: that takes as long as a hundred forwards of a small model."""
    if kernel := sys.modules.get("model.native.kernel"):
        measure, found = kernel.Kernel.probe, {}

        def probe(self: Any) -> dict[str, float]:
            path = self.library._name
            found[path] = found.get(path) or measure(self)
            return found[path]

        kernel.Kernel.probe = probe


@pytest.fixture(autouse=True, scope="module")
def servers_are_forked(request: pytest.FixtureRequest) -> Iterator[None]:
    """Of a process that has imported torch, except in modules that say `STARTED_ANEW = True`: those start them as operators do."""
    launch = sys.modules.get("loadtest.servers.launch")
    if launch is None or getattr(request.module, "STARTED_ANEW", False):
        yield
        return
    from tests.zygote import zygote

    zygote.prepare()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "start_process", zygote.start)
        yield


@pytest.fixture
def no_collector() -> Iterator[None]:
    """What is freed now is freed by the last reference; the garbage collector looks at old objects once in a long while."""
    gc.disable()
    yield
    gc.enable()


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--quick", action="store_true", help="leave out the files and folders that take longest")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What is imported and collected stays to the end: no collection of garbage, of which engines ask for many, looks at it."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Workers take files in this order: none of them is left with a long one at the end."""
    here = Path(__file__).parent
    places = {here / name: place for place, name in enumerate(LONG)}
    items.sort(key=lambda item: places.get(item.path, len(places)))
    if config.getoption("--quick"):
        long = {item for item in items if item.path in places or str(item.path.relative_to(here)).startswith(WHOLE)}
        config.hook.pytest_deselected(items=list(long))
        items[:] = [item for item in items if item not in long]
