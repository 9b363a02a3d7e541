"""The pictures of an evaluation report, as PNG."""

from __future__ import annotations

import matplotlib.pyplot as plt
import numpy as np

from weights.report import BLUE, DARK, GREY, YELLOW, png
from weights.training.evaluate.evaluation import AFFINITY, MODEL, OPTIMUM, POPULARITY, Evaluation

COLOURS = {POPULARITY: GREY, AFFINITY: YELLOW, MODEL: BLUE, OPTIMUM: DARK}


def plot_auc(evaluation: Evaluation) -> bytes:
    """AUC of every action by source, most frequent action first."""
    names = sorted(evaluation.actions, key=lambda name: -evaluation.shares[name])
    figure, axes = plt.subplots(figsize=(9, 4), dpi=90)
    sources = [source for source in COLOURS if source in evaluation.figures]
    width = 0.8 / len(sources)
    for index, source in enumerate(sources):
        values = [evaluation.figures[source][name].auc for name in names]
        axes.bar(np.arange(len(names)) + index * width, values, width, label=source, color=COLOURS[source])
    axes.set_xticks(np.arange(len(names)) + 0.4 - width / 2)
    axes.set_xticklabels(
        [f"{name} {evaluation.shares[name]:.1%}" for name in names], rotation=60, ha="right", fontsize=7
    )
    axes.set_ylim(0.45, 1.0)
    axes.axhline(0.5, color="black", linewidth=0.5)
    axes.set_ylabel("AUC, test period")
    axes.legend(ncols=4, fontsize=8, loc="upper right")
    figure.tight_layout()
    return png(figure)


def plot_reliability(evaluation: Evaluation) -> bytes:
    """Observed share against predicted probability of the frequent actions, both axes logarithmic."""
    names = evaluation.frequent
    columns = 5
    rows = -(-len(names) // columns)
    figure, grid = plt.subplots(rows, columns, figsize=(9, 1.8 * rows), dpi=90, squeeze=False)
    for axes in grid.flat[len(names) :]:
        axes.axis("off")
    for name, axes in zip(names, grid.flat, strict=False):
        curve = evaluation.reliability[name]
        shown = curve.observed > 0
        low = max(min(curve.predicted.min(), curve.observed[shown].min()), 1e-4)
        axes.plot([low, 1], [low, 1], color=GREY, linewidth=1)
        axes.plot(
            curve.predicted[shown], curve.observed[shown], ".-", color=COLOURS[MODEL], markersize=4, linewidth=0.8
        )
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_title(f"{name}  ECE {evaluation.figures[MODEL][name].calibration_error:.4f}", fontsize=7)
        axes.tick_params(labelsize=6)
    figure.supxlabel("predicted probability", fontsize=8)
    figure.supylabel("observed share", fontsize=8)
    figure.tight_layout()
    return png(figure)


def plot_ablations(evaluation: Evaluation) -> bytes:
    """Mean AUC over the frequent actions with something taken away."""
    figure, axes = plt.subplots(figsize=(6, 2.4), dpi=90)
    names = list(evaluation.ablations)
    values = [evaluation.ablations[name][0] for name in names]
    bars = axes.barh(["whole" if name == "none" else name for name in names], values, color=COLOURS[MODEL])
    axes.bar_label(bars, [f"{value:.3f}" for value in values], fontsize=8, padding=2)
    axes.set_xlim(0.5, max(values) + 0.05)
    axes.invert_yaxis()
    axes.set_xlabel("mean AUC, frequent actions")
    figure.tight_layout()
    return png(figure)
