"""Writes an evaluation as a Markdown page with plots and one JSON file. Computes nothing."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

from weights.report import BLUE, DARK, GREY, YELLOW, markdown_table, plain, png, write_figures
from weights.evaluate.evaluation import AFFINITY, MODEL, OPTIMUM, POPULARITY, TRUE_AFFINITY, Evaluation

COLOURS = {POPULARITY: GREY, AFFINITY: YELLOW, MODEL: BLUE, OPTIMUM: DARK}
EXPLANATIONS = {
    MODEL: "the checkpoint",
    POPULARITY: "action rates of the post, drawn towards its author's",
    AFFINITY: "the user's own action rates with the author and the topic",
    TRUE_AFFINITY: "the world's own interest in topic and author: what an affinity ranking could know at best",
    OPTIMUM: "the probabilities that the world drew from: nothing can do better",
}


def write_report(evaluation: Evaluation, directory: Path, title: str, command: str) -> None:
    """Write `report.md`, `figures.json` and three PNG files into `directory`, which may exist."""
    directory.mkdir(parents=True, exist_ok=True)
    for name, draw in (("auc", plot_auc), ("reliability", plot_reliability), ("ablations", plot_ablations)):
        (directory / f"{name}.png").write_bytes(draw(evaluation))
    write_figures(directory, figures(evaluation))
    sections = [
        f"# {title}",
        f"{evaluation.requests} requests with {evaluation.impressions} impressions of the test period. "
        f"Frequent actions are those with at least 1 % positives there. Made by\n\n```\n{command}\n```",
        _headline(evaluation),
        "![AUC by action](auc.png)",
        _actions(evaluation),
        "## Calibration\n\nFifteen bins of equal count an action.\n\n![Reliability](reliability.png)",
        _ablations(evaluation),
        _groups(evaluation),
    ]
    (directory / "report.md").write_text("\n\n".join(sections) + "\n")


def figures(evaluation: Evaluation) -> dict[str, object]:
    """The headline figures as JSON values; an undefined figure, such as the AUC of an action that never happens, is null."""
    sources = evaluation.figures
    values: dict[str, object] = {
        "requests": evaluation.requests,
        "impressions": evaluation.impressions,
        "frequent_actions": evaluation.frequent,
        "mean_auc": {source: evaluation.mean_auc(source) for source in sources},
        "way_to_optimum": {source: evaluation.way(source) for source in sources if OPTIMUM in sources},
        "ndcg": evaluation.ndcg,
        "calibration_error": evaluation.calibration_error(MODEL),
        "ablations": {
            name: dict(zip(("mean_auc", "log_loss", "ndcg"), three, strict=True))
            for name, three in evaluation.ablations.items()
        },
        "actions": {name: asdict(each) for name, each in sources[MODEL].items()},
    }
    rounded: dict[str, object] = plain(values, 5)
    return rounded


def _headline(evaluation: Evaluation) -> str:
    head = ["ranking by", "mean AUC", "of the way from 0.5 to the optimum", "NDCG of the score", "what it is"]
    rows = [
        [
            source,
            f"{evaluation.mean_auc(source):.4f}",
            f"{evaluation.way(source):.3f}" if OPTIMUM in evaluation.figures else "–",
            f"{evaluation.ndcg[source]:.4f}",
            EXPLANATIONS[source],
        ]
        for source in evaluation.figures
    ]
    text = markdown_table(head, rows)
    text += f"\n\nMean calibration error over the frequent actions: {evaluation.calibration_error(MODEL):.4f}."
    if evaluation.dwell_error_seconds:
        ours, mean = evaluation.dwell_error_seconds
        text += f" Root mean squared error of the dwell: {ours:.2f} s, of always predicting its mean {mean:.2f} s."
    return text


def _actions(evaluation: Evaluation) -> str:
    sources = [source for source in (POPULARITY, AFFINITY, MODEL, OPTIMUM) if source in evaluation.figures]
    head = ["action", "share", *(f"AUC {source}" for source in sources), "log-loss"]
    head += ["log-loss optimum"] if OPTIMUM in sources else []
    head += ["normalised entropy", "calibration error"]
    rows = []
    for name in sorted(evaluation.actions, key=lambda action: -evaluation.shares[action]):
        own = evaluation.figures[MODEL][name]
        cells = [name, f"{evaluation.shares[name]:.2%}"]
        cells += [f"{evaluation.figures[source][name].auc:.4f}" for source in sources]
        cells.append(f"{own.log_loss:.4f}")
        cells += [f"{evaluation.figures[OPTIMUM][name].log_loss:.4f}"] if OPTIMUM in sources else []
        cells += [f"{own.normalised_entropy:.4f}", f"{own.calibration_error:.4f}"]
        rows.append(cells)
    return "## Actions\n\n" + markdown_table(head, rows)


def _ablations(evaluation: Evaluation) -> str:
    rows = [
        ["nothing" if name == "none" else name, *(f"{value:.4f}" for value in values)]
        for name, values in evaluation.ablations.items()
    ]
    table = markdown_table(["taken away", "mean AUC", "mean log-loss", "NDCG of the score"], rows)
    note = (
        "Shuffled history deals the histories out among the requests; shuffled order keeps a history and mixes its events; "
        "no user is user id 0, which is padding."
    )
    return f"## What the model uses\n\nOn a sample of the requests.\n\n{table}\n\n{note}\n\n![Ablations](ablations.png)"


def _groups(evaluation: Evaluation) -> str:
    rows = [[name, f"{model:.4f}", f"{best:.4f}"] for name, (model, best) in evaluation.groups.items()]
    return "## Who is new\n\n" + markdown_table(["rows", "mean AUC model", "mean AUC optimum"], rows)


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
    rows = max(1, -(-len(names) // columns))
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
    if not np.isnan(values).all():
        axes.set_xlim(0.5, np.nanmax(values) + 0.05)
    axes.invert_yaxis()
    axes.set_xlabel("mean AUC, frequent actions")
    figure.tight_layout()
    return png(figure)
