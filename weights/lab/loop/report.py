"""The report of one turn, as Markdown and as JSON. Computes nothing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec

from weights.lab.evaluate.metrics import Figure
from weights.lab.joining.counts import JoinCounts
from weights.lab.loop.gate import Check
from weights.lab.loop.judge import MIN_ACTION_POSITIVES, Judgement
from weights.lab.loop.night import Night
from weights.lab.loop.state import Outcome, name_of
from weights.lab.report import plain, rendered, write_report

TEMPLATE = """
# {{ title }}

**{{ outcome.sentence }}.**

| check | | measured |
|---|---|---|
{% for check in checks -%}
| {{ check.name }} | {{ "passed" if check.passed else "**failed**" }} | {{ check.sentence }} |
{% endfor %}

## The night

```
{% for line in lines -%}
{{ line }}
{% endfor -%}
```

{{ "{:,} rankings with {:,} impressions, {:,} of them worth more than nothing to the score".format(*counts) }}.
Actions per impression: {{ night.activity | number(3) }}; the serving model expected {{ night.expected_activity | number(3) }} on the
held-out ones.
{% if judged %}

## Both models on the held-out hours

{{ "{:,} requests with {:,} impressions of {:,} users".format(judged.requests, judged.impressions, judged.users) }}. Serving: {{ serving }}.
AUC within users of the score: serving {{ order[0] }}, new {{ order[1] }}; lead {{ order[2] }}.

{{ table(["action", "positives", "cross-entropy, serving", "new", "predicted ÷ observed, serving", "new"], actions) }}

Actions with fewer than {{ min_action_positives }} positives are not judged.

AUC within users of the score, where the id was not trained on this time and where it was. Impressions of nobody and of unknown
authors are in neither:

{{ table(["id", "share not trained on", "serving there", "new there", "serving elsewhere", "new elsewhere"], unseen) }}
{% endif %}
"""


def cell_of(figure: Figure) -> str:
    """A figure for a table; a dash for none."""
    return "–" if math.isnan(figure.value) else str(figure)


def left_out_lines(nights: Sequence[str], rankings: int) -> list[str]:
    """What joined and does not train: these earlier nights, by their names, and so many rankings. No line for none."""
    lines = []
    if nights:
        names = ", ".join(nights)
        lines.append(
            f"{len(nights)} earlier nights are left out of the training: the model that serves has other actions ({names})"
        )
    if rankings:
        lines.append(f"{rankings:,} rankings are left out: the model that serves does not have their product surfaces")
    return lines


def write_turn(
    directory: Path,
    outcome: Outcome,
    counts: JoinCounts,
    night: Night,
    checks: Sequence[Check],
    judged: Judgement | None,
    serving: str,
    left_out_nights: Sequence[str],
    left_out_rankings: int,
) -> None:
    """Write `report.md` and `figures.json` into the turn's directory. `judged`: None where no model was trained; `serving`: the version
    that served; `left_out_nights`: the earlier nights that do not train, by their names;
    `left_out_rankings`: how many rankings, of all nights, do not because of their product surfaces."""
    actions = [
        [
            name,
            f"{quality.positives:,}",
            *(f"{value:.4f}" for value in quality.entropy),
            *(f"{value:.3f}" for value in quality.ratio),
        ]
        for name, quality in (judged.actions.items() if judged else ())
    ]
    unseen = [
        [kind, f"{part.share:.1%}", *map(cell_of, (*part.order, *part.order_of_others))]
        for kind, part in (judged.unseen.items() if judged else ())
    ]
    page = rendered(
        TEMPLATE,
        title=f"Turn {name_of(outcome.turn)}",
        outcome=outcome,
        checks=checks,
        lines=[*counts.lines(), *left_out_lines(left_out_nights, left_out_rankings)],
        counts=(night.rankings, night.impressions, night.positives),
        night=night,
        judged=judged,
        serving=serving,
        order=[cell_of(figure) for figure in (*judged.order, judged.lead)] if judged else [],
        actions=actions,
        min_action_positives=MIN_ACTION_POSITIVES,
        unseen=unseen,
    )
    values: dict[str, Any] = {
        "outcome": msgspec.to_builtins(outcome.brief()),
        "checks": [asdict(check) for check in checks],
        "night": asdict(night),
        "join": {name: value for name, value in counts.as_json().items() if name != "done_parts"},
        "judged": asdict(judged) if judged else None,
        "left_out_nights": list(left_out_nights),
        "left_out_rankings": left_out_rankings,
    }
    write_report(directory, page.lstrip(), plain(values, 6))
