"""Whether one of two runs or servers is faster beyond noise. Measures nothing itself."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from loadtest.generate.samples import Samples
from loadtest.measure.figures import Slo
from loadtest.measure.runs import Run

Verdict = Literal["better", "worse", "no difference shown"]
Design = Literal["alternated", "separate"]

Floats = NDArray[np.float64]

SIGNIFICANCE = 0.05
DRAWS = 20_000  # of signs or labels; up to 14 pairs, all patterns of signs are tried instead
FIGURES = ("p50_ms", "p95_ms", "p99_ms", "good_share")
LOWER_IS_BETTER = {"p50_ms": True, "p95_ms": True, "p99_ms": True, "good_share": False}
MIN_BLOCKS = 8  # with fewer, four figures judged at once cannot reach the significance asked for


@dataclass(frozen=True, slots=True)
class Difference:
    """One figure of B against A. `ratio` is B / A, a geometric mean over blocks, with its 95 % interval; `p` is Holm-corrected."""

    figure: str
    a: float
    b: float
    ratio: float
    ratio_low: float
    ratio_high: float
    p: float
    verdict: Verdict


@dataclass(frozen=True, slots=True)
class Comparison:
    """`warnings` say what makes the two hard to compare. `blocks` is how many of each side."""

    design: Design
    blocks: int
    smallest_effect: float
    differences: list[Difference]
    warnings: list[str]

    @property
    def verdict(self) -> Verdict:
        """Worse if any figure is; better if any is and none is worse."""
        found = {difference.verdict for difference in self.differences}
        return "worse" if "worse" in found else "better" if "better" in found else "no difference shown"

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values, the overall verdict included."""
        return asdict(self) | {"verdict": self.verdict}

    def lines(self) -> list[str]:
        """A table for people."""
        rows = [f"{'figure':11s} {'A':>10s} {'B':>10s} {'B / A':>8s} {'95 %':>16s} {'p':>7s}  verdict"]
        for one in self.differences:
            interval = f"{one.ratio_low:.3f} … {one.ratio_high:.3f}"
            rows.append(
                f"{one.figure:11s} {one.a:10.3f} {one.b:10.3f} {one.ratio:8.3f} {interval:>16s} {one.p:7.4f}  {one.verdict}"
            )
        rows += [f"warning: {warning}" for warning in self.warnings]
        rows.append(
            f"verdict: B is {self.verdict}" if self.verdict != "no difference shown" else f"verdict: {self.verdict}"
        )
        return rows


def figures_of(samples: Samples, slo: Slo) -> dict[str, float]:
    """The judged figures of one block. A request that was not answered 200 counts as the slowest: a quick refusal is no speed."""
    latency = 1e3 * samples.latency_seconds
    latency[samples.status != 200] = max(float(latency.max()), slo.latency_ms)
    p50, p95, p99 = np.percentile(latency, [50, 95, 99])
    return {
        "p50_ms": float(p50),
        "p95_ms": float(p95),
        "p99_ms": float(p99),
        "good_share": float(slo.good(samples).mean()),
    }


def compare_blocks(
    a: list[dict[str, float]], b: list[dict[str, float]], design: Design, smallest_effect: float = 0.03
) -> Comparison:
    """Judge figures of blocks. `alternated`: block i of A and of B ran right after each other, so pairs cancel the machine's drift.

    A difference needs a Holm-corrected p below 0.05 *and* a ratio beyond `smallest_effect`. Raises ValueError for too few blocks.
    """
    if min(len(a), len(b)) < MIN_BLOCKS or (design == "alternated" and len(a) != len(b)):
        raise ValueError(
            f"at least {MIN_BLOCKS} blocks of each side are needed, as many of A as of B where they alternate"
        )
    logs = [(_logs(a, figure), _logs(b, figure)) for figure in FIGURES]
    p_values = holm([paired_p(b - a) if design == "alternated" else unpaired_p(a, b) for a, b in logs])
    differences = [
        _difference(figure, pair, p, design, smallest_effect, a, b)
        for figure, pair, p in zip(FIGURES, logs, p_values, strict=True)
    ]
    return Comparison(design, min(len(a), len(b)), smallest_effect, differences, [])


def compare_runs(a: Run, b: Run, blocks: int = 10, smallest_effect: float = 0.05) -> Comparison:
    """Two runs taken one after the other, cut into blocks of time. Weaker than `alternated`: drift between them looks like an effect."""
    sides = [[figures_of(part, a.slo) for part in cut(run.samples, blocks)] for run in (a, b)]
    comparison = compare_blocks(sides[0], sides[1], "separate", smallest_effect)
    comparison.warnings.extend(_mismatches(a, b))
    comparison.warnings.append("the runs were not alternated: what the machine did meanwhile is part of the difference")
    return comparison


def cut(samples: Samples, blocks: int) -> list[Samples]:
    """Equal spans of due time, in order."""
    edges = np.linspace(0, float(samples.due.max()) + 1e-9, blocks + 1)
    parts = [samples.where((samples.due >= low) & (samples.due < high)) for low, high in pairwise(edges)]
    return [part for part in parts if len(part)]


def paired_p(differences: Floats) -> float:
    """Two-sided p-value that paired differences `[n]` centre on 0, by flipping their signs. At least 2 / 2^n."""
    found = stats.permutation_test((differences,), np.mean, permutation_type="samples", n_resamples=DRAWS, rng=1)
    return float(found.pvalue)


def unpaired_p(first: Floats, second: Floats) -> float:
    """Two-sided p-value that two sets of blocks have one mean, by random relabelling."""

    def gap(a: Floats, b: Floats, axis: int) -> Floats:
        difference: Floats = a.mean(axis=axis) - b.mean(axis=axis)
        return difference

    return float(stats.permutation_test((first, second), gap, n_resamples=DRAWS, rng=1).pvalue)


def bootstrap_interval(values: Floats) -> tuple[float, float]:
    """95 % percentile bootstrap of the mean."""
    found = stats.bootstrap((values,), np.mean, method="percentile", rng=1).confidence_interval
    return float(found.low), float(found.high)


def holm(p_values: list[float]) -> list[float]:
    """Holm's correction (1979) for several figures judged at once, in the order given."""
    adjusted, highest = [0.0] * len(p_values), 0.0
    for rank, index in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        highest = max(highest, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = highest
    return adjusted


def _logs(blocks: list[dict[str, float]], figure: str) -> Floats:
    return np.log(np.maximum([block[figure] for block in blocks], 1e-9))


def _difference(
    figure: str,
    logs: tuple[Floats, Floats],
    p: float,
    design: Design,
    smallest_effect: float,
    a: list[dict[str, float]],
    b: list[dict[str, float]],
) -> Difference:
    first, second = logs
    gaps = second - first if design == "alternated" else second - first.mean()
    low, high = bootstrap_interval(gaps)
    if design == "separate":  # A's own spread belongs to the interval as well
        spread = bootstrap_interval(first - first.mean())
        low, high = low - spread[1], high - spread[0]
    ratio = float(np.exp(gaps.mean()))
    verdict: Verdict = "no difference shown"
    if p < SIGNIFICANCE and abs(np.log(ratio)) > np.log1p(smallest_effect):
        verdict = "better" if (ratio < 1) == LOWER_IS_BETTER[figure] else "worse"
    middle = [float(np.median([block[figure] for block in side])) for side in (a, b)]
    return Difference(figure, middle[0], middle[1], ratio, float(np.exp(low)), float(np.exp(high)), p, verdict)


def _mismatches(a: Run, b: Run) -> list[str]:
    """Everything but the commit should be equal."""
    machines, ours, theirs = (a.meta["machine"], b.meta["machine"]), dict(a.meta["settings"]), dict(b.meta["settings"])
    for settings in (ours, theirs):
        settings["traffic"] = settings["traffic"] | {"seed": None}  # other people, alike
    warnings = [f"machine.{key} differs" for key in ("host", "cpu", "cores") if machines[0][key] != machines[1][key]]
    keys = ("rate_rps", "seconds", "arrivals", "clients", "slo", "traffic")
    warnings += [f"settings.{key} differs" for key in keys if ours[key] != theirs[key]]
    late = [side for side, run in (("A", a), ("B", b)) if run.meta["generator"]["is_bottleneck"]]
    return warnings + [f"the generator was the bottleneck in {side}" for side in late]
