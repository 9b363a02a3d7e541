"""The figure that replicas are counted by, and a day of requests with it: as many pods as are needed, and few changes.

`PICTURES=docs/images` draws the day.
"""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from app.load import BUSY, HALF_LIFE_SECONDS, MOST, WAIT_SECONDS, Load, load_of, replicas_for
from app.ray.autoscaling import replicas_wanted
from tests.app.fakes import FakeClock

ROOT = Path(__file__).parents[2]
HPA = yaml.safe_load((ROOT / "docker/kubernetes/base/autoscaling.yaml").read_text())["spec"]
RAY = yaml.safe_load((ROOT / "docker/ray/serve.yaml").read_text())["applications"][0]["deployments"][1][
    "autoscaling_config"
]
SERVICE_SECONDS = 0.034  # of one request of 3 000 candidates, as it was measured
STEP = 15  # seconds between two looks of the autoscaler
DAY = 86_400 // STEP
PEAK = 7 * BUSY / SERVICE_SECONDS  # requests a second that seven pods take


def rates() -> np.ndarray[Any, np.dtype[np.float64]]:
    """Requests a second over a day: a quiet night, a busy evening, and noise."""
    hours = np.arange(DAY) * STEP / 3600
    curve = 0.18 + 0.82 * (0.5 - 0.5 * np.cos(2 * np.pi * (hours - 4) / 24)) ** 1.5
    return PEAK * curve * (1 + 0.05 * np.random.default_rng(0).standard_normal(DAY))


def pod(rate: float, pods: int) -> tuple[float, float]:
    """Of each pod: the share of the time that it is busy, and the wait behind the forward that runs (M/D/1)."""
    busy = rate * SERVICE_SECONDS / pods
    if busy >= 1:
        return 1.0, 1.0
    return busy, busy * busy / (1 - busy) * SERVICE_SECONDS / 2


def load(rate: float, pods: int) -> float:
    return load_of(*pod(rate, pods))


def old_signal(rate: float, pods: int) -> float:
    """The queue by the throughput, over 20 ms: a request's mean time in the service."""
    busy, wait = pod(rate, pods)
    return (SERVICE_SECONDS + wait + busy * SERVICE_SECONDS / 2) / 0.02


def needed(rate: float) -> int:
    return next(pods for pods in range(HPA["minReplicas"], 99) if load(rate, pods) <= 1 or pods == HPA["maxReplicas"])


def kubernetes(signal: Callable[[float, int], float], day: np.ndarray[Any, Any]) -> list[int]:
    """The pods over a day, as the autoscaler's documentation says it counts, with the numbers of our file."""
    up, down = HPA["behavior"]["scaleUp"], HPA["behavior"]["scaleDown"]
    [faster], [slower] = up["policies"], down["policies"]
    assert (faster["type"], slower["type"]) == ("Percent", "Pods")
    pods, seen, then = (
        HPA["minReplicas"],
        list[int](),
        deque[int](maxlen=max(1, down["stabilizationWindowSeconds"] // STEP)),
    )
    mean, last_up, last_down = 0.0, -1e9, -1e9
    for step, rate in enumerate(day):
        mean += (signal(rate, pods) - mean) * (1 - 0.5 ** (STEP / HALF_LIFE_SECONDS))
        wanted = replicas_for(pods, [mean])
        then.append(wanted)
        now = step * STEP
        if wanted > pods and now - last_up >= faster["periodSeconds"]:
            pods, last_up = min(wanted, math.ceil(pods * (1 + faster["value"] / 100)), HPA["maxReplicas"]), now
        elif max(then) < pods and now - last_down >= slower["periodSeconds"]:
            pods, last_down = max(max(then), pods - slower["value"], HPA["minReplicas"]), now
        seen.append(pods)
    return seen


def ray(day: np.ndarray[Any, Any]) -> list[int]:
    """The replicas over a day by our policy for Ray Serve, whose delays a decision must outlast."""
    pods, since, asked, mean, seen = RAY["min_replicas"], 0, 0, 0.0, list[int]()
    for step, rate in enumerate(day):
        mean += (load(rate, pods) - mean) * (1 - 0.5 ** (STEP / HALF_LIFE_SECONDS))
        wanted = min(max(replicas_wanted(pods, pods, [mean] * pods), RAY["min_replicas"]), RAY["max_replicas"])
        side = (wanted > pods) - (wanted < pods)
        since, asked = (step, side) if side != asked else (since, asked)
        delay = RAY["upscale_delay_s"] if side > 0 else RAY["downscale_delay_s"]
        if side and (step - since + 1) * STEP >= delay:
            pods, asked = wanted, 0
        seen.append(pods)
    return seen


def changes(pods: list[int]) -> int:
    return sum(one != other for one, other in pairwise(pods))


def off(pods: list[int], day: np.ndarray[Any, Any]) -> int:
    """By how many at most, beside what the mean of the last five minutes needs; the first half hour is the start's."""
    smooth = np.convolve(day, np.ones(20) / 20, "same")
    return max(abs(one - needed(rate)) for one, rate in list(zip(pods, smooth, strict=True))[120:-20])


@pytest.mark.parametrize("by", ["kubernetes", "ray"])
def test_over_a_day_there_are_as_many_pods_as_are_needed(by: str) -> None:
    day = rates()
    pods = kubernetes(load, day) if by == "kubernetes" else ray(day)
    assert off(pods, day) <= 1
    assert changes(pods) <= 12
    assert min(pods) == 2
    assert max(pods) in (7, 8), "noise at the peak"


def test_the_signal_before_would_be_seen() -> None:
    """A request's time in the service cannot fall below its own: the fleet stays at its maximum."""
    day = rates()
    pods = kubernetes(old_signal, day)
    assert off(pods, day) > 1
    assert min(pods[120:]) == HPA["maxReplicas"]


def test_a_pod_that_has_little_to_do_comes_down() -> None:
    day = np.concatenate((np.full(200, PEAK), np.full(2000, 1.0)))
    assert kubernetes(load, day)[-1] == HPA["minReplicas"]
    assert ray(day)[-1] == RAY["min_replicas"]


def test_load_is_one_where_there_is_as_much_to_do_as_should_be() -> None:
    assert load_of(BUSY, 0.0) == 1 == load_of(0.0, WAIT_SECONDS)
    assert load_of(0.3, 0.01) == 0.5
    assert load_of(1.0, 9.0) == MOST
    for running in range(1, 9):
        assert replicas_for(running, [1.0] * running) == running
        assert replicas_for(running, [2.0] * running) == 2 * running
    assert replicas_for(3, [0.0, 0.0, 0.0]) == 1


def test_the_average_forgets_within_minutes_and_counts_the_busier_of_engine_and_loop() -> None:
    clock, busy, wait = FakeClock(), [0.0], [0.0]
    found = Load(clock, lambda: busy[0], lambda: wait[0])
    found.look()
    for _ in range(600):
        clock.now += 0.5
        busy[0] += 0.3
        found.look()
    assert found.value == pytest.approx(1.0, abs=0.01), "60 % of the time"
    wait[0] = 0.03
    for _ in range(600):
        clock.now += 0.5
        found.look()
    assert found.value == pytest.approx(1.5, abs=0.01)
    wait[0] = 0.0
    for _ in range(600):
        clock.now += 0.5
        found.look()
    assert found.value < 0.1


@pytest.mark.skipif("PICTURES" not in os.environ, reason="draws a picture for the pages: PICTURES=docs/images")
def test_pictures() -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    day, hours = rates(), np.arange(DAY) * STEP / 3600
    figure, axes = pyplot.subplots(figsize=(9, 3.2), dpi=110)
    axes.step(hours, kubernetes(old_signal, day), color="#bbbbbb", label="by queue ÷ throughput, as before")
    axes.step(
        hours, [needed(rate) for rate in np.convolve(day, np.ones(20) / 20, "same")], color="#7fb3d5", label="needed"
    )
    axes.step(hours, kubernetes(load, day), color="#c0392b", label="pods, by load")
    axes.set(xlabel="hour of the day", ylabel="pods", xlim=(0, 24), ylim=(0, 17), xticks=range(0, 25, 4))
    axes.legend(frameon=False, loc="center left")
    figure.tight_layout()
    figure.savefig(Path(os.environ["PICTURES"]) / "scaling-day.png")
