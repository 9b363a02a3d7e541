"""For all tests: the loop of coroutines and the order of files."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

LONG = (  # the files that take longest, the longest first
    "reliability/test_endings.py",
    "reliability/test_fronts.py",
    "reliability/test_f8_logs.py",
    "app/fronts/test_supervisor.py",
    "reliability/test_cluster.py",
    "model/test_kernels_build.py",
    "reliability/test_posts.py",
    "reliability/test_f9_excess.py",
    "weights/training/test_processes.py",
    "e2e/test_watch.py",
    "model/test_sanitizers.py",
    "ops/test_live.py",
    "weights/commands/test_training.py",
    "test_distribution.py",
    "test_project.py",
    "weights/training/test_towers.py",
    "model/test_emulated.py",
    "model/test_native_failures.py",
    "model/test_engines.py",
    "e2e/test_explore.py",
    "loadtest/gpu/test_checks.py",
    "weights/training/test_demo_taste.py",
    "weights/training/test_demo_retrieval.py",
    "weights/training/test_world.py",
    "weights/training/test_evaluate.py",
    "ci/test_mutants.py",
    "ops/test_rules.py",
    "weights/test_excessive_checkpoints.py",
    "loadtest/test_locustfile.py",
    "e2e/test_client_package.py",
)


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


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Workers take files in this order: none of them is left with a long one at the end."""
    places = {Path(__file__).parent / name: place for place, name in enumerate(LONG)}
    items.sort(key=lambda item: places.get(item.path, len(places)))
