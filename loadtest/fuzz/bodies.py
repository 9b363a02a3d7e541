"""Hypothesis strategies for valid and nearly valid requests. Shared with the property tests."""

from __future__ import annotations

import copy
from typing import Any

from hypothesis import strategies as st

from loadtest.generate.tensors import in_arrays
from weights.values import MAX_TIME

ids = st.one_of(
    st.integers(0, 2**64 - 1),
    st.integers(0, 2**64 - 1).map(str),
    st.sampled_from([0, "0", 2**63, str(2**63 - 1), 2**64 - 1, str(2**64 - 1)]),
)
distinct = st.sampled_from([["favorite"], ["0", "reply"], ["2", "favorite", "1"], []])
actions = st.one_of(
    distinct,
    distinct.flatmap(lambda keys: st.fixed_dictionaries({key: st.floats(0, 1e6) | st.integers(0, 5) for key in keys})),
    st.integers(0, 7),
)
surfaces, times = st.integers(0, 15), st.integers(0, MAX_TIME)
post: dict[str, st.SearchStrategy[Any]] = {"post_id": ids, "author_id": ids}
of_event = {"actions": actions, "product_surface": surfaces, "dwell_time": st.floats(0, 1e300) | st.integers(0, 99)}
of_candidate = {"product_surface": surfaces, "created_at": times}
event = st.fixed_dictionaries(post, optional=of_event)
candidate = st.fixed_dictionaries(post, optional=of_candidate)
options: dict[str, st.SearchStrategy[Any]] = {
    "impression_ts": times,
    "weights": distinct.flatmap(lambda keys: st.fixed_dictionaries({key: st.floats(-1e9, 1e9) for key in keys}))
    | st.sampled_from(["default", "x-2026-09"]),
    "score": st.sampled_from(["sum", "offset"]),
    "top_k": st.integers(1, 9),
    "actions_wanted": distinct,
    "request_id": st.from_regex(r"[A-Za-z0-9_.:@/+=-]{1,128}", fullmatch=True),
    "reply": st.sampled_from(["objects", "columns"]),
}
handles = st.from_regex(r"[0-9a-f]{32}", fullmatch=True)

shown = st.lists(candidate, min_size=1, max_size=5)
whole = st.fixed_dictionaries(
    {"user_id": ids, "candidates": shown}, optional=options | {"history": st.lists(event, max_size=20)}
)
by_handle = st.fixed_dictionaries({"context": handles, "candidates": shown}, optional=options)
valid = st.integers(0, 4).flatmap(lambda number: whole if number else by_handle)  # no server knows these handles

wanted_posts = st.fixed_dictionaries(
    {"user_id": ids},
    optional={
        "history": st.lists(event, min_size=1, max_size=20), "k": st.integers(1, 40), "exclude": st.lists(ids, max_size=5),
        "exclude_history": st.booleans(), "topics": st.lists(st.sampled_from(["sport", "news", "0"]), max_size=3),
        "min_score": st.floats(-1, 1), "impression_ts": times, "request_id": options["request_id"],
    },
)  # fmt: skip
wanted_scores = wanted_posts.flatmap(
    lambda body: st.fixed_dictionaries(
        {}, optional={name: options[name] for name in ("weights", "score", "top_k", "actions_wanted")}
    ).map(lambda added: body | added)
)
few = st.integers(1, 50)  # the corpus keeps its size
changed_posts = st.fixed_dictionaries(
    {},
    optional={
        "upsert": st.lists(
            st.fixed_dictionaries({"post_id": few, "author_id": ids}, optional={"created_at": times}),
            max_size=3,
            unique_by=lambda post: post["post_id"],
        ),
        "delete": st.lists(few.map(lambda number: str(number + 50)), max_size=3, unique=True),
    },
)
reloads = st.fixed_dictionaries(
    {}, optional={name: st.sampled_from(["none", "../demo", "demo/..", "x" * 300]) for name in ("checkpoint", "corpus")}
).filter(bool)


def columnar(body: dict[str, Any]) -> dict[str, Any]:
    """The same request with history and candidates as arrays."""
    shaped = {name: in_arrays(body[name]) for name in ("history", "candidates") if body.get(name)}
    return body | shaped


odd: st.SearchStrategy[Any] = st.one_of(
    st.sampled_from(
        [None, True, False, -1, 2**64, "", "00", "-1", "1.0", "x", 1.5, 1e300, 1e308, [], {}, [None], [[]], {"x": 1}]
    ),
    st.sampled_from(
        [16, MAX_TIME + 1, "favorite", ["favorite"], {"favorite": 2}, ["3"], {"reply": -1}, [True], "\u0663"]
    ),
    ids,
    handles,
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=5),
)
fields = st.sampled_from(["user_id", "context", "extra", *(post | of_event | of_candidate | options)])


@st.composite
def nearly_valid(draw: st.DrawFn) -> Any:
    """A valid request in either shape, with up to two places changed, added or removed."""
    body = copy.deepcopy(draw(valid))  # sampled_from returns shared objects
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
