"""Draws a training run's learning rate and losses by step, as a PNG."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

CURVE_NAME = "curve.png"
SMOOTH_STEPS = 50  # a batch's loss is mostly noise: the line is the mean over this many


def draw_curve(curve: Sequence[tuple[float, float, float]], path: Path) -> None:
    """Draw a trainer's `curve`: learning rate, loss and validation loss of every step."""
    import matplotlib.pyplot as plt

    from weights.report import BLUE, DARK, GREY, YELLOW, png

    rates, losses, validation = np.array(curve).T
    steps = np.arange(1, len(curve) + 1)
    figure, (upper, lower) = plt.subplots(2, 1, sharex=True, figsize=(8, 5), dpi=90, height_ratios=(3, 1))
    upper.plot(steps, losses, color=GREY, linewidth=0.5, label="loss of each batch")
    if len(curve) > SMOOTH_STEPS:
        means = np.convolve(losses, np.full(SMOOTH_STEPS, 1 / SMOOTH_STEPS), "valid")
        upper.plot(steps[SMOOTH_STEPS - 1 :], means, color=BLUE, label=f"mean of {SMOOTH_STEPS}")
    evaluated = np.isfinite(validation)
    upper.plot(steps[evaluated], validation[evaluated], ".-", color=YELLOW, label="validation loss")
    upper.set_ylabel("loss")
    upper.legend(fontsize=8)
    lower.plot(steps, rates, color=DARK)
    lower.set_ylabel("learning rate")
    lower.set_xlabel("step")
    figure.tight_layout()
    new = path.with_suffix(".new")
    new.write_bytes(png(figure))
    os.replace(new, path)
