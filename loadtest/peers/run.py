"""Starts all peers, checks that their scores agree, loads them in turns with the same requests, and makes the table."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import torch

from loadtest.generate.generator import closed_samples
from loadtest.generate.traffic import Traffic, TrafficSettings
from loadtest.machine import ROOT, machine
from loadtest.matrix import markdown
from loadtest.measure.figures import percentiles_ms
from loadtest.servers.bare import bare_server
from loadtest.servers.launch import HOST, Server, free_port, process, ranking_server
from loadtest.servers.target import Target, TargetError
from model.tolerances import PARITY
from weights.checkpoint import load_manifest

SINGLE_SECONDS = 2.0
PROBES = 4
STACKS = ("fastapi", "uvicorn", "litserve", "bentoml", "torch")
NOTHING = "none: parses JSON, sends as many bytes"
# torch's threads sleep while waiting for each other, as spinning would starve the process that does HTTP
ALIKE = {"OMP_WAIT_POLICY": "PASSIVE"}
READY = {"plain": "/ready", "lit": "/health", "bento": "/readyz"}
COLUMNS = {  # column of the table: figure of a row, digits shown
    "±": ("throughput_spread_rps", 0), "p50 ms": ("p50_ms", 1), "p99 ms": ("p99_ms", 1), "p50 ms, 1 client": ("single_p50_ms", 2),
    "× first": ("ratio", 2), "failed": ("failed", 0),
}  # fmt: skip
FIGURES = ("throughput_rps", "p50_ms", "p99_ms", "single_p50_ms")

Block = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Peer:
    """A row of the table. `module`: a program that takes a port; if empty, this project's server with `settings`."""

    name: str
    engine: str
    module: str = ""
    needs: str = ""
    peer_engine: str = "dense"
    batch: int = 1
    settings: Mapping[str, Any] = field(default_factory=dict)


PEERS = (
    Peer("plain FastAPI", "dense reference", "plain"),
    Peer("LitServe", "dense reference", "lit", "litserve"),
    Peer("LitServe, batches of 8", "dense reference", "lit", "litserve", batch=8),
    Peer("BentoML", "dense reference", "bento", "bentoml"),
    Peer("plain FastAPI + our engine", "ours, no cache", "plain", peer_engine="auto"),
    Peer("ours, dense engine", "dense reference", settings={"backend": "dense", "batching__max_requests": 1}),
    Peer("ours, batching off", "ours", settings={"batching__max_requests": 1}),
    Peer("ours, context cache off", "ours, no cache", settings={"cache__bytes": 0}),
    Peer("ours", "ours"),
    Peer("ours, two fronts", "ours", settings={"fronts": 2}),
    Peer("bare function", NOTHING, "bare"),  # last, as it sends as many bytes as the server before it
)


@dataclass(frozen=True, slots=True)
class Stand:
    """Settings common to all peers. `candidates` a request, 0 for the mix of the traffic model."""

    checkpoint: Path
    dtype: str
    candidates: int
    threads: int
    production: bool

    @property
    def clients(self) -> int:
        """Clients at once. With production requests only four, so that a dense server answers within the 30 s timeout."""
        return 4 if self.production else 32

    @property
    def most_rps(self) -> int:
        """The rate for which bodies are made. A faster server ends its block early and is still measured right."""
        return 100 if self.production else 3_000

    def bodies(self, seed: int, count: int) -> list[bytes]:
        """Bodies of the traffic model, in arrays. With `production`, its sizes; else `candidates` each, or the mix if 0."""
        if self.production:
            return [request.body for request in Traffic(TrafficSettings.production(seed)).take(count)]
        window = load_manifest(self.checkpoint).config.history_length
        settings = TrafficSettings(seed=seed, history_window=window, objects_share=0.0)
        traffic = Traffic(settings.with_fixed_candidates(self.candidates) if self.candidates else settings)
        return [request.body for request in traffic.take(count)]

    def server(self, peer: Peer, before: Server | None) -> AbstractContextManager[Server]:
        """The peer as a process. The bare function replies with as many bytes as the server started `before` it."""
        if peer.engine == NOTHING:
            return bare_server(len(ask(before.target, self.bodies(1, 1)[0]).content) if before else 0)
        if not peer.module:
            settings = {"dtype": self.dtype, "threads": self.threads, "device": "cpu", **peer.settings}
            settings["queue__max_wait_seconds"] = 0  # the other stacks queue without a limit
            return ranking_server(checkpoint=self.checkpoint, environment=ALIKE, **settings)
        port = free_port()
        environment = {
            "PEER_CHECKPOINT": str(self.checkpoint.resolve()), "PEER_DTYPE": self.dtype, "PEER_THREADS": str(self.threads),
            "PEER_ENGINE": peer.peer_engine, "PEER_BATCH": str(peer.batch), "BENTOML_DO_NOT_TRACK": "true",
            "BENTOML_HOME": str(ROOT / ".cache" / "bentoml"), **ALIKE,
        }  # fmt: skip
        command = [sys.executable, "-m", f"loadtest.peers.{peer.module}", str(port)]
        if peer.module == "bento":
            command = [sys.executable, "-m", "bentoml", "serve", "loadtest.peers.bento:Ranker", "--host", HOST]
            command += ["--port", str(port), "--working-dir", str(ROOT)]
        return process(command, environment, port=port, ready_path=READY[peer.module])


def measure_peers(
    stand: Stand, peers: Sequence[Peer], seconds: float, blocks: int, say: Callable[[str], None]
) -> dict[str, Any]:
    """The table as plain JSON values. Every server gets the same bodies in the same order; the order of servers rotates by block.

    Raises TargetError if a server does not start, does not answer, or has other scores than the first.
    """
    loads: dict[str, list[Block]] = {peer.name: [] for peer in peers}
    with ExitStack() as stack:
        servers: dict[str, Server] = {}
        for peer in peers:
            say(f"starting {peer.name}")
            before = next(reversed(servers.values()), None)
            servers[peer.name] = stack.enter_context(stand.server(peer, before))
        tolerance = PARITY[
            getattr(torch, stand.dtype)
        ].probabilities  # batching in other stacks changes bf16's last bits
        targets = {peer.name: servers[peer.name].target for peer in peers if peer.engine != NOTHING}
        largest = largest_difference(targets, stand.bodies(1, PROBES), tolerance)
        say(f"all score alike: probabilities differ by at most {largest:.2g}")
        for server in servers.values():
            server.pause()
        for block in range(blocks):
            bodies = stand.bodies(block + 2, int((seconds + SINGLE_SECONDS) * stand.most_rps))
            for place in range(len(peers)):
                name = peers[(place + block) % len(peers)].name
                servers[name].resume()
                loads[name].append(found := measure_block(servers[name].target, bodies, seconds, stand.clients))
                servers[name].pause()
                figures = "  ".join(f"{key} {value:.4g}" for key, value in found.items())
                say(f"block {block + 1}/{blocks}  {name:28s} {figures}")
    rows = table(peers, loads)
    return {
        "kind": "peers",
        "machine": machine(),
        "settings": {
            **asdict(stand), "checkpoint": str(stand.checkpoint), "clients": stand.clients, "seconds": seconds, "blocks": blocks,
            "versions": {name: version(name) for name in STACKS if importlib.util.find_spec(name)},
        },
        "rows": rows,
        "largest_difference": largest,
        "report": report(rows, stand),
    }  # fmt: skip


def chosen(only: Sequence[str], say: Callable[[str], None]) -> list[Peer]:
    """The named peers, or all, without those not installed. Raises ValueError for an unknown name."""
    if unknown := set(only) - {peer.name for peer in PEERS}:
        known = ", ".join(peer.name for peer in PEERS)
        raise ValueError(f"no such peer: {', '.join(sorted(unknown))}; there are: {known}")
    peers = [peer for peer in PEERS if not only or peer.name in only]
    missing = [peer for peer in peers if peer.needs and importlib.util.find_spec(peer.needs) is None]
    for peer in missing:
        say(f"left out: {peer.name} ({peer.needs} is not installed; `make peers` installs it)")
    return [peer for peer in peers if peer not in missing]


def largest_difference(targets: Mapping[str, Target], bodies: Sequence[bytes], tolerance: float) -> float:
    """Largest difference of a probability between any server and the first. Raises TargetError if beyond `tolerance`, or without a 200."""
    first, largest = next(iter(targets)), 0.0
    for body in bodies:
        scores = {name: probabilities(name, target, body) for name, target in targets.items()}
        for name, found in scores.items():
            largest = max(largest, float(np.abs(found - scores[first]).max()))
            if largest > tolerance:
                raise TargetError(f"{name} has other scores than {first}: by up to {largest:.3g}")
    return largest


def probabilities(name: str, target: Target, body: bytes) -> np.ndarray[Any, Any]:
    """Probabilities of each candidate, `[C, A]`. Raises TargetError without a 200."""
    reply = ask(target, body)
    if reply.status_code != 200:
        raise TargetError(f"{name} answers {reply.status_code}: {reply.text[:300]}")
    return np.array([candidate["probabilities"] for candidate in reply.json()["candidates"]])


def ask(target: Target, body: bytes) -> httpx.Response:
    """Send a request; return the reply, whatever its status."""
    return httpx.post(f"{target.origin}/rank", content=body, headers={"Content-Type": "application/json"}, timeout=60)


def measure_block(target: Target, bodies: list[bytes], seconds: float, clients: int) -> Block:
    """Measure with `clients` clients, then with one, on bodies that this server has not seen. Raises TargetError without a 200."""
    address, payloads = (target.host, target.port), [target.request(body) for body in bodies]
    kept = int(len(bodies) * SINGLE_SECONDS / (seconds + SINGLE_SECONDS))  # bodies reserved for the single client
    many = closed_samples(address, payloads[:-kept], clients=clients, seconds=seconds, warm_up=4 * clients)
    one = closed_samples(address, payloads[-kept:], clients=1, seconds=SINGLE_SECONDS, warm_up=4)
    ok, ok_alone = many[many.status == 200], one[one.status == 200]
    if not len(ok) or not len(ok_alone):
        raise TargetError(f"{target.origin} answered nothing in a block")
    latency, alone = percentiles_ms(ok.service_seconds), percentiles_ms(ok_alone.service_seconds)
    failed = float((many.status != 200).sum() + (one.status != 200).sum())
    figures = (len(ok) / float(many.done.max()), latency["p50"], latency["p99"], alone["p50"], failed)
    return dict(zip((*FIGURES, "failed"), figures, strict=True))


def table(peers: Sequence[Peer], loads: Mapping[str, Sequence[Block]]) -> list[dict[str, Any]]:
    """Rows of medians over the blocks, with the spread of the rate and its ratio to the first peer's."""
    rows: list[dict[str, Any]] = []
    for peer in peers:
        blocks = loads[peer.name]
        row: dict[str, Any] = {"name": peer.name, "engine": peer.engine, "ours": not peer.module}
        row |= {key: float(np.median([block[key] for block in blocks])) for key in FIGURES}
        row["throughput_spread_rps"] = float(np.ptp([block["throughput_rps"] for block in blocks])) / 2
        row["failed"] = int(sum(block["failed"] for block in blocks))
        row["ratio"] = row["throughput_rps"] / (rows[0] if rows else row)["throughput_rps"]
        rows.append(row)
    return rows


def verdict(rows: Sequence[Mapping[str, Any]], clients: int) -> str:
    """A sentence about the fastest server that ranks."""
    ranking = [row for row in rows if row["engine"] != NOTHING] or rows
    fastest = max(ranking, key=lambda row: float(row["throughput_rps"]))
    rate = f"{fastest['throughput_rps']:.0f} requests / s at {clients} clients"
    return f"{fastest['name']}: {rate}, {fastest['ratio']:.1f} times {rows[0]['name']}."


def report(rows: Sequence[Mapping[str, Any]], stand: Stand) -> str:
    """The table for the README, with the machine and settings."""
    where, candidates = machine(), "production's 2 800" if stand.production else stand.candidates or "mixed"
    at = f"{where['cpu']}, {where['cores']} cores, {stand.threads} threads, {stand.dtype}, {candidates} candidates a request"
    load = f"commit {where['commit']}, {where['at']}, load average {where['load_average_1m']} at the end"
    lines = []
    for row in rows:
        figures = [f"{row[name]:.{digits}f}" for name, digits in COLUMNS.values()]
        lines.append([row["name"], row["engine"], f"{row['throughput_rps']:.0f}", *figures])
    head = ("server", "model", f"requests / s, {stand.clients} clients", *COLUMNS)
    return f"# Peers\n\n{verdict(rows, stand.clients)} {at}, {load}.\n\n{markdown(head, lines, 2)}\n"
