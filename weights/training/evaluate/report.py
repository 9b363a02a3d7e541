"""An evaluation as a Markdown page with plots and one JSON file. Computes nothing."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path

from weights.training.evaluate.evaluation import AFFINITY, MODEL, OPTIMUM, POPULARITY, TRUE_AFFINITY, Evaluation
from weights.training.evaluate.plots import plot_ablations, plot_auc, plot_reliability

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
    plot_auc(evaluation, directory / "auc.png")
    plot_reliability(evaluation, directory / "reliability.png")
    plot_ablations(evaluation, directory / "ablations.png")
    (directory / "figures.json").write_text(json.dumps(figures(evaluation), indent=1) + "\n")
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
    """The headline as plain JSON values; a figure without a meaning, such as the AUC of an action that never happens, is null."""
    sources = evaluation.figures
    return {
        "requests": evaluation.requests,
        "impressions": evaluation.impressions,
        "frequent_actions": evaluation.frequent,
        "mean_auc": {source: _number(evaluation.mean_auc(source)) for source in sources},
        "way_to_optimum": {source: _number(evaluation.way(source)) for source in sources if OPTIMUM in sources},
        "ndcg": {source: _number(value) for source, value in evaluation.ndcg.items()},
        "calibration_error": _number(evaluation.calibration_error(MODEL)),
        "ablations": {
            name: {"mean_auc": _number(auc), "log_loss": _number(loss), "ndcg": _number(ndcg)}
            for name, (auc, loss, ndcg) in evaluation.ablations.items()
        },
        "actions": {
            name: {key: _number(value) for key, value in asdict(values).items()}
            for name, values in sources[MODEL].items()
        },
    }


def _number(value: float) -> float | None:
    return round(value, 5) if math.isfinite(value) else None


def _headline(evaluation: Evaluation) -> str:
    rows = [
        "| ranking by | mean AUC | of the way from 0.5 to the optimum | NDCG of the score | what it is |",
        "|---|---|---|---|---|",
    ]
    for source in evaluation.figures:
        way = f"{evaluation.way(source):.3f}" if OPTIMUM in evaluation.figures else "–"
        rows.append(
            f"| {source} | {evaluation.mean_auc(source):.4f} | {way} | {evaluation.ndcg[source]:.4f} | {EXPLANATIONS[source]} |"
        )
    text = "\n".join(rows)
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
    rows = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for name in sorted(evaluation.actions, key=lambda action: -evaluation.shares[action]):
        own = evaluation.figures[MODEL][name]
        cells = [name, f"{evaluation.shares[name]:.2%}"]
        cells += [f"{evaluation.figures[source][name].auc:.4f}" for source in sources]
        cells.append(f"{own.log_loss:.4f}")
        cells += [f"{evaluation.figures[OPTIMUM][name].log_loss:.4f}"] if OPTIMUM in sources else []
        cells += [f"{own.normalised_entropy:.4f}", f"{own.calibration_error:.4f}"]
        rows.append("| " + " | ".join(cells) + " |")
    return "## Actions\n\n" + "\n".join(rows)


def _ablations(evaluation: Evaluation) -> str:
    rows = ["| taken away | mean AUC | mean log-loss | NDCG of the score |", "|---|---|---|---|"]
    for name, (auc, loss, ndcg) in evaluation.ablations.items():
        rows.append(f"| {'nothing' if name == 'none' else name} | {auc:.4f} | {loss:.4f} | {ndcg:.4f} |")
    note = (
        "Shuffled history deals the histories out among the requests; shuffled order keeps a history and mixes its events; "
        "no user is user id 0, which is padding."
    )
    return (
        "## What the model uses\n\nOn a sample of the requests.\n\n"
        + "\n".join(rows)
        + f"\n\n{note}\n\n![Ablations](ablations.png)"
    )


def _groups(evaluation: Evaluation) -> str:
    rows = ["| rows | mean AUC model | mean AUC optimum |", "|---|---|---|"]
    rows += [f"| {name} | {model:.4f} | {best:.4f} |" for name, (model, best) in evaluation.groups.items()]
    return "## Who is new\n\n" + "\n".join(rows)
