"""Measures two servers, or two commits, in alternated blocks, so that drift of the machine hits both alike. Judges nothing itself."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from loadtest.machine import ROOT, commit, machine
from loadtest.measure.compare import Comparison, compare_blocks, figures_of
from loadtest.measure.runs import LoadRun, Run, RunSettings
from loadtest.servers.launch import ranking_server
from loadtest.servers.target import Target, TargetError

Say = Callable[[str], None]


def compare_sides(
    a: str, b: str, settings: RunSettings, blocks: int, smallest_effect: float, checkpoint: Path, say: Say
) -> dict[str, Any]:
    """Measure A and B in turns, the order within a pair changing. Each side is a URL, a commit, or `.` for this working tree.

    Both servers stay up all the while; only one is loaded at a time. Raises TargetError where a side cannot be started.
    """
    with ExitStack() as stack:
        targets = [stack.enter_context(_side(name, checkpoint)) for name in (a, b)]
        loads = [LoadRun(target, settings, say=lambda line: None) for target in targets]
        figures: list[list[dict[str, float]]] = [[], []]
        late = 0
        for block in range(blocks):
            for side in (0, 1) if block % 2 == 0 else (1, 0):
                run = loads[side].run(seed=1 + block)
                figures[side].append(figures_of(run.samples, settings.slo))
                late += run.meta["generator"]["is_bottleneck"]
            say(f"block {block + 1:2d}/{blocks}  {_line('A', figures[0][-1])}   {_line('B', figures[1][-1])}")
        comparison = compare_blocks(figures[0], figures[1], "alternated", smallest_effect)
        if late:
            comparison.warnings.append(f"the generator was late in {late} of {2 * blocks} blocks")
        details = {
            "settings": loads[0].settings.to_dict(),
            "server": {"info": loads[1].info, "info_of_a": loads[0].info},
            "blocks": {"a": figures[0], "b": figures[1]},
        }
    return _result(_label(a), _label(b), comparison) | details


def stored(a: str, b: str, comparison: Comparison) -> dict[str, Any]:
    """The same shape for two runs from disk."""
    runs = [Run.load(Path(side)) for side in (a, b)]
    first, second = (f"{side} ({run.meta['machine']['commit']})" for side, run in zip((a, b), runs, strict=True))
    return _result(first, second, comparison) | {"server": runs[1].meta["server"], "settings": runs[1].meta["settings"]}


def _result(a: str, b: str, comparison: Comparison) -> dict[str, Any]:
    return {
        "format": 1,
        "kind": "comparison",
        "a": a,
        "b": b,
        "machine": machine(),
        "comparison": comparison.to_dict(),
        "lines": comparison.lines(),
    }


def _line(name: str, figures: dict[str, float]) -> str:
    return f"{name} p50 {figures['p50_ms']:6.2f} ms p99 {figures['p99_ms']:7.2f} ms good {100 * figures['good_share']:6.2f} %"


def _label(side: str) -> str:
    """What a report calls a side: addresses as they are, commits with their hash."""
    if side == ".":
        return f"working tree ({commit()})"
    return side if side.startswith("http://") else f"{side} ({_git('rev-parse', '--short=12', side)})"


@contextmanager
def _side(name: str, checkpoint: Path) -> Iterator[Target]:
    if name.startswith("http://"):
        yield Target.parse(name)
    elif name == ".":
        with ranking_server(checkpoint=checkpoint) as server:
            yield server.target
    else:
        with (
            tempfile.TemporaryDirectory(prefix="compare-") as parent,
            _worktree(name, Path(parent) / "checkout") as root,
            ranking_server(checkpoint=checkpoint, root=root) as server,
        ):
            yield server.target


@contextmanager
def _worktree(revision: str, path: Path) -> Iterator[Path]:
    """A second checkout that shares the repository's objects and leaves this one alone."""
    _git("worktree", "add", "--detach", "--quiet", str(path), revision)
    try:
        yield path
    finally:
        _git("worktree", "remove", "--force", str(path))


def _git(*arguments: str) -> str:
    finished = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True)
    if finished.returncode:
        raise TargetError(f"git {' '.join(arguments[:2])} failed: {finished.stderr.strip()}")
    return finished.stdout.strip()
