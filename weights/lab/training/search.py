"""Settings to try beside the chosen ones, for `train --search`. Trains nothing."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import fields, replace

from weights.lab.training.settings import TrainSettings

CHOICES = {
    "hidden_user_share": (0.1, 0.5, 0.9), "hidden_event_share": (0.0, 0.2, 0.4), "counts_share": (0.0, 0.5, 0.8, 1.0),
}  # fmt: skip
FACTORS = {"epochs": (0.5, 1.0, 2.0), "learning_rate": (0.25, 0.5, 1.0, 2.0), "weight_decay": (0.3, 1.0, 3.0)}
"""What the chosen value is multiplied by."""


def trials(settings: TrainSettings, count: int, fixed: Collection[str] = ()) -> list[TrainSettings]:
    """`settings`, and up to `count - 1` others drawn from CHOICES and FACTORS by their seed; those named in `fixed` stay as they are.

    All are different, so there may be fewer. This is random search (Bergstra and Bengio, 2012, https://jmlr.org/papers/v13/bergstra12a.html).
    """
    from sklearn.model_selection import ParameterGrid, ParameterSampler

    values = CHOICES | {name: tuple(getattr(settings, name) * factor for factor in FACTORS[name]) for name in FACTORS}
    space = {name: list(options) for name, options in values.items() if name not in fixed}
    draws = ParameterSampler(space, min(count, len(ParameterGrid(space))), random_state=settings.seed % 2**32)
    drawn = [replace(settings, **values) for values in draws]
    return [settings, *(trial for trial in drawn if trial != settings)][:count]


def difference(settings: TrainSettings, others: TrainSettings) -> dict[str, float]:
    """The settings that differ from `others`, by name."""
    names = [field.name for field in fields(TrainSettings)]
    return {name: getattr(settings, name) for name in names if getattr(settings, name) != getattr(others, name)}
