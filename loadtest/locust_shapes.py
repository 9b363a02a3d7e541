"""How many users a locust test has at each moment: steady, ramp, spike, soak. Knows nothing of requests."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

ShapeName = Literal["steady", "ramp", "spike", "soak"]
SHAPES: tuple[ShapeName, ...] = ("steady", "ramp", "spike", "soak")

RAMP_STEPS = 10
SPIKE_FACTOR = 5
SPIKE_FROM, SPIKE_TO = 0.4, 0.6
SOAK_RISE = 0.05


@dataclass(frozen=True, slots=True)
class Plan:
    """`users` is the usual number, `spawn_rate` users a second, `seconds` the length; 0 means for ever (steady only)."""

    shape: ShapeName
    users: int
    spawn_rate: float
    seconds: float

    def at(self, elapsed: float) -> tuple[int, float] | None:
        """Users and spawn rate at a moment; None when it is over.

        ramp: ten even steps up to `users`. spike: `users`, five times as many from 40 % to 60 % of the time, `users` again.
        soak: up within the first twentieth, then level.
        """
        if self.seconds and elapsed >= self.seconds:
            return None
        share = elapsed / self.seconds if self.seconds else 1.0
        if self.shape == "ramp":
            step = min(RAMP_STEPS, int(share * RAMP_STEPS) + 1)
            return max(1, round(self.users * step / RAMP_STEPS)), self.spawn_rate
        if self.shape == "spike" and SPIKE_FROM <= share < SPIKE_TO:
            return self.users * SPIKE_FACTOR, self.spawn_rate * SPIKE_FACTOR
        if self.shape == "soak":
            return max(1, round(self.users * min(1.0, share / SOAK_RISE))), self.spawn_rate
        return self.users, self.spawn_rate
