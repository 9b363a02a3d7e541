"""What a request may be: a parsed JSON value → a checked `Request` in columns. Not for features: it knows no window and no model.

Both shapes of history and candidates become the same columns, so there is one set of checks. Names, required fields and
bounds come from `contract`; what depends on the checkpoint comes from `Vocabulary`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from app.errors import InvalidRequest, TooLarge
from app.request import columns
from app.request.columns import ACTION_RULE, NO_ACTIONS, ActionCells, Problems
from app.request.contract import MAX_TIME, MAX_WEIGHT, Candidate, HistoryItem, RankRequest, is_request_id
from app.request.tables import Table, read_table, refuse_unknown
from app.settings import Limits
from weights.format.manifest import Manifest

REQUEST_FIELDS = tuple(RankRequest.model_fields)
REQUEST_ID_RULE = "must be 1 to 128 letters, digits or any of _ . : @ / + = -"
TIME_RULE = f"must be Unix seconds, an integer between 0 and {MAX_TIME}"


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """What a checkpoint lets a request say. `index` maps action names and decimal strings to columns."""

    action_names: tuple[str, ...]
    index: Mapping[str, int]
    product_surfaces: int
    weights: NDArray[np.float64]

    @classmethod
    def of(cls, manifest: Manifest) -> Vocabulary:
        """From a checkpoint's manifest."""
        names = manifest.action_names
        index = {str(column): column for column in range(len(names))} | {
            name: column for column, name in enumerate(names)
        }
        weights = np.array([manifest.score_weights.get(name, 0.0) for name in names])
        return cls(names, index, manifest.config.product_surfaces, weights)

    def knows(self, name: Any) -> bool:
        """Whether a JSON value names an action."""
        return type(name) is str and name in self.index


class Shape(NamedTuple):
    """How much work a request asks for, known before it is checked."""

    candidates: int
    history: int


@dataclass(frozen=True, slots=True)
class Posts:
    """Checked columns of history or candidates: ids uint64 `[n]`, surfaces int64 `[n]`."""

    post_ids: NDArray[np.uint64]
    author_ids: NDArray[np.uint64]
    surfaces: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.post_ids)


@dataclass(frozen=True, slots=True)
class Request:
    """A valid request. `echo_ids` are the candidates' post ids as they came.

    `dwell_seconds` float64 `[h]`, `created_at` int64 `[C]` in Unix seconds, 0 where unknown. `weights` float64 `[A]`.
    `wanted` are columns of the reply, None for all.
    """

    user_id: int
    history: Posts
    actions: ActionCells
    dwell_seconds: NDArray[np.float64]
    candidates: Posts
    created_at: NDArray[np.int64]
    echo_ids: list[int | str]
    impression_ts: int
    weights: NDArray[np.float64]
    top_k: int | None
    wanted: list[int] | None
    request_id: str | None


def measure(body: Any, limits: Limits) -> Shape:
    """Count candidates and history items without looking at them. Raises InvalidRequest, or TooLarge beyond the limits."""
    if type(body) is not dict:
        raise InvalidRequest([("", "must be a JSON object")])
    shape = Shape(_count(body.get("candidates")), _count(body.get("history")))
    for name, count, limit in (
        ("candidates", shape.candidates, limits.max_candidates),
        ("history", shape.history, limits.max_history),
    ):
        if count > limit:
            raise TooLarge(f"{name}: {count} items, and at most {limit} are taken.")
    return shape


def _count(items: Any) -> int:
    if type(items) is dict:
        return max((len(column) for column in items.values() if type(column) is list), default=0)
    return len(items) if type(items) is list else 0


def check(body: dict[str, Any], vocabulary: Vocabulary) -> Request:
    """Check everything. Raises InvalidRequest with the first ten problems."""
    problems = Problems()
    refuse_unknown(body, REQUEST_FIELDS, "", problems)
    user_id = _required(body, "user_id", columns.is_id, columns.ID_RULE, problems)
    impression_ts = _optional(body, "impression_ts", _is_time, TIME_RULE, problems)
    history = read_table(body.get("history", []), "history", HistoryItem, problems)
    noted = len(problems.found)
    candidates = read_table(body.get("candidates", []), "candidates", Candidate, problems)
    if not candidates.length and len(problems.found) == noted:
        problems.add("candidates", "must not be empty" if "candidates" in body else "is required")
    history_posts, actions, dwell = _history(history, vocabulary, problems)
    request = Request(
        user_id=user_id,
        history=history_posts,
        actions=actions,
        dwell_seconds=dwell,
        candidates=_posts(candidates, vocabulary, problems),
        created_at=candidates.integers("created_at", problems, high=MAX_TIME),
        echo_ids=candidates.columns.get("post_id", []),
        impression_ts=impression_ts or 0,
        weights=_weights(body, vocabulary, problems),
        top_k=_optional(
            body, "top_k", lambda value: type(value) is int and value >= 1, "must be an integer of at least 1", problems
        ),
        wanted=_wanted(body, vocabulary, problems),
        request_id=_optional(body, "request_id", is_request_id, REQUEST_ID_RULE, problems),
    )
    problems.check()
    return request


def _is_time(value: Any) -> bool:
    return type(value) is int and 0 <= value <= MAX_TIME


def _required(body: dict[str, Any], name: str, is_good: Callable[[Any], bool], rule: str, problems: Problems) -> int:
    if name in body and is_good(body[name]):
        return int(body[name])
    problems.add(name, rule if name in body else "is required")
    return 0


def _optional(body: dict[str, Any], name: str, is_good: Callable[[Any], bool], rule: str, problems: Problems) -> Any:
    if name not in body:
        return None
    if not is_good(body[name]):
        problems.add(name, rule)
    return body[name]


def _posts(table: Table, vocabulary: Vocabulary, problems: Problems) -> Posts:
    return Posts(
        table.ids("post_id", problems),
        table.ids("author_id", problems),
        table.integers("product_surface", problems, high=vocabulary.product_surfaces - 1),
    )


def _history(
    table: Table, vocabulary: Vocabulary, problems: Problems
) -> tuple[Posts, ActionCells, NDArray[np.float64]]:
    posts = _posts(table, vocabulary, problems)
    given = table.columns.get("actions")
    where = table.where("actions")
    cells = NO_ACTIONS if given is None else columns.actions(given, vocabulary.index, where, problems)
    return posts, cells, table.numbers("dwell_time", problems)


def _weights(body: dict[str, Any], vocabulary: Vocabulary, problems: Problems) -> NDArray[np.float64]:
    if "weights" not in body:
        return vocabulary.weights
    given, weights = body["weights"], np.zeros(len(vocabulary.action_names))
    if type(given) is not dict:
        problems.add("weights", "must be a map of action to number")
        return weights
    named = [vocabulary.index[name] for name in given if name in vocabulary.index]
    values = columns.numbers(list(given.values()), lambda _: "weights", problems, low=-MAX_WEIGHT, high=MAX_WEIGHT)
    if len(named) < len(given):
        problems.add("weights", f"every name {ACTION_RULE}")
    elif len(set(named)) < len(named):
        problems.add("weights", "names one action twice, by name and by index")
    elif len(values) == len(named):
        weights[named] = values
    return weights


def _wanted(body: dict[str, Any], vocabulary: Vocabulary, problems: Problems) -> list[int] | None:
    if "actions_wanted" not in body:
        return None
    given = body["actions_wanted"]
    if type(given) is not list:
        problems.add("actions_wanted", "must be a list of action names")
        return None
    problems.locate(given, lambda place: f"actions_wanted[{place}]", vocabulary.knows, ACTION_RULE)
    wanted = [vocabulary.index[name] for name in given if vocabulary.knows(name)]
    if len(set(wanted)) < len(wanted):
        problems.add("actions_wanted", "names one action twice")
    return wanted
