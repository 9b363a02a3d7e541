"""What newer forms of a request cost beside those that they replace: ids as texts, actions as masks, contexts by their handle."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import orjson

from app.request.codec import Codec, load_library
from app.request.vocabulary import Vocabulary
from app.settings import Limits
from loadtest.bench.production import Content, ask, checkpoint_of, scores_of
from loadtest.generate.http_client import Reply
from loadtest.generate.samples import server_timing
from loadtest.generate.traffic import Traffic, TrafficSettings
from loadtest.geometries import GEOMETRIES
from loadtest.matrix import Row
from loadtest.servers.launch import Server, ranking_server
from loadtest.servers.target import Target
from loadtest.soak.clients import ask_all
from loadtest.timing import Figure, alternate, ratio
from weights.actions import STANDARD_ACTIONS
from weights.format.manifest import Manifest
from weights.published.importer import labels_for

CONFIG = GEOMETRIES["mini"]
READINGS = 200  # of a body, for one round
FIRST_USER = 10**12


def wire_rows(rounds: int) -> Iterator[Row]:
    """All of them; those over HTTP with mini. Raises RuntimeError for a request that is refused, or other bits."""
    yield from reading_rows(rounds)
    with checkpoint_of("mini") as checkpoint, ranking_server(checkpoint=checkpoint) as server:
        yield from binary_rows(server, 4 * rounds)
        yield from handle_rows(server, 4 * rounds)


def page_of(candidates: int, seed: int = 1) -> Content:
    """A page with 1 022 events."""
    page: Content = orjson.loads(next(Traffic(TrafficSettings.production(seed).with_fixed_candidates(candidates))).body)
    return page


def in_texts(page: Content) -> Content:
    """The same with ids of 24 letters."""
    page = copy.deepcopy(page)
    for columns in (page["history"], page["candidates"]):
        for name in ("post_id", "author_id"):
            columns[name] = [f"{number:024x}" for number in columns[name]]
    return page | {"user_id": f"{int(page['user_id']):024x}"}


def masks_of(page: Content) -> list[int]:
    """The actions of each event, bit a for action a."""
    return [sum(1 << STANDARD_ACTIONS.index(name) for name in names) for names in page["history"]["actions"]]


def reading_rows(rounds: int) -> Iterator[Row]:
    """In process: the compiled reader with all that the model reads of it, texts beside integers, masks beside names."""
    library = load_library()
    if library is None:
        raise RuntimeError("the codec cannot be compiled here")
    outputs = labels_for(CONFIG, "bench").continuous
    manifest = Manifest("bench", "1", CONFIG, STANDARD_ACTIONS, outputs, {}, {}, {})
    whole = page_of(64)
    short = whole | {"history": {name: column[:0] for name, column in whole["history"].items()}}
    masked = whole | {"history": whole["history"] | {"actions": masks_of(whole)}}

    def reading(page: Content, ids: Any = "uint64") -> Callable[[], object]:
        said = replace(manifest, ids=ids)
        codec, body = Codec(library, said, Vocabulary.of(said), Limits()), orjson.dumps(page)

        def read() -> object:
            packed = codec.read(body)
            if packed is None:
                raise RuntimeError("the compiled reader declines a body of the bench")
            return packed.unpack(CONFIG)

        return read

    for what, limit, ours, reference in (
        ("64 candidates: ids of 24 letters ÷ integers", 1.3, reading(in_texts(short), "text"), reading(short)),
        (
            "1 022 events, 64 candidates: ids of 24 letters ÷ integers",
            np.inf,
            reading(in_texts(whole), "text"),
            reading(whole),
        ),
        ("1 022 events in columns: masks ÷ names of actions", 1.0, reading(masked), reading(whole)),
    ):
        sides = {"ours": ours, "reference": reference}
        seconds = alternate(sides, rounds, repeats=dict.fromkeys(sides, READINGS))
        pair = [Figure.of(seconds[side]) for side in sides]
        yield Row.of(f"reading {what}", ratio(seconds["ours"], seconds["reference"]), "×", limit, sides=pair)


def binary_rows(server: Server, readings: int) -> Iterator[Row]:
    """Masks beside dense floats in binary: bytes of an event, and the server's time to read them."""
    page = page_of(64)
    wires = {"binary with masks": "ours", "binary": "reference"}
    replies = in_turns({side: lambda wire=wire: ask(server, page, wire) for wire, side in wires.items()}, readings)  # type: ignore[misc]
    spent = {side: [stages(reply)["parse"] for reply in found] for side, found in replies.items()}
    same_bits(replies["ours"][0], replies["reference"][0], "binary")
    yield Row.of(
        "parse of 1 022 events in binary: masks ÷ dense floats", ratio(spent["ours"], spent["reference"]), "×", 1.0
    )


def handle_rows(server: Server, readings: int) -> Iterator[Row]:
    """A later page by its context's handle beside the whole request, both cached; a first page that was prewarmed beside a cold one."""
    page = page_of(64)
    by_handle = named(page, prewarm(server, page))
    replies = in_turns(
        {"ours": lambda: ask(server, by_handle, "columns"), "reference": lambda: ask(server, page, "columns")}, readings
    )
    same_bits(replies["ours"][-1], replies["reference"][-1], "columns")
    times = {side: [sum(stages(reply).values()) for reply in found] for side, found in replies.items()}
    yield Row.of(
        "page 2 by handle ÷ whole, server's time, mini, 64 candidates",
        ratio(times["ours"], times["reference"]),
        "×",
        0.5,
    )
    took = {side: [reply.done_at - reply.sent_at for reply in found] for side, found in replies.items()}
    yield Row.of("page 2 by handle ÷ whole, one connection", ratio(took["ours"], took["reference"]), "×", 0.6)
    yield Row.of("page 2 by handle, 64 candidates", Figure.of([len(orjson.dumps(by_handle))]), "bytes", 5_000)
    first, users = page_of(512), iter(range(FIRST_USER, 2 * FIRST_USER))

    def cold() -> Reply:
        return ask(server, first | {"user_id": next(users)}, "columns")

    def prewarmed() -> Reply:
        content = first | {"user_id": next(users)}
        return ask(server, named(content, prewarm(server, content)), "columns")

    replies = in_turns({"ours": prewarmed, "reference": cold}, readings)
    took = {side: [reply.done_at - reply.sent_at for reply in found] for side, found in replies.items()}
    yield Row.of("first page prewarmed ÷ cold, mini, 512 candidates", ratio(took["ours"], took["reference"]), "×", 0.4)


def prewarm(server: Server, content: Content) -> str:
    """The handle of a page's context."""
    body = orjson.dumps({name: content[name] for name in ("user_id", "history")})
    request = Target(server.target.host, server.port, "/context").request(body)
    [reply] = ask_all(server.port, [request], keep_bodies=True, timeout_seconds=60)
    if reply.status != 200:
        raise RuntimeError(f"/context answers {reply.status}: {reply.body[:300]!r}")
    return str(orjson.loads(reply.body)["context"])


def named(content: Content, handle: str) -> Content:
    """The same page by handle."""
    return {name: value for name, value in content.items() if name not in ("user_id", "history")} | {"context": handle}


def in_turns(sides: Mapping[str, Callable[[], Reply]], readings: int) -> dict[str, list[Reply]]:
    """The replies of each side, asked in turns; the first are not counted."""
    found: dict[str, list[Reply]] = {side: [] for side in sides}
    for reading in range(readings + 1):
        for side, call in sides.items():
            reply = call()
            found[side] += [reply] * (reading > 0)
    return found


def stages(reply: Reply) -> dict[str, float]:
    """The server's own milliseconds."""
    return server_timing(reply.headers[b"server-timing"].decode())


def same_bits(ours: Reply, reference: Reply, wire: str) -> None:
    """Raises RuntimeError where the scores differ."""
    if scores_of(ours, wire) != scores_of(reference, wire):
        raise RuntimeError("two forms of one request have scores of other bits")
