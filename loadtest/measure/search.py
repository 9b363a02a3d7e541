"""Finds the highest rate at which the objective holds, by trials at fixed rates."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from loadtest.machine import machine
from loadtest.measure.figures import in_words
from loadtest.measure.runs import LoadRun, Run, RunSettings
from loadtest.target import Target

TrialVerdict = Literal["holds", "breaks", "generator"]

CALM_SECONDS = 10.0


Trial = Callable[[float], TrialVerdict]
"""Measures at a rate in requests per second; returns whether the objective held."""


@dataclass(frozen=True, slots=True)
class SearchSettings:
    """Raise the rate from `start_rps` by factors of `growth` until it breaks, then halve the gap until it is below `precision`.
    If the first rate breaks, lower it by the same factors until one holds; if one of 1 request/s or less breaks, none is found.

    The result must hold `confirmations` times in all; if it fails, it is lowered by `precision` and tried again.
    `curve`: shares of the capacity to measure afterwards, for the plot of latency against rate.
    """

    start_rps: float = 20.0
    growth: float = 1.6
    precision: float = 0.05
    confirmations: int = 3
    max_trials: int = 30
    curve: tuple[float, ...] = (0.25, 0.5, 0.75, 1.25, 1.6)


@dataclass(slots=True)
class SearchOutcome:
    """Result of a search. `capacity_rps` 0: no rate was confirmed. `limited_by_generator`: the server may sustain more."""

    capacity_rps: float = 0.0
    limited_by_generator: bool = False
    trials: list[tuple[float, TrialVerdict]] = field(default_factory=list)


def search(trial: Trial, settings: SearchSettings) -> SearchOutcome:
    """Find the highest rate that holds, as SearchSettings describes. Uses the server only through `trial`."""
    outcome = SearchOutcome()

    def holds(rate: float) -> bool:
        verdict = trial(rate)
        outcome.trials.append((rate, verdict))
        outcome.limited_by_generator |= verdict == "generator"
        return verdict == "holds"

    def tries_left() -> bool:
        return len(outcome.trials) < settings.max_trials

    low, high = 0.0, settings.start_rps
    while tries_left() and holds(high):
        low, high = high, high * settings.growth
    while low == 0 and tries_left() and high > 1:  # even the first rate was too high
        high /= settings.growth
        if holds(high):
            low, high = high, high * settings.growth
    while low and tries_left() and high / low > 1 + settings.precision:
        middle = (low * high) ** 0.5
        low, high = (middle, high) if holds(middle) else (low, middle)
    held = 1
    while low and tries_left() and held < settings.confirmations:
        if holds(low):
            held += 1
        else:
            low, held = low * (1 - settings.precision), 0
    outcome.capacity_rps = low if held >= settings.confirmations else 0.0
    return outcome


def search_server(
    target: Target, settings: RunSettings, plan: SearchSettings, say: Callable[[str], None]
) -> dict[str, Any]:
    """Search on a real server. Returns plain JSON values: every trial's figures, the settings and the capacity."""
    load = LoadRun(target, settings, say=lambda line: None)
    runs: list[Run] = []

    def trial(rate_rps: float) -> TrialVerdict:
        _calm_down(target)
        run = load.run(rate_rps, seed=1 + len(runs))
        runs.append(run)
        verdict = judge(run)
        say(
            f"trial {len(runs):2d}  {rate_rps:8.1f}/s  {verdict:9s}  good {100 * run.summary['good_share']:6.2f} %  "
            f"{in_words(run.summary['latency_ms'])}  lag p99 {run.meta['generator']['lag_p99_ms']:.2f} ms  "
            f"failures {json.dumps(run.summary['failures'])}"
        )
        return verdict

    outcome = search(trial, plan)
    for share in plan.curve if outcome.capacity_rps else ():
        outcome.trials.append((share * outcome.capacity_rps, trial(share * outcome.capacity_rps)))
    return {
        "kind": "search",
        "settings": load.settings.to_dict() | {"rate_rps": outcome.capacity_rps},
        "plan": asdict(plan),
        "target": target.url,
        "machine": machine(),
        "server": runs[-1].meta["server"],
        "capacity_rps": outcome.capacity_rps,
        "limited_by_generator": outcome.limited_by_generator,
        "trials": [
            {"rate_rps": rate, "verdict": verdict, "generator": run.meta["generator"], "summary": run.summary}
            for (rate, verdict), run in zip(outcome.trials, runs, strict=True)
        ],
    }


def judge(run: Run) -> TrialVerdict:
    """Whether the objective held. If it did not and the generator was too busy or late, the verdict is `generator`."""
    if run.summary["holds_slo"]:
        return "holds"
    return "generator" if run.meta["generator"]["is_bottleneck"] else "breaks"


def _calm_down(target: Target) -> None:
    """Wait until the server's queue is empty after the last trial, at most `CALM_SECONDS`."""
    deadline = time.monotonic() + CALM_SECONDS
    with suppress(OSError, ValueError):  # a server without metrics
        while target.total("ranker_queue_requests") and time.monotonic() < deadline:
            time.sleep(0.1)
