"""Whether a codec, as one that is sanitized, reads and writes as expected; imports little else. Not a test itself."""

from __future__ import annotations

import pickle
from collections.abc import Iterable
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from app.request.codec import Codec, open_library
from app.request.reply import ReplyFormat, render
from app.request.retrieval import PostsRequest, Reading, read_compiled
from app.request.validate import Request
from app.request.vocabulary import Vocabulary
from app.settings import Limits
from model.inputs import Candidates, Context
from weights.format.manifest import Manifest

SEEN = (
    "user_id", "history_length", "echo_ids", "weights", "top_k", "wanted", "request_id", "reply", "handle", "has_offset"
)  # fmt: skip
CASES = "cases.pickle"  # lies beside the library


@dataclass(frozen=True)
class Cases:
    """What the codec of one checkpoint reads and writes, each with what is expected; nothing is of a body that is declined."""

    manifest: Manifest
    limits: Limits
    bodies: list[tuple[bytes, list[Any]]]
    replies: list[tuple[tuple[Any, ...], dict[str, Any], bytes]]
    posts: list[
        tuple[bytes, list[Any], list[Any]]
    ]  # by two models, of which the first has a window of four, and by that one


def frozen(values: Iterable[Any]) -> list[Any]:
    """Arrays as dtype, shape and bytes; the rest as it is."""
    return [(str(each.dtype), each.shape, each.tobytes()) if isinstance(each, np.ndarray) else each for each in values]


def told(request: Request, context: Context, candidates: Candidates) -> list[Any]:
    """All that later steps read of a request to rank."""
    values = [getattr(request, name) for name in SEEN]
    values += [getattr(columns, field.name) for columns in (context, candidates) for field in fields(columns)]
    return frozen(values)


def told_of_posts(request: PostsRequest) -> list[Any]:
    """All that later steps read of a request for posts."""
    query = request.query
    parts = [request, query, query.filters, query.context, *([request.context] if request.context else [])]
    values = [getattr(part, field.name) for part in parts for field in fields(part)]  # type: ignore[arg-type]
    return frozen(value for value in values if not is_dataclass(value))


def differing(library: Path, cases: Cases) -> int:
    """How many are read or written otherwise."""
    words = Vocabulary.of(cases.manifest)
    made = Codec(open_library(library), cases.manifest, words, cases.limits)
    form = replace(ReplyFormat.of(cases.manifest), codec=made)
    config = replace(cases.manifest.config, history_length=4)
    short = Codec(open_library(library), replace(cases.manifest, config=config), words, cases.limits)
    models = [
        Reading(replace(words, codec=codec), used) for codec, used in ((short, config), (made, cases.manifest.config))
    ]
    read = ((made.read(raw), expected) for raw, expected in cases.bodies)
    found = [told(*packed.unpack(cases.manifest.config)) != expected for packed, expected in read if packed is not None]
    for raw, *expected in cases.posts:
        for some, one in zip((models, models[:1]), expected, strict=True):
            request = read_compiled(raw, cases.limits, some)
            found.append(request is not None and told_of_posts(request) != one)
    for (asked, scores), tail, raw in cases.replies:
        found.append(b"".join(render(asked, scores, form, **tail)) != raw)
    return sum(found)


def differing_in_all(library: Path) -> int:
    """In the cases that lie beside the library."""
    many = pickle.loads(library.with_name(CASES).read_bytes())  # noqa: S301  # which the test has written
    return sum(differing(library, cases) for cases in many)
