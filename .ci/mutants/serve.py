"""Runs chosen tests in forks of a process that has imported what takes long and is not ours; records which lines they run."""

from __future__ import annotations

import gc
import importlib
import importlib.metadata
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import coverage
import pytest

IMPORTED = (
    "coverage", "fastapi", "httpx", "hypothesis", "msgspec", "numpy", "orjson", "prometheus_client", "pydantic_settings", "structlog",
    "torch", "uvicorn",
)  # fmt: skip
IMPORTED_WHERE_NAMED = (
    "matplotlib.pyplot", "pyarrow.parquet", "sklearn.metrics", "transformers.models.gemma2.modeling_gemma2",
)  # fmt: skip


def serve(imported: Sequence[str]) -> None:
    """Run files of tests in forks of this process, which has imported what takes long and is not ours."""
    for name in imported:
        importlib.import_module(name)
    for plugin in importlib.metadata.entry_points(group="pytest11"):
        plugin.load()
    gc.freeze()  # a fork need not go over what it has from us
    print("ready", flush=True)
    for line in sys.stdin:
        tree, file, *others = json.loads(line)
        for name in IMPORTED_WHERE_NAMED:
            if name.partition(".")[0] in Path(tree, file).read_text():
                importlib.import_module(name)
        if not (child := os.fork()):
            os.setsid()
            os.dup2(os.open(os.devnull, os.O_RDWR), 0), os.dup2(0, 1), os.dup2(0, 2)
            os._exit(run_tests(tree, file, *others))
        print(child, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


def run_tests(tree: str, file: str, chosen: list[str], others: list[str], report: str, recording: str) -> int:
    """Run the `chosen` tests of a file in this order, and those that are new to us; `report` gets a line for all that happens.

    With `recording`, settings of coverage.py: until the end, even if one fails.
    """
    os.chdir(tree)
    sys.path[0] = tree
    os.environ.pop("PYTEST_CURRENT_TEST", None)
    lines = coverage.Coverage(config_file=recording) if recording else None
    places = {test: place for place, test in enumerate(chosen)}

    def write(*words: str | float) -> None:
        with open(report, "a") as log:
            print(json.dumps(words), file=log)

    def begins(phase: str) -> Any:
        @pytest.hookimpl(tryfirst=True)
        def hook(item: pytest.Item) -> None:
            write(item.nodeid, "begins", 0.0)
            if lines:
                lines.switch_context(f"{item.nodeid} ({phase})")

        return hook

    class Watch:
        pytest_runtest_setup, pytest_runtest_call, pytest_runtest_teardown = (
            staticmethod(begins(phase)) for phase in ("setup", "call", "teardown")
        )

        def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
            write(report.nodeid, f"{report.when} {report.outcome}", report.duration)

        @pytest.hookimpl(trylast=True)
        def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
            items[:] = [item for item in items if item.nodeid not in others]
            items.sort(key=lambda item: places.get(item.nodeid, -1))

    if lines:
        os.environ["COVERAGE_PROCESS_START"] = recording  # for the processes that tests start
        lines.start()
    options = ["-q", "-p", "no:cacheprovider", "--assert=plain", *(() if lines else ("-x",))]
    code = pytest.main([*options, file], plugins=[Watch()])
    if lines:
        lines.stop()
        lines.save()
    return int(code)


if __name__ == "__main__":
    serve(sys.argv[1:] or IMPORTED)
