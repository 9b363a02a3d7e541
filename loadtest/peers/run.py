"""`make peers`: the same model and traffic behind five servers, in turns. Their scores must agree before anything is timed."""

from __future__ import annotations

import os
import sys
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import httpx
import numpy as np
import orjson
import typer

from loadtest.generate import wrk
from loadtest.generate.traffic import Traffic, TrafficSettings
from loadtest.machine import ROOT
from loadtest.rows import Row, publish
from loadtest.server import DEMO, Server, running, serving
from loadtest.timing import Figure, ratio
from weights.checkpoint import load_manifest
from weights.errors import CheckpointError

PROBES = 4
TOLERANCE = 2e-2  # of a probability: other stacks batch otherwise, which changes bf16's last bits


@dataclass(frozen=True, slots=True)
class Peer:
    """A server. `engine`: `dense` is the plain definition, `auto` this project's engine."""

    name: str
    module: str = ""
    engine: str = "auto"
    batch: int = 1
    ready: str = "/readyz"


PEERS = (
    Peer("this server"),
    Peer("plain FastAPI handler around our engine", "plain", ready="/ready"),
    Peer("plain FastAPI handler, dense", "plain", "dense", ready="/ready"),
    Peer("LitServe, batches of 8, dense", "lit", "dense", 8, "/health"),
    Peer("BentoML, dense", "bento", "dense"),
)


def measure(
    checkpoint: Path = DEMO,
    candidates: int = 64,
    seconds: Annotated[float, typer.Option(help="Length of one reading.")] = 4.0,
    rounds: Annotated[int, typer.Option(help="Readings of each server.")] = 3,
    connections: int = 16,
    dtype: str = "bfloat16",
) -> None:
    """Requests a second of this server ÷ those of four others. Run it as `make peers`, which installs the others."""
    try:
        window = load_manifest(checkpoint).config.history_length
    except CheckpointError as error:
        raise typer.BadParameter(str(error)) from error
    visits = replace(TrafficSettings(objects_share=0.0, history_window=window), new_user_share=1.0, mean_pages=1.0)
    bodies = [page.body for page in Traffic(visits.with_fixed_candidates(candidates)).take(2000)]
    with ExitStack() as stack:
        servers = {peer.name: stack.enter_context(start(peer, checkpoint, dtype)) for peer in PEERS}
        agree(servers, bodies[:PROBES])
        readings_of: dict[str, list[wrk.Reading]] = {name: [] for name in servers}
        for turn in range(rounds + 1):
            for name, server in servers.items():
                reading = wrk.read(f"{server.url}/rank", bodies, connections, seconds, headers=wrk.PATIENT)
                if not reading.good_per_s:
                    raise SystemExit(f"{name} answered nothing in {seconds} s: take more with --seconds")
                if turn:
                    readings_of[name].append(reading)
    ours = [reading.good_per_s for reading in readings_of[PEERS[0].name]]
    rows = []
    for name, readings in readings_of.items():
        rates = [reading.good_per_s for reading in readings]
        rows.append(Row.of(f"{name}: requests/s", Figure.of(rates), "/s"))
        rows.append(Row.of(f"{name}: p50", Figure.of([reading.p50_ms for reading in readings]), "ms"))
        if name != PEERS[0].name:
            target = 3.0 if "our engine" in name else 1.0
            rows.append(Row.of(f"this server ÷ {name}", ratio(ours, rates), "×", target, at_least=True))
    publish(rows, candidates=candidates, connections=connections, dtype=dtype)


def start(peer: Peer, checkpoint: Path, dtype: str) -> AbstractContextManager[Server]:
    """The server as a process of its own."""
    threads = os.cpu_count() or 1
    if not peer.module:
        return serving(
            checkpoint, dtype=dtype, threads=threads, device="cpu", cache__bytes=0, queue__max_wait_seconds=0
        )
    environment = {
        "PEER_CHECKPOINT": str(checkpoint.resolve()), "PEER_DTYPE": dtype, "PEER_THREADS": str(threads), "PEER_ENGINE": peer.engine,
        "PEER_BATCH": str(peer.batch), "BENTOML_DO_NOT_TRACK": "true", "BENTOML_HOME": str(ROOT / ".cache" / "bentoml"),
    }  # fmt: skip
    command = [sys.executable, "-m", f"loadtest.peers.{peer.module}", "{port}"]
    if peer.module == "bento":
        serve = ["bentoml", "serve", "loadtest.peers.bento:Ranker"]
        command = [sys.executable, "-m", *serve, "--host", "127.0.0.1", "--port", "{port}"]
    return running(command, environment, ready=peer.ready)


def agree(servers: dict[str, Server], bodies: list[bytes]) -> None:
    """Raises SystemExit with a sentence where a server has other scores than this project's."""
    for body in bodies:
        scores = {name: probabilities(server, body) for name, server in servers.items()}
        first = scores[PEERS[0].name]
        for name, other_scores in scores.items():
            if (largest := float(np.abs(other_scores - first).max())) > TOLERANCE:
                raise SystemExit(f"{name} has other scores: a probability differs by {largest:.3g}")


def probabilities(server: Server, body: bytes) -> np.ndarray[Any, Any]:
    """Probabilities of each candidate, `[C, A]`."""
    reply = httpx.post(f"{server.url}/rank", content=body, headers={"content-type": "application/json"}, timeout=60)
    reply.raise_for_status()
    return np.array([candidate["probabilities"] for candidate in orjson.loads(reply.content)["candidates"]])
