"""The page of an evaluation: verdict, figures beside the baselines, what the model uses, who is new. Computes nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from weights.lab.evaluate.baselines import BASELINES
from weights.lab.evaluate.evaluation import MODEL, OPTIMUM, TRUE_AFFINITY, Evaluation
from weights.lab.evaluate.metrics import Figure
from weights.lab.report import plain, rendered, write_report

EXPLANATIONS = {
    MODEL: "the checkpoint",
    **BASELINES,
    TRUE_AFFINITY: "the user's true interest in topic and author: the most that an affinity ranking could know",
    OPTIMUM: "the true probabilities of the world: nothing can do better",
}

TEMPLATE = """
**{{ evaluation.verdict() }}**
{% for remark in evaluation.remarks() %}

{{ remark }}
{% endfor %}

# {{ title }}

{{ "{:,} requests with {:,} impressions of {:,} users".format(*counts) }}{{ of_nobody }}, {{ evaluation.span }}. Made by

```
{{ command }}
```

Intervals hold 95 % of {{ resamples }} resamples of the users. AUC within users or requests, and NDCG, are means over the users or requests
that have both outcomes.
{% for action, sources in evaluation.figures.items() %}

## {{ action }}, {{ evaluation.shares[action] | percent }} of impressions

{{ table(["ranked by"] + (sources["model"] | list), rows(sources)) }}
{% endfor %}

{% for source in sources %}
- {{ source }}: {{ explanations[source] }}
{% endfor %}
{% if evaluation.score %}

The served score, with the weights of the actions that followed as relevance: {{ score }}.

{% endif %}
{% if ways %}

## Against the optimum

Mean AUC over the {{ evaluation.frequent | length }} actions with at least 1 % positives, and its share of the optimum's lead over 0.5:

{{ table(["ranked by", "mean AUC", "share of the lead"], ways) }}
{% endif %}

## All actions

{{ table(["action", "share", "mean prediction", "AUC", "log-loss", "normalised entropy", "calibration error"], actions) }}

{% if evaluation.frequent %}
Mean calibration error of the actions with at least 1 % positives: {{ evaluation.calibration_error() | number }}, averaged over the rows
in bins of about equal count.
{% endif %}
{% if evaluation.dwell_error_seconds %}
{% set model, mean = evaluation.dwell_error_seconds %}
Root mean squared error of the dwell: {{ model | number(2) }} s; always predicting the mean has {{ mean | number(2) }} s.
{% endif %}

## What the model uses

Measured on a sample of the requests, over the actions that the score is for. *Shuffled history* gives each request the history of
another one, *shuffled order* shuffles the events of each history, and *no user* sets the user id to 0.

{{ table(["taken away", "mean AUC", "mean log-loss"], ablations) }}

{% if run %}

## The run

{{ "{:,} of at most {:,} steps".format(run.steps, run.most_steps) }}: {{ run.ended }}. The weights of step {{ run.best_step }} had the best
validation loss, {{ run.best_validation_loss }}.
{% if picture %}

![Losses by step]({{ picture }})
{% endif %}
{% endif %}

## New and known

{{ table(["impressions", "share"] + group_sources, groups) }}

AUC, mean over {{ evaluation.headline | join(", ") }}.
"""


def write_evaluation(
    evaluation: Evaluation,
    directory: Path,
    title: str,
    command: str,
    run: Mapping[str, Any] | None = None,
    picture: str = "",
) -> None:
    """Write `report.md` and `figures.json` into `directory`, which may exist. `run`: how the training went, as the manifest has it;
    `picture`: the file of its curve in the directory."""
    nobody = evaluation.requests_of_nobody
    page = rendered(
        TEMPLATE,
        evaluation=evaluation,
        title=title,
        command=command,
        run=run,
        picture=picture,
        counts=(evaluation.requests, evaluation.impressions, evaluation.users),
        of_nobody=f" and {nobody:,} requests of nobody, each of which counts as a user" if nobody else "",
        resamples=evaluation.resamples,
        explanations=EXPLANATIONS,
        rows=_rows,
        score=", ".join(f"{metric} {figure}" for metric, figure in evaluation.score.items()),
        sources=list(next(iter(evaluation.figures.values()), {})),
        ways=_ways(evaluation),
        actions=_actions(evaluation),
        ablations=[
            ["nothing" if name == "none" else name, _cell(auc), _cell(loss)]
            for name, (auc, loss) in evaluation.ablations.items()
        ],
        group_sources=list(next(iter(evaluation.groups.values()))[1]) if evaluation.groups else [],
        groups=[
            [name, f"{share:.1%}", *(f"{auc:.3f}" for auc in aucs.values())]
            for name, (share, aucs) in evaluation.groups.items()
        ],
    )
    write_report(directory, page.lstrip(), figures(evaluation))


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
        "remarks": evaluation.remarks(),
        "requests": evaluation.requests,
        "impressions": evaluation.impressions,
        "users": evaluation.users,
        "requests_of_nobody": evaluation.requests_of_nobody,
        "positives": evaluation.positives,
        "frequent_actions": evaluation.frequent,
        "figures": {
            action: {
                source: {metric: asdict(figure) for metric, figure in kinds.items()}
                for source, kinds in sources.items()
            }
            for action, sources in evaluation.figures.items()
        },
        "score": {metric: asdict(figure) for metric, figure in evaluation.score.items()},
        "auc": evaluation.pooled[MODEL],
        "log_loss": {name: quality.log_loss for name, quality in evaluation.quality.items()},
        "calibration_error": evaluation.calibration_error(),
        "reliability": {
            name: {"observed": evaluation.quality[name].observed, "predicted": evaluation.quality[name].predicted}
            for name in evaluation.frequent
        },
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
        quality, auc = evaluation.quality[name], evaluation.pooled[MODEL].get(name)
        numbers = (auc, quality.log_loss, quality.normalised_entropy, quality.calibration_error)
        rows.append([name, f"{evaluation.shares[name]:.2%}", f"{quality.mean:.2%}", *map(_cell, numbers)])
    return rows
