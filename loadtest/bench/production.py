"""Measures the production shape over HTTP: 1 022 events, 2 800 candidates, default limits, two models, two wires."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from loadtest.generate.http_client import Reply
from loadtest.generate.payload import post
from loadtest.generate.samples import server_timing
from loadtest.generate.tensors import LENGTH, inference_of, masked
from loadtest.generate.traffic import Traffic, TrafficSettings
from loadtest.geometries import GEOMETRIES
from loadtest.matrix import Row
from loadtest.servers.launch import Server, ranking_server
from loadtest.soak.clients import ask_all
from loadtest.timing import Figure
from weights.actions import STANDARD_ACTIONS
from weights.format.writer import write_checkpoint
from weights.published.importer import labels_for
from weights.synthetic.random_weights import random_chunks

SHAPES = ("mini", "nano")
SHARE = 0.15  # reading the request and writing the reply ÷ the cached forward, at most
ALONE = 50  # candidates that are also ranked one by one
Content = dict[str, Any]


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
    Path(f"/proc/{server.process.pid}/clear_refs").write_text("5")  # resets the high-water mark
    held = server.status("VmRSS")
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
