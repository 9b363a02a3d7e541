"""The page of an evaluation: verdict, figures beside the baselines, what the model uses, who is new. Computes nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np

from weights import report
from weights.evaluate.baselines import BASELINES
from weights.evaluate.evaluation import MODEL, OPTIMUM, TRUE_AFFINITY, Evaluation
from weights.evaluate.metrics import Figure
from weights.report import plain, rendered

EXPLANATIONS = {
    MODEL: "the checkpoint",
    **BASELINES,
    TRUE_AFFINITY: "the world's own interest in topic and author: what an affinity ranking could know at best",
    OPTIMUM: "the probabilities that the world drew from: nothing can do better",
}
PICTURE = "reliability.png"
SHOWN_CURVES = 10

TEMPLATE = """
**{{ evaluation.verdict() }}**

# {{ title }}

{{ "{:,}".format(evaluation.requests) }} requests with {{ "{:,}".format(evaluation.impressions) }} impressions of
{{ "{:,}".format(evaluation.users) }} users, {{ evaluation.span }}. Made by

```
{{ command }}
```

Intervals hold 95 % of {{ resamples }} resamples of the users. Within users and requests: the mean over those with both outcomes. NDCG: the
mean over those whose outcomes differ.
{% for action, sources in evaluation.figures.items() %}

## {{ action }}, {{ evaluation.shares[action] | percent }} of impressions

{{ table(["ranked by"] + (sources["model"] | list), rows(sources)) }}
{% endfor %}

{% for source in sources_of(evaluation) %}
- {{ source }}: {{ explanations[source] }}
{% endfor %}
{% if evaluation.score %}

The served score, by what the actions that followed are worth:
{% for metric, figure in evaluation.score.items() %} {{ metric }} {{ figure }}{{ "," if not loop.last else "." }}{% endfor %}
{% endif %}
{% if ways %}

## Against the optimum

Over the {{ evaluation.frequent | length }} actions with at least 1 % positives, and the way from 0.5 to the optimum:

{{ table(["ranked by", "mean AUC", "of the way"], ways) }}
{% endif %}

## All actions

{{ table(["action", "share", "AUC", "log-loss", "normalised entropy", "calibration error"], actions) }}

{% if evaluation.frequent %}
Mean calibration error of the actions with at least 1 % positives: {{ evaluation.calibration_error() | number }}, in bins of equal count.
{% endif %}
{% if evaluation.dwell_error_seconds %}
Root mean squared error of the dwell: {{ evaluation.dwell_error_seconds[0] | number(2) }} s, of always predicting its mean
{{ evaluation.dwell_error_seconds[1] | number(2) }} s.
{% endif %}
{% if has_picture %}

![Observed share against predicted probability](reliability.png)
{% endif %}

## What the model uses

On a sample of the requests. Shuffled history deals the histories out among the requests; shuffled order mixes the events of each;
no user is user id 0.

{{ table(["taken away", "mean AUC", "mean log-loss"], ablations) }}

## Who is new

{{ table(["impressions", "share"] + group_sources, groups) }}

AUC, mean over {{ evaluation.headline | join(", ") }}.
"""


def write_evaluation(evaluation: Evaluation, directory: Path, title: str, command: str) -> None:
    """Write `report.md`, `figures.json` and a picture of the calibration into `directory`, which may exist."""
    told = [name for name in evaluation.frequent if name in evaluation.reliability][:SHOWN_CURVES]
    sources = next(iter(evaluation.groups.values()))[1] if evaluation.groups else {}
    page = rendered(
        TEMPLATE,
        evaluation=evaluation,
        title=title,
        command=command,
        resamples=evaluation.resamples,
        explanations=EXPLANATIONS,
        rows=_rows,
        sources_of=lambda evaluation: next(iter(evaluation.figures.values()), {}),
        ways=_ways(evaluation),
        actions=_actions(evaluation),
        has_picture=bool(told),
        ablations=[
            ["nothing" if name == "none" else name, _cell(auc), _cell(loss)]
            for name, (auc, loss) in evaluation.ablations.items()
        ],
        group_sources=list(sources),
        groups=[
            [name, f"{share:.1%}", *(f"{auc:.3f}" for auc in aucs.values())]
            for name, (share, aucs) in evaluation.groups.items()
        ],
    )
    pictures = {PICTURE: draw_reliability(evaluation, told)} if told else {}
    report.write_report(directory, page.lstrip(), figures(evaluation), pictures)


def headline_table(evaluation: Evaluation) -> list[str]:
    """The figures of each action that the score is for, as a Markdown table."""
    template = '{{ table([action] + (sources["model"] | list), rows) }}'
    return [
        rendered(template, action=action, sources=sources, rows=_rows(sources)).strip()
        for action, sources in evaluation.figures.items()
    ]


def _rows(sources: Mapping[str, Mapping[str, Figure]]) -> list[list[str]]:
    return [[name, *map(str, kinds.values())] for name, kinds in sources.items()]


def figures(evaluation: Evaluation) -> dict[str, Any]:
    """All figures as JSON values; what has no meaning, such as the AUC of an action that never happens, is absent or null."""
    values: dict[str, Any] = {
        "verdict": evaluation.verdict(),
        "requests": evaluation.requests,
        "impressions": evaluation.impressions,
        "users": evaluation.users,
        "frequent_actions": evaluation.frequent,
        "figures": {
            action: {
                source: {metric: asdict(each) for metric, each in kinds.items()} for source, kinds in sources.items()
            }
            for action, sources in evaluation.figures.items()
        },
        "score": {metric: asdict(each) for metric, each in evaluation.score.items()},
        "auc": evaluation.pooled[MODEL],
        "log_loss": {name: each[0] for name, each in evaluation.quality.items()},
        "calibration_error": evaluation.calibration_error(),
        "ablations": {name: {"mean_auc": auc, "log_loss": loss} for name, (auc, loss) in evaluation.ablations.items()},
        "groups": {name: {"share": share, "auc": aucs} for name, (share, aucs) in evaluation.groups.items()},
    }
    if OPTIMUM in evaluation.pooled:
        values["way_to_optimum"] = {source: evaluation.way(source) for source in (MODEL, TRUE_AFFINITY)}
        values["mean_auc"] = {source: evaluation.mean_auc(source) for source in (MODEL, TRUE_AFFINITY, OPTIMUM)}
    if evaluation.dwell_error_seconds:
        values["dwell_error_seconds"] = list(evaluation.dwell_error_seconds)
    rounded: dict[str, Any] = plain(values, 5)
    return rounded


def _ways(evaluation: Evaluation) -> list[list[str]]:
    if OPTIMUM not in evaluation.pooled:
        return []
    return [
        [source, f"{evaluation.mean_auc(source):.4f}", f"{evaluation.way(source):.3f}"]
        for source in (MODEL, TRUE_AFFINITY, OPTIMUM)
    ]


def _cell(figure: float | None) -> str:
    return "–" if figure is None or np.isnan(figure) else f"{figure:.4f}"


def _actions(evaluation: Evaluation) -> list[list[str]]:
    rows = []
    for name in sorted(evaluation.actions, key=lambda action: -evaluation.shares[action]):
        auc, (loss, entropy, error) = evaluation.pooled[MODEL].get(name), evaluation.quality[name]
        numbers = [_cell(each) for each in (auc, loss, entropy, error)]
        rows.append([name, f"{evaluation.shares[name]:.2%}", *numbers])
    return rows


def draw_reliability(evaluation: Evaluation, names: list[str]) -> bytes:
    """Observed share against predicted probability of these actions, both axes logarithmic, as PNG without date or version."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    columns = min(5, len(names))
    lines = -(-len(names) // columns)
    figure, grid = plt.subplots(
        lines, columns, figsize=(1.9 * columns, 1.9 * lines), dpi=90, squeeze=False, layout="constrained"
    )
    for axes in grid.flat[len(names) :]:
        axes.axis("off")
    for name, axes in zip(names, grid.flat, strict=False):
        observed, predicted = evaluation.reliability[name]
        shown = observed > 0
        low = max(min(predicted.min(), observed[shown].min()), 1e-4)
        axes.loglog([low, 1], [low, 1], color="#b8b8b8", linewidth=1)
        axes.loglog(predicted[shown], observed[shown], ".-", color="#2f6f9f", markersize=4, linewidth=0.8)
        axes.set_title(name, fontsize=7)
        axes.tick_params(labelsize=6)
    figure.supxlabel("predicted probability", fontsize=8)
    figure.supylabel("observed share", fontsize=8)
    image = BytesIO()
    figure.savefig(image, format="png", metadata={"Software": ""})
    plt.close(figure)
    return image.getvalue()
