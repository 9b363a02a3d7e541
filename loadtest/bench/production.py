"""The production shape over HTTP, 1 022 events and 2 800 candidates; and newer forms of a request beside those that they replace."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from app.request.codec import Codec, load_library
from app.request.vocabulary import Vocabulary
from app.settings import Limits
from loadtest.generate.http_client import Reply
from loadtest.generate.payload import post
from loadtest.generate.samples import server_timing
from loadtest.generate.tensors import LENGTH, inference_of, masked
from loadtest.generate.traffic import Traffic, TrafficSettings
from loadtest.geometries import GEOMETRIES
from loadtest.matrix import Row
from loadtest.servers.launch import Server, ranking_server
from loadtest.soak.clients import ask_all
from loadtest.timing import Figure, alternate, ratio
from weights.actions import STANDARD_ACTIONS
from weights.format.manifest import Manifest
from weights.format.writer import write_checkpoint
from weights.published.importer import labels_for
from weights.synthetic.random_weights import random_chunks

SHAPES = ("mini", "nano")
SHARE = 0.15  # reading the request and writing the reply ÷ the cached forward, at most
ALONE = 50  # candidates that are also ranked one by one
Content = dict[str, Any]
READ = GEOMETRIES["mini"]  # the model for which bodies are read in process
READINGS = 200  # times a body is read in one round in process
FIRST_USER = 10**12


def production_rows(rounds: int) -> Iterator[Row]:
    """The production rows of each model. Raises RuntimeError if a request is refused."""
    for name in SHAPES:
        with checkpoint_of(name) as checkpoint, ranking_server(checkpoint=checkpoint) as server:
            yield from rows_of(f"production, {name}", server, rounds)


@contextmanager
def checkpoint_of(name: str, history_length: int | None = None) -> Iterator[Path]:
    """A temporary checkpoint with random weights of a geometry, with another window if `history_length` is given."""
    with tempfile.TemporaryDirectory() as directory:
        path, config = Path(directory) / name, GEOMETRIES[name]
        config = replace(config, history_length=history_length or config.history_length)
        write_checkpoint(
            path, config, random_chunks(config, 0), labels_for(config, name, action_names=STANDARD_ACTIONS)
        )
        yield path


def rows_of(what: str, server: Server, rounds: int) -> Iterator[Row]:
    """Rows of a server that has answered nothing yet: memory of the first request, bits, dropped candidates, latencies, wire shares."""
    traffic = Traffic(TrafficSettings.production())
    first, *pages = (orjson.loads(page.body) for page in traffic.take(1 + 4 * rounds))
    held = server.reset_peak()
    whole = ask(server, first, "columns")
    grown = (server.status("VmHWM") - held) / 1024
    yield Row.of(f"{what}: memory that the first request adds at most", Figure.of([grown]), "MiB")
    yield bits_row(what, server, first, whole)
    dropped, found = 0, dict[tuple[str, str], list[tuple[float, ...]]]()
    for place, page in enumerate(pages):
        wire = ("columns", "binary")[place // 2 % 2]
        if place % 2 == 0:  # a user's first page; the next request is the second
            context = {"user_id": str(10**9 + place), "history": page["history"]}
        reply = ask(server, page | context, wire)
        dropped += len(page["candidates"]["post_id"]) - len(set(scores_of(reply, wire)))
        stages = server_timing(reply.headers[b"server-timing"].decode())
        seen = 1e3 * (reply.done_at - reply.sent_at), stages["parse"] + stages["serialize"], stages["forward"]
        kind = {b"miss": "cold", b"hit": "cached"}[reply.headers[b"x-context-cache"]]
        found.setdefault((wire, kind), []).append(seen)
    yield Row.of(f"{what}: candidates dropped of {len(pages)} requests", Figure.of([dropped]), "", 0)
    for (wire, kind), readings in found.items():
        took, around, forward = map(list, zip(*readings, strict=True))
        yield Row.of(f"{what}, {wire}, {kind}: p50", Figure.of(took), "ms")
        if kind == "cached":
            share = Figure.of([a / b for a, b in zip(around, forward, strict=True)])
            sides = [Figure.of(side).scaled(1e-3) for side in (around, forward)]
            yield Row.of(f"{what}, {wire}: parse and reply ÷ cached forward", share, "", SHARE, sides=sides)


def bits_row(what: str, server: Server, content: Content, reply: Reply) -> Row:
    """Number of candidates whose scores have other bits on the other wire or when ranked alone."""
    right = scores_of(reply, "columns")
    other = scores_of(ask(server, content, "binary"), "binary")
    different = sum(right[post] != other.get(post) for post in right)
    places = np.linspace(0, len(right) - 1, min(ALONE, len(right))).astype(int).tolist()
    for place in places:
        alone = {name: column[place : place + 1] for name, column in content["candidates"].items()}
        found = scores_of(ask(server, content | {"candidates": alone}, "columns"), "columns")
        different += any(scores != right[post] for post, scores in found.items())
    told = f"{what}: candidates of {len(right)} with other bits in binary, or of {len(places)} alone"
    return Row.of(told, Figure.of([different]), "", 0)


def ask(server: Server, content: Content, wire: str, path: str = "/rank") -> Reply:
    """Send one request; return its reply, on the same wire."""
    [reply] = answered(server, [payload_of(content, wire, path)])
    return reply


def payload_of(content: Content, wire: str, path: str = "/rank") -> bytes:
    """A request in columns or in binary, or in binary with masks for actions."""
    body, headers = orjson.dumps(content | ({"reply": "columns"} if path == "/rank" else {})), dict[str, str]()
    if wire != "columns":
        tensors = inference_of(content, STANDARD_ACTIONS)
        body, headers = (masked(tensors) if wire == "binary with masks" else tensors).body(binary=True)
        headers["Content-Type"] = "application/octet-stream"
    return post("localhost", path, body, headers)


def answered(server: Server, payloads: Sequence[bytes]) -> list[Reply]:
    """Send requests one after the other on one connection; return the replies. Raises RuntimeError if one is refused."""
    replies = ask_all(server.port, payloads, keep_bodies=True, timeout_seconds=60)
    if refused := [reply for reply in replies if reply.status != 200]:
        raise RuntimeError(f"answered {refused[0].status}: {refused[0].body[:300]!r}")
    return replies


def scores_of(reply: Reply, wire: str) -> dict[int, bytes]:
    """The bytes of each post's probabilities, by post id."""
    if wire == "columns":
        columns = orjson.loads(reply.body)["candidates"]
        ids, probabilities = columns["post_id"], np.array(columns["probabilities"], np.float32)
    else:
        length = int(reply.headers[LENGTH.encode()])
        arrays, data = dict[str, NDArray[Any]](), reply.body[length:]
        for output in orjson.loads(reply.body[:length])["outputs"]:
            size = output["parameters"]["binary_data_size"]
            arrays[output["name"]] = np.frombuffer(data[:size], "u8" if output["datatype"] == "UINT64" else "f4")
            data = data[size:]
        ids = arrays["post_id"].tolist()
        probabilities = arrays["probabilities"].reshape(len(ids), -1)
    return {int(post): row.tobytes() for post, row in zip(ids, probabilities, strict=True)}


def wire_rows(rounds: int) -> Iterator[Row]:
    """Rows of the newer forms, the HTTP ones with mini. Raises RuntimeError if a request is refused or scores have other bits."""
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
    manifest = Manifest("bench", "1", READ, STANDARD_ACTIONS, labels_for(READ, "").continuous, {}, {}, {})
    if (library := load_library()) is None:
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
            return packed.unpack(READ)

        return read

    texts, plain, masked_page = (
        "ids of 24 letters ÷ integers",
        reading(whole),
        whole | {"history": history | {"actions": masks}},
    )
    for what, limit, ours, reference in (
        (f"64 candidates: {texts}", 1.3, reading(in_texts(short), "text"), reading(short)),
        (f"1 022 events, 64 candidates: {texts}", np.inf, reading(in_texts(whole), "text"), plain),
        ("1 022 events: masks ÷ names of actions", 1.0, reading(masked_page), plain),
    ):
        sides = {"ours": ours, "reference": reference}
        seconds = alternate(sides, rounds, repeats=dict.fromkeys(sides, READINGS))
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
