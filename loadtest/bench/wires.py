"""Compares newer forms of a request with the forms that they replace: text ids, action masks, context handles."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import numpy as np
import orjson

from app.request.codec import Codec, load_library
from app.request.vocabulary import Vocabulary
from app.settings import Limits
from loadtest.bench.production import Content, answered, ask, checkpoint_of, payload_of, scores_of
from loadtest.generate.samples import server_timing
from loadtest.generate.traffic import Traffic, TrafficSettings
from loadtest.geometries import GEOMETRIES
from loadtest.matrix import Row
from loadtest.servers.launch import Server, ranking_server
from loadtest.timing import Figure, alternate, ratio
from weights.actions import STANDARD_ACTIONS
from weights.format.manifest import Manifest
from weights.published.importer import labels_for

CONFIG = GEOMETRIES["mini"]
READINGS = 200  # times a body is read in one round in process
FIRST_USER = 10**12


def wire_rows(rounds: int) -> Iterator[Row]:
    """All rows of this module, the HTTP ones with mini. Raises RuntimeError if a request is refused or scores have other bits."""
    yield from reading_rows(rounds)
    with checkpoint_of("mini") as checkpoint, ranking_server(checkpoint=checkpoint) as server:
        yield from page_rows(server, 4 * rounds)
        yield prewarmed_row(server, "a window of 127", 4 * rounds)
    with checkpoint_of("mini", 1022) as checkpoint, ranking_server(checkpoint=checkpoint) as server:
        yield prewarmed_row(server, "a window of 1 022", 4 * rounds)


def page_of(candidates: int) -> Content:
    """A page with 1 022 events and this many candidates."""
    page: Content = orjson.loads(next(Traffic(TrafficSettings.production().with_fixed_candidates(candidates))).body)
    return page


def in_texts(value: Any, name: str = "") -> Any:
    """The same content with ids of 24 letters."""
    if isinstance(value, dict):
        return {key: in_texts(each, key) for key, each in value.items()}
    if isinstance(value, list):
        return [in_texts(each, name) for each in value]
    return f"{int(value):024x}" if name.endswith("_id") else value


def reading_rows(rounds: int) -> Iterator[Row]:
    """The compiled reader in process, including unpacking to columns: text ids ÷ integers, action masks ÷ names."""
    library, manifest = (
        load_library(),
        Manifest("bench", "1", CONFIG, STANDARD_ACTIONS, labels_for(CONFIG, "").continuous, {}, {}, {}),
    )
    if library is None:
        raise RuntimeError("the compiled reader cannot be built here")
    whole = page_of(64)
    history = whole["history"]
    short = whole | {"history": {name: [] for name in history}}
    masks = [sum(1 << STANDARD_ACTIONS.index(name) for name in names) for names in history["actions"]]

    def reading(page: Content, ids: Any = "uint64") -> Callable[[], object]:
        said = replace(manifest, ids=ids)
        codec, body = Codec(library, said, Vocabulary.of(said), Limits()), orjson.dumps(page)

        def read() -> object:
            if (packed := codec.read(body)) is None:
                raise RuntimeError("the compiled reader declines a body of the bench")
            return packed.unpack(CONFIG)

        return read

    texts, plain = "ids of 24 letters ÷ integers", reading(whole)
    for what, limit, ours, reference in (
        (f"64 candidates: {texts}", 1.3, reading(in_texts(short), "text"), reading(short)),
        (f"1 022 events, 64 candidates: {texts}", np.inf, reading(in_texts(whole), "text"), plain),
        (
            "1 022 events: masks ÷ names of actions",
            1.0,
            reading(whole | {"history": history | {"actions": masks}}),
            plain,
        ),
    ):
        seconds = alternate(
            {"ours": ours, "reference": reference}, rounds, repeats={"ours": READINGS, "reference": READINGS}
        )
        pair = [Figure.of(found) for found in seconds.values()]
        yield Row.of(f"reading {what}", ratio(*seconds.values()), "×", limit, sides=pair)


def page_rows(server: Server, readings: int) -> Iterator[Row]:
    """Masks against dense floats in binary, and a page by context handle against the whole request."""
    page, count = page_of(64), readings + 1
    named = by_handle(server, page)
    dense, whole = [payload_of(page, "binary")] * count, [payload_of(page, "columns")] * count
    masks = times(server, [payload_of(page, "binary with masks")] * count, dense, "binary")
    handles = times(server, [payload_of(named, "columns")] * count, whole, "columns")
    yield Row.of("parse of 1 022 events in binary: masks ÷ dense floats", masks[0], "×", 1.0)
    yield Row.of("page 2 by handle ÷ whole, mini, 64 candidates: server's time", handles[1], "×", 0.5)
    yield Row.of("page 2 by handle ÷ whole, mini, 64 candidates: p50 at one connection", handles[2], "×", 0.6)
    yield Row.of("page 2 by handle, 64 candidates", Figure.of([len(orjson.dumps(named))]), "bytes", 5_000)


def prewarmed_row(server: Server, window: str, readings: int) -> Row:
    """A first page of 512 candidates whose context was computed ahead, against one whose context is not cached."""
    page, users = page_of(512), iter(range(FIRST_USER, 2 * FIRST_USER))
    pages = [[page | {"user_id": next(users)} for _ in range(readings + 1)] for _ in range(2)]
    prewarmed = [payload_of(by_handle(server, each), "columns") for each in pages[0]]
    warmed = times(server, prewarmed, [payload_of(each, "columns") for each in pages[1]])
    return Row.of(f"first page prewarmed ÷ cold, mini with {window}, 512 candidates: p50", warmed[2], "×", 0.4)


def by_handle(server: Server, content: Content) -> Content:
    """Send the page's context to the server; return the page with its handle instead."""
    context = {name: content[name] for name in ("user_id", "history")}
    handle = orjson.loads(ask(server, context, "columns", "/context").body)["context"]
    return {"context": handle} | {name: value for name, value in content.items() if name not in context}


def times(server: Server, ours: Sequence[bytes], reference: Sequence[bytes], wire: str = "") -> list[Figure]:
    """Send both sides in turns. Return ratios of ours to the reference: parse, sum of the server's stages, the client's wait."""
    replies, found = answered(server, list(chain(*zip(ours, reference, strict=True)))), []
    for pair in zip(replies[2::2], replies[3::2], strict=True):
        if wire and scores_of(pair[0], wire) != scores_of(pair[1], wire):
            raise RuntimeError("two forms of one request have scores of other bits")
        stages = [server_timing(reply.headers[b"server-timing"].decode()) for reply in pair]
        waits = [reply.done_at - reply.sent_at for reply in pair]
        found.append([[each["parse"] for each in stages], [sum(each.values()) for each in stages], waits])
    return [Figure.of([mine / theirs for mine, theirs in each]) for each in zip(*found, strict=True)]
