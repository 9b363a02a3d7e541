"""Knows which test reaches which line and how long each takes, and runs tests in a tree: see `serve`, where they run."""

from __future__ import annotations

import ast
import contextlib
import json
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import coverage
from decisions import ROOT, digest, sources

WORK = (ROOT / ".cache/mutants").resolve()  # as coverage.py names files
HANGS_AFTER = 4.0  # times what the same tests took when they were recorded, and this many seconds more:
SLACK_SECONDS = 40.0
MOST_FILES = 12
RECORD_SECONDS = 900.0
CALLED = " (call)"  # ends the context of what a test runs itself; see RECORDING
CALLERS = {  # the module through which C++ is reached: it is tried by the tests that run a function of it
    "app/request/native/": "app/request/codec.py",
    "model/native/search.cpp": "model/native/search.py",
    "model/native/": "model/native/kernel.py",
}
WHOLE = {  # tried whole, whatever lines they run: they read the source, or run it in other processes
    "tests/app/telemetry/test_events.py", "tests/app/test_errors.py", "tests/model/test_kernels_build.py",
}  # fmt: skip
ALSO = {  # what looks at a folder besides the tests of its modules
    "app/": ("tests/app/telemetry/test_events.py", "tests/app/test_errors.py"),
    "app/engine/": ("tests/app/service/test_retrieval.py", "tests/app/service/test_shadow.py"),
    "app/http/observe.py": ("tests/app/telemetry/test_logs.py",),
    "app/server/": (
        "tests/reliability/test_b11_budgets.py", "tests/e2e/test_process.py", "tests/reliability/test_b4_slow.py",
    ),
    "app/service/reload.py": ("tests/app/fronts/test_supervisor.py",),
    "model/inputs.py": ("tests/app/fronts/test_wire.py",),
    "model/ranking.py": ("tests/app/request/test_scoring.py",),
    "model/retrieval/corpus.py": ("tests/weights/corpus/test_texts.py", "tests/weights/corpus/test_store.py"),
    "model/retrieval/engine.py": ("tests/app/service/test_retrieval.py",),
    "model/retrieval/inputs.py": (
        "tests/weights/corpus/test_records.py", "tests/app/fronts/test_wire.py", "tests/app/service/test_retrieval.py",
    ),
    "model/split/kernels/": ("tests/model/test_kernels.py",),
    "model/split/": ("tests/model/test_fusion.py", "tests/model/test_engines.py", "tests/model/test_kernels_build.py"),
    "model/synthetic.py": ("tests/model/test_native.py",),
    "weights/corpus/": tuple(f"tests/weights/corpus/test_{name}.py" for name in ("changes", "compaction", "store")),
    "weights/format/": ("tests/weights/test_checkpoint.py", "tests/weights/corpus/test_store.py"),
}  # fmt: skip
RECORDING = """
[run]
data_file = {data}
parallel = true
context = ${{PYTEST_CURRENT_TEST-}}
patch = _exit, fork
include = {tree}/app/*, {tree}/model/*, {tree}/weights/*
"""


def concerns(root: Path, file: str) -> list[str]:
    """Test files for a file: its own, those of tests/elsewhere.toml, in `app` all of its folder; then those that name it most."""
    module = caller(file)
    package, _, rest = module.partition("/")
    own = f"tests/{Path(module).with_name(f'test_{Path(module).stem}.py')}"
    elsewhere = tomllib.loads((root / "tests/elsewhere.toml").read_text())[package]
    folder = (root / own).parent.glob("test_*.py") if package == "app" else ()
    near = [
        own,
        *(test for place, test in elsewhere.items() if rest == place or (place[-1] == "/" and rest.startswith(place))),
        *(test for place, tests in ALSO.items() if file.startswith(place) for test in tests),
        *sorted(str(test.relative_to(root)) for test in folder),
    ]
    above, _, name = module.removesuffix(".py").replace("/", ".").removesuffix(".__init__").rpartition(".")
    naming = re.compile(rf"{re.escape(above)}\.{name}\b|from {re.escape(above)} import .*\b{name}\b")
    if module == CALLERS["model/native/"]:
        naming = re.compile("native|create_engine")
    named = Counter(
        {path: len(naming.findall(path.read_text())) for path in (root / "tests" / package).rglob("test_*.py")}
    )
    far = [path for path, count in sorted(named.items(), key=lambda found: (-found[1], found[0])) if count]
    found = dict.fromkeys([*near, *(str(path.relative_to(root)) for path in far)])
    known = [test for test in found if (root / test).is_file() and not test.endswith("sanitizers.py")]
    return known[: max(MOST_FILES, len(near))]


def caller(file: str) -> str:
    """The Python module whose lines stand for this file: itself, or what calls the C++."""
    return next((module for place, module in CALLERS.items() if file.startswith(place) and file[-3:] != ".py"), file)


def lines_of(source: str, number: int | None) -> tuple[set[int], bool]:
    """The lines of the innermost statement at a line, without those of statements in it, and whether a function holds it.

    Without a line: those of all functions.
    """
    statements = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.stmt)]  # outer ones first
    covered = {node: set(range(node.lineno, (node.end_lineno or 0) + 1)) for node in statements}
    functions = {node for node in statements if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
    if number is None:
        return {line for node in functions for inner in node.body for line in covered[inner]}, True
    holding = [node for node in statements if number in covered[node]]
    if not holding:  # such as a decorator
        return {number}, False
    *outer, innermost = holding
    within = [covered[node] for node in ast.walk(innermost) if node in covered and node is not innermost]
    return covered[innermost].difference(*within) | {number}, not functions.isdisjoint(outer)


@dataclass
class Record:
    """What a file of tests did without a change: `seconds` of each test's own part, `shared_seconds` of all the rest."""

    data: str
    digests: dict[str, str]
    seconds: dict[str, float]
    shared_seconds: float

    def reaching(self, tree: Path, file: str, *numbers: int) -> list[str]:
        """The tests that reach lines of a file, quickest first: all of them where one is run at import or while something is set up."""
        data = coverage.CoverageData(self.data)
        data.read()
        module = caller(file)
        contexts, source = data.contexts_by_lineno(str(tree / module)), (tree / module).read_text()
        found = [lines_of(source, number if module == file else None) for number in numbers]
        lines, in_function = set().union(*(own for own, _ in found)), all(within for _, within in found)
        reached = {context for line in lines for context in contexts.get(line, ())}
        called = {context.removesuffix(CALLED) for context in reached if context.endswith(CALLED)}
        near = {context.removesuffix(CALLED) for found in contexts.values() for context in found}
        if len(called) < len(reached) or (contexts and not in_function):
            called = set(self.seconds)
        return sorted(called & self.seconds.keys(), key=lambda test: (test not in near, self.seconds[test]))


class Tests:
    """Runs tests in a tree and knows what each did when it was recorded."""

    def __init__(self, *imported: str) -> None:
        """Its processes share what is `imported`, by default what takes long in this project's tests."""
        environment = os.environ | {"HOME": str(WORK / "home"), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
        environment.pop("PYTHONPATH", None)  # it may name this tree, whose modules are not those that are changed
        command = [sys.executable, str(Path(__file__).with_name("serve.py")), *imported]
        self.server = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
        )
        assert self.server.stdout is not None
        self.server.stdout.readline()
        self.records: dict[str, Record] = {}
        self.sound: dict[tuple[str, ...], bool] = {}
        self.unsound: set[str] = set()  # tests that fail without a change, or in other company

    def close(self) -> None:
        """End the process."""
        with self.server:
            pass  # its pipes are closed, and it is waited for

    def run(
        self, tree: Path, file: str, limit_seconds: float, chosen: Iterable[str] = (), recording: str = ""
    ) -> tuple[bool, list[tuple[str, str, float]]]:
        """Whether these tests of a file, or all, were green within the time; what happened, as `run_tests` tells it."""
        assert self.server.stdin is not None
        assert self.server.stdout is not None
        report, chosen = tree.parent / f"report.{os.getpid()}", list(chosen)
        report.write_text("")
        others = [] if recording else list(self.records[f"{tree} {file}"].seconds.keys() - set(chosen))
        self.server.stdin.write(json.dumps([str(tree), file, chosen, others, str(report), recording]).encode() + b"\n")
        child = int(self.server.stdout.readline())
        select.select([self.server.stdout], [], [], limit_seconds)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)  # what hangs, and servers that a broken test left behind
        green = int(self.server.stdout.readline()) in (0, 5)  # 5: nothing was collected
        return green, [tuple(json.loads(line)) for line in report.read_text().splitlines()]

    def record(self, tree: Path, file: str, about: Iterable[str]) -> Record:
        """The record of a file of tests: made anew where it, or one of the files that it is asked about, has changed."""
        home, name = tree.parent / "records" / file.replace("/", "."), f"{tree} {file}"
        if name not in self.records and (home / "record").exists():
            kept = Record(**json.loads((home / "record").read_text()))
            if kept.data == str(home / "lines"):  # a copied one names files of another tree: nothing would reach a line
                self.records[name] = kept
        now = {path: digest(tree / path) for path in [file, *about]}
        if name not in self.records or not now.items() <= self.records[name].digests.items():
            shutil.rmtree(home, ignore_errors=True)
            home.mkdir(parents=True)
            (home / "settings").write_text(RECORDING.format(data=home / "lines", tree=tree))
            began = time.monotonic()
            _, happened = self.run(tree, file, RECORD_SECONDS, recording=str(home / "settings"))
            seconds = dict.fromkeys((test for test, _, _ in happened), 0.0)
            for test, what, took in happened:
                seconds[test] += took * what.startswith("call")
            shared_seconds = time.monotonic() - began - sum(seconds.values())
            whole = coverage.Coverage(config_file=str(home / "settings"))
            whole.combine()
            whole.save()
            digests = now | {str(path.relative_to(tree)): digest(path) for path in sources(tree)}
            self.records[name] = Record(str(home / "lines"), digests, seconds, shared_seconds)
            (home / "record").write_text(json.dumps(asdict(self.records[name])))
            print(f"recorded {len(seconds)} tests in {time.monotonic() - began:.0f} s: {file}", flush=True)
        return self.records[name]

    def first_failing(self, tree: Path, file: str, chosen: list[str]) -> str | None:
        """The first of these tests that fails, or that does not end in time."""
        record = self.records[f"{tree} {file}"]
        seconds = record.shared_seconds + sum(record.seconds[test] for test in chosen)
        green, happened = self.run(tree, file, SLACK_SECONDS + HANGS_AFTER * seconds, chosen)
        last = (test for test, _, _ in reversed(happened) if test in chosen)
        return None if green else next(last, chosen[-1])

    def are_sound(self, tree: Path, file: str, chosen: list[str]) -> bool:
        """Whether these tests, in this order, pass without a change."""
        if (which := (str(tree), *chosen)) not in self.sound:
            self.sound[which] = self.first_failing(tree, file, chosen) is None
        return self.sound[which]
