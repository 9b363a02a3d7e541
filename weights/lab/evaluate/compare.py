"""Compares two checkpoints on the requests of a log (scores, order and calibration) and writes the page."""

from __future__ import annotations

import json
import zlib
from base64 import urlsafe_b64encode
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weights.checkpoint import Checkpoint
from weights.format.manifest import Manifest
from weights.lab.agreement import TOP, Floats, agreement, pearson, score_weights
from weights.lab.evaluate import metrics
from weights.lab.evaluate.evaluation import known_worth
from weights.lab.evaluate.predict import predict, rows_of
from weights.lab.report import plain, rendered, write_report
from weights.lab.training.examples import Examples
from weights.lab.training.log import Log
from weights.lab.training.page_example import request_body
from weights.progress import Update
from weights.tables import TableError

CHANGED = 10


@dataclass(frozen=True, slots=True)
class ActionChange:
    """One action in both: correlation of the probabilities, and for each checkpoint the mean, calibration error and log-loss."""

    share: float
    correlation: float
    means: tuple[float, float]
    calibration_errors: tuple[float, float]
    log_losses: tuple[float, float]


@dataclass(frozen=True, slots=True)
class ChangedRequest:
    """A request whose ranking changed: Kendall's τ of both orders, the best post in each, and the request as a `/rank` body,
    which is empty where the log has only hashes of the ids, and for nobody where ids are texts: the page opens none of these."""

    request_id: int
    kendall: float
    best: tuple[str, str]
    body: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Comparison:
    """`pearson`, `spearman` of all scores; `correlation`, `kendall`, `overlap`: means of `weights.lab.agreement` over requests with two
    posts or more (`overlap`: more than k). `ndcg` of each checkpoint by its own score weights. `changed`: most changed first."""

    requests: int
    impressions: int
    pearson: float
    spearman: float
    correlation: float
    kendall: float
    overlap: dict[int, float]
    ndcg: tuple[float, float]
    actions: dict[str, ActionChange]
    changed: list[ChangedRequest]


def compare(
    pair: tuple[Checkpoint, Checkpoint],
    logs: tuple[Log, Log],
    since: int,
    most: int,
    seed: int = 1,
    progress: Update = lambda what, done, total: None,
) -> Comparison:
    """Compare on at most `most` requests from `since` on, drawn by `seed`. `logs`: one log with each checkpoint's actions in its order.

    Each score uses its own checkpoint's weights. Raises TableError if there are no requests, or none with two posts.
    """
    from scipy.stats import spearmanr  # a second to import

    first, second = (Examples(log, checkpoint.manifest.config) for log, checkpoint in zip(logs, pair, strict=True))
    requests = np.flatnonzero(first.times >= since)
    requests = np.sort(np.random.default_rng(seed).permutation(requests)[:most])
    if not len(requests):
        raise TableError(f"the log has no requests from {since} on; it covers {logs[0].span}")
    probabilities = [
        predict(
            checkpoint.ranker,
            examples,
            requests,
            progress=lambda done, total: progress("scoring", done, total),
            corrections=checkpoint.manifest.corrections,
        ).probabilities
        for checkpoint, examples in zip(pair, (first, second), strict=True)
    ]
    rows = rows_of(first, requests)
    weights = [score_weights(checkpoint.manifest) for checkpoint in pair]
    scores = probabilities[0] @ weights[0], probabilities[1] @ weights[1]
    shown = [log.take(rows) for log in logs]
    lengths = (first.stops - first.starts)[requests].tolist()
    cuts = np.cumsum(lengths)[:-1]
    lists = list(zip(np.split(scores[0], cuts), np.split(scores[1], cuts), strict=True))
    several = [place for place, length in enumerate(lengths) if length > 1]
    if not several:
        raise TableError("no request shows two posts, so there is nothing to rank")
    has_ids = pair[0].manifest.ids != "text" or logs[0].texts is not None
    alike = {place: agreement(*lists[place]) for place in several}
    changed = sorted(several, key=lambda place: (alike[place].kendall, place))[:CHANGED]
    return Comparison(
        requests=len(requests),
        impressions=len(rows),
        pearson=pearson(*scores),
        spearman=float(spearmanr(*scores).statistic),
        correlation=float(np.nanmean([request.correlation for request in alike.values()])),
        kendall=float(np.mean([request.kendall for request in alike.values()])),
        overlap={
            k: float(np.mean(shares))
            for k in TOP
            if (shares := [request.overlap[k] for request in alike.values() if k in request.overlap])
        },
        ndcg=(_ndcg(shown[0], scores[0], weights[0]), _ndcg(shown[1], scores[1], weights[1])),
        actions=_actions(shown, probabilities),
        changed=[
            _changed(first, int(requests[place]), alike[place].kendall, lists[place], has_ids=has_ids)
            for place in changed
        ],
    )


def _ndcg(log: Log, scores: Floats, weights: NDArray[np.float32]) -> float:
    is_known = known_worth(log, weights)
    return metrics.mean(metrics.ndcg(log.request_id[is_known], scores[is_known], (log.actions @ weights)[is_known])[1])


def _actions(logs: list[Log], probabilities: list[NDArray[np.float32]]) -> dict[str, ActionChange]:
    """The changes of the actions that both checkpoints have."""
    changes = {}
    for column, name in enumerate(logs[0].action_names):
        if name not in logs[1].action_names:
            continue
        is_known = logs[0].known_rows(column)
        happened = logs[0].actions[is_known, column]
        both = probabilities[0][is_known, column], probabilities[1][is_known, logs[1].action_names.index(name)]
        if not len(happened):
            continue
        changes[name] = ActionChange(
            float(happened.mean()),
            pearson(*both),
            (float(both[0].mean()), float(both[1].mean())),
            (metrics.calibration_error(happened, both[0]), metrics.calibration_error(happened, both[1])),
            (metrics.log_loss(happened, both[0]), metrics.log_loss(happened, both[1])),
        )
    return changes


def _changed(
    examples: Examples, index: int, tau: float, scores: tuple[Floats, Floats], *, has_ids: bool
) -> ChangedRequest:
    log, rows = examples.log, examples.rows(index)
    has_ids = has_ids and not (log.texts and not log.user_id[rows[0]])  # no text names nobody
    best = log.ids("post_id", rows[[int(np.argmax(values)) for values in scores]])
    return ChangedRequest(
        int(log.request_id[rows[0]]), tau, (best[0], best[1]), request_body(examples, index) if has_ids else {}
    )


TEMPLATE = """
# {{ names[0] }} → {{ names[1] }}

{{ comparison.requests }} requests with {{ comparison.impressions }} impressions of one log, computed with the plain PyTorch model in
float32. Each checkpoint's scores use its own score weights.

{{ table(["", "figure"], rows) }}

## Actions

{{ table(["action", "share", "correlation", "mean", "calibration error", "log-loss"], actions) }}

## The requests that changed most

By Kendall's τ of the two orders. Each link opens the request in the page of a running server, ranked by the checkpoint that it serves.

{{ table(["request", "τ", "best post"], changed) }}
"""


def write_comparison(
    out: Path, pair: tuple[Manifest, Manifest], comparison: Comparison, explorer: str
) -> dict[str, Any]:
    """Write `report.md` and `figures.json` into `out`, which may exist; return the figures."""
    values: dict[str, Any] = {
        "checkpoints": [{"name": manifest.name, "version": manifest.version} for manifest in pair]
    }
    values |= {name: plain(value) for name, value in asdict(comparison).items()}
    write_report(out, _page(pair, comparison, explorer), values)
    return values


def explorer_link(explorer: str, body: dict[str, Any]) -> str:
    """A URL that opens this request in a running server's page. It holds the page's state, raw deflate in base64 (docs/explore.md)."""
    state = {
        "source": "rank", "sides": [body], "side": 0, "open": None, "onePer": False,
        "start": body["impression_ts"],
    }  # fmt: skip
    squeezer = zlib.compressobj(wbits=-15)
    packed = squeezer.compress(json.dumps(state).encode()) + squeezer.flush()
    return f"{explorer}#{urlsafe_b64encode(packed).decode().rstrip('=')}"


def _page(pair: tuple[Manifest, Manifest], comparison: Comparison, explorer: str) -> str:
    rows = [
        ["correlation of scores (Pearson)", f"{comparison.pearson:.4f}"],
        ["correlation of scores (Spearman)", f"{comparison.spearman:.4f}"],
        ["correlation of scores within a request, mean of requests", f"{comparison.correlation:.4f}"],
        ["Kendall's τ of the order, mean of requests", f"{comparison.kendall:.4f}"],
        *([f"share of the best {k} that both have", f"{share:.1%}"] for k, share in comparison.overlap.items()),
        ["NDCG of the score", f"{comparison.ndcg[0]:.4f} → {comparison.ndcg[1]:.4f}"],
    ]
    actions = [
        [
            name,
            f"{change.share:.2%}",
            f"{change.correlation:.3f}",
            *(f"{a:.4f} → {b:.4f}" for a, b in (change.means, change.calibration_errors, change.log_losses)),
        ]
        for name, change in comparison.actions.items()
    ]
    changed = [
        [
            f"[request {request.request_id}]({explorer_link(explorer, request.body)})"
            if request.body
            else f"request {request.request_id}",
            f"{request.kendall:.3f}",
            f"{request.best[0]} → {request.best[1]}",
        ]
        for request in comparison.changed
    ]
    names = [f"{manifest.name} {manifest.version}" for manifest in pair]
    return rendered(TEMPLATE, names=names, comparison=comparison, rows=rows, actions=actions, changed=changed).lstrip()
