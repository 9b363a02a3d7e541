"""What HTTP costs: the service beside the one of another checkout, by wrk. In every round each side takes one reading per load."""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from loadtest.generate import wrk
from loadtest.generate.tensors import LENGTH, inference_of
from loadtest.generate.traffic import Traffic, TrafficSettings, objects_of
from loadtest.geometries import GEOMETRIES
from loadtest.machine import ROOT
from loadtest.rows import Row
from loadtest.server import DEMO, Server, serving, total
from loadtest.timing import Figure, ratio
from weights.actions import STANDARD_ACTIONS
from weights.format.writer import write_checkpoint
from weights.published.importer import labels_for
from weights.synthetic.random_weights import random_pieces

USERS = 2000  # first visits, sent in turn: no context comes from the cache
CONNECTIONS = 16
STAGES = ("read", "parse", "queue", "forward", "serialize")
MOST_OUTSIDE_MS = 0.4


class Load(NamedTuple):
    """Bodies of one kind, the path, and what the new side must reach of the old one: requests/s, or 1 ÷ p50 at one connection."""

    what: str
    path: str
    headers: Mapping[str, str]
    bodies: Sequence[bytes]
    connections: int
    at_least: float


def http_rows(before: Path | None, rounds: int, seconds: float, workers: int) -> Iterator[Row]:
    """Rates of this checkout, and their ratios to `before`'s; of several workers to one process."""
    settings: dict[str, Any] = {"logs__success_sample": 1, "queue__max_wait_seconds": 0}
    with sides_of(before, more_workers=workers, **settings) as sides:
        yield from compared_rows(sides, demo_loads(), rounds, seconds)
    with production_checkpoint() as checkpoint, sides_of(before, checkpoint, **settings) as sides:
        yield from compared_rows(sides, [production_load()], rounds, seconds)


def batch_rows(before: Path | None, rounds: int, seconds: float, workers: int) -> Iterator[Row]:
    """p50 of a `/rank/batch` of 32 requests of 7 candidates with several workers, at one connection, and its ratio to `before`'s."""
    settings: dict[str, Any] = {"logs__success_sample": 1, "queue__max_wait_seconds": 0, "workers": workers}
    request = orjson.loads((DEMO / "example.json").read_bytes())
    users = [[request | {"user_id": str(32 * call + row + 1)} for row in range(32)] for call in range(50)]
    bodies = [orjson.dumps({"requests": requests}) for requests in users]
    load = Load(
        f"32 × 7 candidates, batch, {workers} workers, one connection",
        "/rank/batch",
        {"content-type": "application/json"},
        bodies,
        1,
        1.0,
    )
    with sides_of(before, **settings) as sides:
        yield from compared_rows(sides, [load], rounds, seconds)


def compared_rows(sides: Mapping[str, Server], loads: Sequence[Load], rounds: int, seconds: float) -> Iterator[Row]:
    """Read every load on every side in turns.

    For one connection also what of a request lies outside the stages of Server-Timing: wrk's mean less what a ranking spent in them on
    average. So it holds wrk's own time and the network's, and what the service still does after a reply while wrk waits for the next.
    """
    readings_of: dict[tuple[str, str], list[wrk.Reading]] = {}
    outside_ms: dict[tuple[str, str], list[float]] = {}
    for turn in range(rounds + 1):
        for load in loads:
            for name, server in sides.items():
                headers = {**load.headers, **wrk.PATIENT}
                before = _stages(server)
                reading = wrk.read(server.url + load.path, load.bodies, load.connections, seconds, headers=headers)
                if reading.bad_per_s:
                    raise SystemExit(
                        f"{load.what}, {name}: {reading.bad_per_s:.1f} requests/s were refused, so this is no measure of speed"
                    )
                if turn:  # the first round warms up
                    readings_of.setdefault((load.what, name), []).append(reading)
                    inside_ms = 1e3 * _mean_in_stages(before, _stages(server))
                    outside_ms.setdefault((load.what, name), []).append(reading.mean_ms - inside_ms)
    for load in loads:
        ours = readings_of[load.what, "ours"]
        if load.connections == 1:
            yield Row.of(f"{load.what}: p50", Figure.of([reading.p50_ms for reading in ours]), "ms")
            for name in [name for name in ("ours", "before") if name in sides and load.path == "/rank"]:
                outside = Figure.of(outside_ms[load.what, name])
                target = MOST_OUTSIDE_MS if name == "ours" else math.inf
                yield Row.of(f"{load.what}: outside the stages, {name}", outside, "ms", target)
        else:
            yield Row.of(f"{load.what}: requests/s", Figure.of([reading.good_per_s for reading in ours]), "/s")
        for other in sides.keys() - {"ours"}:
            readings = readings_of[load.what, other]
            if load.connections == 1:
                sides_ms = [reading.p50_ms for reading in ours], [reading.p50_ms for reading in readings]
                over = ratio(*sides_ms) if other == "before" else ratio(*reversed(sides_ms))
                yield Row.of(f"{load.what}: p50 ÷ {other}'s", over, "×", load.at_least)
            else:
                rates = [reading.good_per_s for reading in ours], [reading.good_per_s for reading in readings]
                over = ratio(*rates) if other == "before" else ratio(*reversed(rates))
                what = f"{load.what}: ours ÷ before" if other == "before" else f"{load.what}: {other} ÷ one process"
                yield Row.of(what, over, "×", load.at_least if other == "before" else 1.6, at_least=True)


def _stages(server: Server) -> dict[str, tuple[float, int]]:
    """Seconds in each stage of the rankings so far, and how many there were."""
    name, text = "ranker_stage_duration_seconds", server.get("/metrics").text
    return {
        stage: (total(text, f"{name}_sum", stage=stage), round(total(text, f"{name}_count", stage=stage)))
        for stage in STAGES
    }


def _mean_in_stages(before: Mapping[str, tuple[float, int]], after: Mapping[str, tuple[float, int]]) -> float:
    """Seconds that a ranking spent in the stages on average."""
    grown = [(after[stage][0] - before[stage][0], after[stage][1] - before[stage][1]) for stage in STAGES]
    return sum(seconds / count for seconds, count in grown if count)


def demo_loads() -> list[Load]:
    """Seven candidates, and 64 in every form, on the demo."""
    example = (DEMO / "example.json").read_bytes()
    seven = [orjson.dumps(orjson.loads(example))]
    pages = first_visits(64)
    columns = [orjson.dumps(page) for page in pages]
    objects = [orjson.dumps(in_objects(page)) for page in pages]
    json, binary = {"content-type": "application/json"}, {"content-type": "application/octet-stream"}
    tensors, length = binary_bodies(pages[:1])
    return [
        Load("7 candidates, objects", "/rank", json, seven, CONNECTIONS, 0.5),
        Load("64 candidates, objects", "/rank", json, objects, CONNECTIONS, 0.55),
        Load("64 candidates, columns", "/rank", json, columns, CONNECTIONS, 0.62),
        Load(
            "64 candidates, binary tensors",
            "/v2/models/demo/infer",
            binary | {LENGTH: length},
            tensors,
            CONNECTIONS,
            0.7,
        ),
        Load("7 candidates, one connection", "/rank", json, seven, 1, 1.5),
        Load("64 candidates, columns, one connection", "/rank", json, columns, 1, 1.5),
    ]


def production_load() -> Load:
    """1,022 events and 2,800 candidates in columns."""
    bodies = [page.body for page in Traffic(TrafficSettings.production()).take(40)]
    return Load(
        "1,022 events × 2,800 candidates, columns", "/rank", {"content-type": "application/json"}, bodies, 4, 0.88
    )


def first_visits(candidates: int) -> list[dict[str, Any]]:
    """Pages of users that nobody has seen, in columns."""
    settings = replace(TrafficSettings(objects_share=0.0), new_user_share=1.0, mean_pages=1.0).with_fixed_candidates(
        candidates
    )
    return [orjson.loads(page.body) for page in Traffic(settings).take(USERS)]


def in_objects(page: Mapping[str, Any]) -> dict[str, Any]:
    """The same request with a list of objects for history and candidates."""
    return {**page, **{part: objects_of(page[part]) for part in ("history", "candidates")}}


def binary_bodies(pages: Sequence[Mapping[str, Any]]) -> tuple[list[bytes], str]:
    """Requests as binary tensors, and the length of their JSON part, which is the same for all."""
    names = orjson.loads((DEMO / "manifest.json").read_bytes())["action_names"]
    inferences = [inference_of(page, names).body(binary=True) for page in pages]
    return [body for body, _ in inferences], inferences[0][1][LENGTH]


@contextmanager
def production_checkpoint() -> Iterator[Path]:
    """Random weights in the shape of `mini`."""
    config = GEOMETRIES["mini"]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "mini"
        write_checkpoint(
            path, config, random_pieces(config, 0), labels_for(config, "mini", action_names=STANDARD_ACTIONS)
        )
        yield path


@contextmanager
def serving_of(checkout: Path, checkpoint: Path = DEMO, **settings: Any) -> Iterator[Server]:
    """The service of another checkout, with its own environment where it has one."""
    python = checkout / ".venv" / "bin" / "python"
    command = [str(python if python.exists() else ROOT / ".venv" / "bin" / "python"), "-m", "app"]
    with serving(
        checkpoint, command=command, cwd=checkout, env={"PYTHONPATH": os.fspath(checkout)}, **settings
    ) as server:
        yield server


@contextmanager
def sides_of(
    before: Path | None, checkpoint: Path = DEMO, *, more_workers: int = 0, **settings: Any
) -> Iterator[dict[str, Server]]:
    """The services to compare: `ours`; `before`, of another checkout, if there is one; `workers`, ours with so many, unless that is 0."""
    with ExitStack() as stack:
        sides = {"ours": stack.enter_context(serving(checkpoint, **settings))}
        if before is not None:
            sides["before"] = stack.enter_context(serving_of(before, checkpoint, **settings))
        if more_workers:
            sides["workers"] = stack.enter_context(serving(checkpoint, workers=more_workers, **settings))
        yield sides
