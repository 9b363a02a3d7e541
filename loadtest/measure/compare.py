"""Decides whether one of two servers or commits is faster beyond noise. Alternating blocks expose both to the same drift."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from loadtest.generate.samples import Samples
from loadtest.machine import ROOT, commit, machine
from loadtest.matrix import markdown
from loadtest.measure.figures import Slo
from loadtest.measure.runs import LoadRun, RunSettings
from loadtest.servers.launch import ranking_server
from loadtest.servers.target import Target, TargetError

Verdict = Literal["better", "worse", "no difference shown"]
Blocks = Sequence[dict[str, float]]
Floats = NDArray[np.float64]

SIGNIFICANCE = 0.05
DRAWS = 20_000  # random sign patterns; with up to 14 pairs, all patterns are tried instead
LOWER_IS_BETTER = {"p50_ms": True, "p95_ms": True, "p99_ms": True, "good_share": False}
MIN_BLOCKS = 8  # with fewer, four figures judged at once cannot reach significance


def figures_of(samples: Samples, slo: Slo) -> dict[str, float]:
    """The judged figures of one block. A request without a 200 counts as the slowest, so that quick refusals do not help."""
    latency = 1e3 * samples.latency_seconds
    latency[samples.status != 200] = max(float(latency.max()), slo.latency_ms)
    found = [*np.percentile(latency, [50, 95, 99]).tolist(), float(slo.good(samples).mean())]
    return dict(zip(LOWER_IS_BETTER, found, strict=True))


def compare_blocks(a: Blocks, b: Blocks, smallest_effect: float = 0.03) -> dict[str, Any]:
    """Judge the figures of blocks. Block i of A and block i of B ran right after each other, so pairs cancel drift.

    Returns plain JSON values. Each figure has its medians, `ratio` B / A (geometric mean over blocks, with a 95 % interval), the
    Holm-corrected `p`, and a verdict. A difference needs p below 0.05 *and* a ratio beyond `smallest_effect`. B is worse if any
    figure is worse, and better if any is better and none is worse. Raises ValueError if blocks are too few or unequal in number.
    """
    if len(a) < MIN_BLOCKS or len(a) != len(b):
        raise ValueError(f"at least {MIN_BLOCKS} blocks of each side are needed, and as many of A as of B")
    sides = {figure: np.array([[block[figure] for block in side] for side in (a, b)]) for figure in LOWER_IS_BETTER}
    gaps = {figure: np.diff(np.log(np.maximum(pair, 1e-9)), axis=0)[0] for figure, pair in sides.items()}
    p_values = holm([paired_p(gap) for gap in gaps.values()])
    differences = []
    for (figure, pair), p in zip(sides.items(), p_values, strict=True):
        middle, (low, high) = float(gaps[figure].mean()), bootstrap_interval(gaps[figure])
        verdict: Verdict = "no difference shown"
        if p < SIGNIFICANCE and abs(middle) > np.log1p(smallest_effect):
            verdict = "better" if (middle < 0) == LOWER_IS_BETTER[figure] else "worse"
        values = [*np.median(pair, axis=1).tolist(), *np.exp([middle, low, high]).tolist(), p, verdict]
        names = ("a", "b", "ratio", "ratio_low", "ratio_high", "p", "verdict")
        differences.append({"figure": figure, **dict(zip(names, values, strict=True))})
    found = {difference["verdict"] for difference in differences}
    overall = "worse" if "worse" in found else "better" if "better" in found else "no difference shown"
    facts = {"blocks": len(a), "smallest_effect": smallest_effect, "differences": differences}
    return facts | {"verdict": overall, "warnings": []}


def report(comparison: Mapping[str, Any]) -> str:
    """The table and the verdict as Markdown."""
    rows = []
    for one in comparison["differences"]:
        interval = f"{one['ratio_low']:.3f} … {one['ratio_high']:.3f}"
        figures = [f"{one[name]:.3f}" for name in ("a", "b", "ratio")]
        rows.append([one["figure"], *figures, interval, f"{one['p']:.4f}", one["verdict"]])
    table = markdown(("figure", "A", "B", "B / A", "95 %", "p (Holm)", "verdict"), rows)
    verdict = comparison["verdict"]
    said = f"{comparison['blocks']} blocks a side; below {100 * comparison['smallest_effect']:g} % nothing is judged."
    warnings = "".join(f"Warning: {warning}.\n" for warning in comparison["warnings"])
    told = verdict if verdict == "no difference shown" else f"B is {verdict}"
    return f"{table}\n\n{said}\n{warnings}Verdict: {told}.\n"


def paired_p(differences: Floats) -> float:
    """Two-sided p-value for paired differences `[n]` centred on 0, from a sign-flip test. At least 2 / 2^n."""
    from scipy import stats  # a second to import

    found = stats.permutation_test((differences,), np.mean, permutation_type="samples", n_resamples=DRAWS, rng=1)
    return float(found.pvalue)


def bootstrap_interval(values: Floats) -> tuple[float, float]:
    """95 % percentile bootstrap interval of the mean."""
    from scipy import stats

    found = stats.bootstrap((values,), np.mean, method="percentile", rng=1).confidence_interval
    return float(found.low), float(found.high)


def holm(p_values: list[float]) -> list[float]:
    """Holm's correction (1979) for several figures judged at once, in the order given."""
    adjusted, highest = [0.0] * len(p_values), 0.0
    for rank, index in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        highest = max(highest, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = highest
    return adjusted


def compare_sides(
    a: str,
    b: str,
    settings: RunSettings,
    blocks: int,
    smallest_effect: float,
    checkpoint: Path,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """Measure A and B in turns, with the order changing from pair to pair. A side is a URL, a commit, or `.` for this working tree.

    Both servers run all the time; only one is loaded at a time. Raises TargetError if a side cannot be started.
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
            said = "   ".join(f"{name} {_brief(found[-1])}" for name, found in zip("AB", figures, strict=True))
            say(f"block {block + 1:2d}/{blocks}  {said}")
    comparison = compare_blocks(figures[0], figures[1], smallest_effect)
    if late:
        comparison["warnings"].append(f"the generator was late in {late} of {2 * blocks} blocks")
    return {
        "kind": "comparison", "a": _label(a), "b": _label(b), "machine": machine(), "comparison": comparison,
        "report": f"# {_label(a)} (A) against {_label(b)} (B)\n\n{report(comparison)}", "settings": loads[0].settings.to_dict(),
        "server": {"info": loads[1].info, "info_of_a": loads[0].info}, "blocks": {"a": figures[0], "b": figures[1]},
    }  # fmt: skip


def _brief(figures: dict[str, float]) -> str:
    return f"p50 {figures['p50_ms']:6.2f} ms p99 {figures['p99_ms']:7.2f} ms good {100 * figures['good_share']:6.2f} %"


def _label(side: str) -> str:
    """The name of a side in reports: an address as it is, a commit with its hash."""
    if side == ".":
        return f"working tree ({commit()})"
    return side if side.startswith("http://") else f"{side} ({_git('rev-parse', '--short=12', side)})"


@contextmanager
def _side(name: str, checkpoint: Path) -> Iterator[Target]:
    with ExitStack() as stack:
        if name.startswith("http://"):
            yield Target.parse(name)
        else:
            root = ROOT if name == "." else stack.enter_context(worktree(name))
            yield stack.enter_context(ranking_server(checkpoint=checkpoint, root=root)).target


@contextmanager
def worktree(revision: str) -> Iterator[Path]:
    """A temporary checkout of a revision that shares the repository's objects. Raises TargetError if git cannot create it."""
    with tempfile.TemporaryDirectory(prefix="compare-") as parent:
        path = Path(parent) / "checkout"
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
