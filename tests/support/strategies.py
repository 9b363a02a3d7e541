"""Hypothesis strategies for requests: valid ones, nearly valid ones, and bytes that were a valid request once."""

from __future__ import annotations

import copy
import json
from typing import Any

from hypothesis import strategies as st

from tests.support.bodies import in_columns
from weights.values import MAX_TIME

ids = st.one_of(
    st.integers(0, 2**64 - 1),
    st.integers(0, 2**64 - 1).map(str),
    st.sampled_from([0, "0", 2**63, str(2**63 - 1), 2**64 - 1, str(2**64 - 1)]),
)
some_actions = st.sampled_from([["favorite"], ["0", "reply"], ["2", "favorite", "1"], []])
actions = st.one_of(
    some_actions,
    some_actions.flatmap(
        lambda keys: st.fixed_dictionaries({key: st.floats(0, 1e6) | st.integers(0, 5) for key in keys})
    ),
    st.integers(0, 7),
)
surfaces, times = st.integers(0, 15), st.integers(0, MAX_TIME)
post: dict[str, st.SearchStrategy[Any]] = {"post_id": ids, "author_id": ids}
of_event = {"actions": actions, "product_surface": surfaces, "dwell_time": st.floats(0, 1e300) | st.integers(0, 99)}
of_candidate = {"product_surface": surfaces, "created_at": times}
event = st.fixed_dictionaries(post, optional=of_event)
candidate = st.fixed_dictionaries(post, optional=of_candidate)
weights = some_actions.flatmap(lambda keys: st.fixed_dictionaries({key: st.floats(-1e9, 1e9) for key in keys}))
of_scores: dict[str, st.SearchStrategy[Any]] = {
    "weights": weights | st.sampled_from(["default", "x-2026-09", "x-2026-10"]),
    "score": st.sampled_from(["sum", "offset"]),
    "top_k": st.integers(1, 9),
    "actions_wanted": some_actions,
}
of_user: dict[str, st.SearchStrategy[Any]] = {
    "impression_ts": times,
    "request_id": st.from_regex(r"[A-Za-z0-9_.:@/+=-]{1,128}", fullmatch=True),
}
options = of_scores | of_user | {"reply": st.sampled_from(["objects", "columns"])}
handles = st.from_regex(r"[0-9a-f]{32}", fullmatch=True)
histories = st.lists(event, max_size=20)
shown = st.lists(candidate, min_size=1, max_size=5)

rank_requests = st.fixed_dictionaries({"user_id": ids, "candidates": shown}, optional=options | {"history": histories})
handle_requests = st.fixed_dictionaries({"context": handles, "candidates": shown}, optional=options)
valid = st.integers(0, 4).flatmap(lambda number: rank_requests if number else handle_requests)
retrieve_requests = st.fixed_dictionaries(
    {"user_id": ids},
    optional=of_user
    | {
        "history": st.lists(event, min_size=1, max_size=20),
        "k": st.integers(1, 40),
        "exclude": st.lists(ids, max_size=5),
        "exclude_history": st.booleans(),
        "topics": st.lists(st.sampled_from(["sport", "news", "0"]), max_size=3),
        "min_score": st.floats(-1, 1),
    },
)
recommend_requests = st.builds(
    lambda posts, scores: posts | scores, retrieve_requests, st.fixed_dictionaries({}, optional=of_scores)
)

odd: st.SearchStrategy[Any] = st.one_of(
    st.sampled_from(
        [None, True, False, -1, 2**64, "", "00", "-1", "1.0", "x", 1.5, 1e300, [], {}, [None], [[]], {"x": 1}]
    ),
    st.sampled_from(
        [16, MAX_TIME + 1, "favorite", ["favorite", "0"], {"favorite": 2}, ["3"], {"reply": -1}, [True], "\u0663"]
    ),
    ids,
    handles,
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=5),
)
fields = st.sampled_from(["user_id", "context", "extra", *(post | of_event | of_candidate | options)])


def columnar(body: dict[str, Any]) -> dict[str, Any]:
    """The same request with history and candidates as columns."""
    return body | {name: in_columns(body[name]) for name in ("history", "candidates") if body.get(name)}


@st.composite
def nearly_valid(draw: st.DrawFn, requests: st.SearchStrategy[Any] = valid) -> Any:
    """A request in either form, with up to two places changed, added or removed."""
    body = copy.deepcopy(draw(requests))  # sampled_from returns shared objects
    body = columnar(body) if draw(st.booleans()) else body
    for _ in range(draw(st.integers(0, 2))):
        place = _somewhere(draw, body)
        if isinstance(place, dict):
            key = draw(st.sampled_from(sorted(place)) | fields) if place else draw(fields)
            if draw(st.booleans()):
                place[key] = copy.deepcopy(draw(odd))
            else:
                place.pop(key, None)
        elif place and draw(st.booleans()):
            place[draw(st.integers(0, len(place) - 1))] = copy.deepcopy(draw(odd))
        else:
            place.append(copy.deepcopy(draw(odd)))
    return body


def _somewhere(draw: st.DrawFn, value: Any) -> Any:
    """A random container inside the value, or the value itself."""
    inner = [item for item in (value.values() if isinstance(value, dict) else value) if isinstance(item, dict | list)]
    if not inner or draw(st.booleans()):
        return value
    return _somewhere(draw, inner[draw(st.integers(0, len(inner) - 1))])


@st.composite
def mutated(draw: st.DrawFn, requests: st.SearchStrategy[Any] = valid) -> bytes:
    """The bytes of a nearly valid request, with up to three places cut, doubled or overwritten."""
    raw = bytearray(json.dumps(draw(nearly_valid(requests))).encode())
    for _ in range(draw(st.integers(0, 3))):
        start = draw(st.integers(0, len(raw)))
        stop = start + draw(st.integers(0, 4))
        scrap = draw(
            st.binary(max_size=3)
            | st.sampled_from([b'"', b"\\ud800", b"\xff", b"1e999", b"NaN", b"-0", b"[", b"}", b",", b"9" * 400])
        )
        raw[start:stop] = draw(st.sampled_from([b"", bytes(raw[start:stop]) * 2, scrap]))
    return bytes(raw)
