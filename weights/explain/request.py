"""Converts a `/rank` request from a file to the model's inputs and names for its ids. Does not validate as the server does."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from model.config import MAX_DWELL_SECONDS
from model.inputs import Candidates, Context, age_bucket
from weights.actions import CONTINUOUS_WEIGHTS, default_score_weights
from weights.errors import CheckpointError
from weights.format.manifest import Manifest
from weights.text_ids import TEXT_RULE, is_text_id, text_ids


@dataclass(frozen=True, slots=True)
class Request:
    """The newest events that fit the window, the candidates, the score weights float64 `[A]`, or `[A + Z]` where they weigh continuous
    outputs (of 0 … 1), and a name for each token."""

    context: Context
    candidates: Candidates
    weights: NDArray[np.float64]
    tokens: list[str]
    impression_ts: int = 0


def read_request(body: dict[str, Any], manifest: Manifest, names: dict[str, Any]) -> Request:
    """Read a request's JSON; `names` as in the demo's `names.json`. Raises CheckpointError if it does not fit this checkpoint."""
    try:
        return _request(body, manifest, {author: entry["name"] for author, entry in names.get("authors", {}).items()})
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise CheckpointError(f"The file is no request for {manifest.name}: {type(error).__name__} {error}.") from error


def _request(body: dict[str, Any], manifest: Manifest, names: dict[str, str]) -> Request:
    config, index = manifest.config, {name: place for place, name in enumerate(manifest.action_names)}
    if "user_id" not in body:
        raise ValueError("user_id is missing (what a context's handle names is known to a service alone)")

    def place_of(name: str) -> int:
        if not 0 <= (place := index.get(name, int(name) if name.isdecimal() else -1)) < config.actions:
            raise ValueError(f"this checkpoint has no action {name}")
        return place

    events = _rows(body.get("history", []))[-config.history_length :]
    posts = _rows(body["candidates"])
    if not posts:
        raise ValueError("candidates are missing")
    actions = np.zeros((len(events), config.actions), np.float32)
    for row, event in zip(actions, events, strict=True):
        taken = event.get("actions", [])
        if isinstance(taken, int):  # its bits are actions
            taken = [str(place) for place in range(taken.bit_length()) if taken >> place & 1]
        for name, value in taken.items() if isinstance(taken, dict) else ((name, 1.0) for name in taken):
            row[place_of(name)] = value
    context = Context(
        int(_ids([body], "user_id", manifest)[0]),
        _ids(events, "post_id", manifest),
        _ids(events, "author_id", manifest),
        actions,
        _column(events, "product_surface", np.int64),
        np.minimum(_column(events, "dwell_time", np.float32), np.float32(MAX_DWELL_SECONDS)),
    )
    ages = age_bucket(body.get("impression_ts", 0), _column(posts, "created_at", np.int64), config)
    columns = (_ids(posts, "post_id", manifest), _ids(posts, "author_id", manifest))
    candidates = Candidates(*columns, _column(posts, "product_surface", np.int64), ages)
    weights = body.get("weights", manifest.score_weights)
    factors = np.zeros(config.actions)
    if isinstance(weights, str):
        further = CONTINUOUS_WEIGHTS.get(weights, {})
        factors = np.append(factors, [further.get(each.name, 0.0) * each.scale for each in manifest.continuous])
        weights = default_score_weights(manifest.action_names, weights)
    for name, weight in weights.items():
        factors[place_of(name)] = float(weight)
    if not np.isfinite(factors).all():
        raise ValueError("a weight is no finite number")

    def name_of(post: dict[str, Any]) -> str:
        return names.get(str(post["author_id"]), f"post {post['post_id']}")

    tokens = ["user"]
    for event, row in zip(events, actions, strict=True):
        done = ", ".join(manifest.action_names[place] for place in np.flatnonzero(row)[:2])
        tokens.append(f"{name_of(event)}: {done or 'seen'}")
    names_of_all = [*tokens, *map(name_of, posts)]
    return Request(context, candidates, factors, names_of_all, int(body.get("impression_ts", 0)))


def _rows(items: Any) -> list[dict[str, Any]]:
    """Rows of a list of objects, or of an object of columns, as objects."""
    if isinstance(items, list):
        return items
    columns = list(items)
    return [dict(zip(columns, row, strict=True)) for row in zip(*items.values(), strict=True)]


def _ids(rows: list[dict[str, Any]], key: str, manifest: Manifest) -> NDArray[np.uint64]:
    """The 64-bit ids that a model reads."""
    if manifest.ids == "uint64":
        return _column(rows, key, np.uint64)
    if bad := [row.get(key) for row in rows if not is_text_id(row.get(key))]:
        raise ValueError(f"{key} {bad[0]!r:.60} {TEXT_RULE}")
    return text_ids(row[key] for row in rows)


def _column(rows: list[dict[str, Any]], key: str, dtype: Any) -> NDArray[Any]:
    return np.array([(int if np.issubdtype(dtype, np.integer) else float)(row.get(key, 0)) for row in rows], dtype)
