"""Starts every peer, checks that they score alike, loads them in turns with the same requests, and makes the table."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import torch

from loadtest.generate.generator import closed_samples
from loadtest.generate.traffic import Traffic, TrafficSettings
from loadtest.machine import ROOT, machine
from loadtest.measure.figures import percentiles_ms
from loadtest.servers.bare import bare_server
from loadtest.servers.launch import Server, free_port, process, ranking_server
from loadtest.servers.target import Target, TargetError
from model.tolerances import PARITY
from weights.checkpoint import load_manifest

CLIENTS = 32
SINGLE_SECONDS = 2.0
MOST_RPS = 3_000  # bodies are made for this rate; a faster server ends its block early, and is measured as it is
PROBES = 4
NOTHING = "none: parses JSON, sends as many bytes"
# torch's threads sleep while they wait for each other: spinning starves the process that does HTTP
ALIKE = {"OMP_WAIT_POLICY": "PASSIVE"}


@dataclass(frozen=True, slots=True)
class Peer:
    """A row of the table. `command` empty: this project's server with `settings`; otherwise a program that takes a port."""

    name: str
    engine: str
    module: str = ""
    needs: str = ""
    peer_engine: str = "dense"
    batch: int = 1
    settings: tuple[tuple[str, str], ...] = ()


PEERS = (
    Peer("plain FastAPI", "dense reference", "plain"),
    Peer("LitServe", "dense reference", "lit", "litserve"),
    Peer("LitServe, batches of 8", "dense reference", "lit", "litserve", batch=8),
    Peer("BentoML", "dense reference", "bento", "bentoml"),
    Peer("plain FastAPI + our engine", "ours, no cache", "plain", peer_engine="auto"),
    Peer("ours, dense engine", "dense reference", settings=(("backend", "dense"), ("batching__enabled", "false"))),
    Peer("ours, batching off", "ours", settings=(("batching__enabled", "false"),)),
    Peer("ours, context cache off", "ours, no cache", settings=(("cache__bytes", "0"),)),
    Peer("ours", "ours"),
    Peer("ours, two fronts", "ours", settings=(("fronts", "2"),)),
    Peer("bare function", NOTHING, "bare"),  # last: it sends as many bytes as the one before
)


def measure_peers(
    checkpoint: Path,
    seconds: float,
    blocks: int,
    candidates: int,
    only: Sequence[str],
    dtype: str,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """The table as plain JSON values. Every server sees the same bodies in the same order, in blocks whose order rotates.

    Raises TargetError where a server does not start, does not answer, or scores otherwise than the first.
    """
    peers = _chosen(only, say)
    threads = os.cpu_count() or 1
    window = load_manifest(checkpoint).config.history_length
    loads: dict[str, list[dict[str, float]]] = {peer.name: [] for peer in peers}
    with ExitStack() as stack:
        servers: dict[str, Server] = {}
        for peer in peers:
            say(f"starting {peer.name}")
            if peer.engine == NOTHING:
                starts = bare_server(_reply_bytes([*servers.values()][-1].target, candidates, window) if servers else 0)
            else:
                starts = _server(peer, checkpoint, dtype, threads)
            servers[peer.name] = stack.enter_context(starts)
        tolerance = PARITY[getattr(torch, dtype)].probabilities  # stacks may batch, and batching moves bf16's last bits
        targets = {peer.name: servers[peer.name].target for peer in peers if peer.engine != NOTHING}
        largest = _check_alike(targets, candidates, window, tolerance)
        for server in servers.values():
            server.pause()
        say(f"all score alike: probabilities differ by at most {largest:.2g}")
        for block in range(blocks):
            bodies = _bodies(block + 2, candidates, window, int((seconds + SINGLE_SECONDS) * MOST_RPS))
            for place in range(len(peers)):
                peer = peers[(place + block) % len(peers)]
                servers[peer.name].resume()
                loads[peer.name].append(_block(servers[peer.name].target, bodies, seconds))
                servers[peer.name].pause()
                say(f"block {block + 1}/{blocks}  {peer.name:28s} {_brief(loads[peer.name][-1])}")
    rows = _rows(peers, loads)
    return {
        "format": 1,
        "kind": "peers",
        "machine": machine(),
        "settings": {
            "checkpoint": str(checkpoint), "dtype": dtype, "threads": threads, "seconds": seconds, "blocks": blocks,
            "candidates": candidates, "clients": CLIENTS, "versions": _versions(),
        },
        "rows": rows,
        "largest_difference": largest,
        "verdict": _verdict(rows),
        "markdown": _markdown(rows, dtype, threads, candidates),
    }  # fmt: skip


def _chosen(only: Sequence[str], say: Callable[[str], None]) -> list[Peer]:
    unknown = set(only) - {peer.name for peer in PEERS}
    if unknown:
        raise ValueError(
            f"no such peer: {', '.join(sorted(unknown))}; there are: {', '.join(peer.name for peer in PEERS)}"
        )
    peers = [peer for peer in PEERS if not only or peer.name in only]
    missing = [peer for peer in peers if peer.needs and importlib.util.find_spec(peer.needs) is None]
    for peer in missing:
        say(f"left out: {peer.name} ({peer.needs} is not installed; `make peers` installs it)")
    return [peer for peer in peers if peer not in missing]


@contextmanager
def _server(peer: Peer, checkpoint: Path, dtype: str, threads: int) -> Iterator[Server]:
    """The peer as a process."""
    if not peer.module:
        settings: dict[str, Any] = {"dtype": dtype, "threads": threads, "device": "cpu", **dict(peer.settings)}
        settings["queue__max_wait_seconds"] = 0  # the others queue without end
        with ranking_server(checkpoint=checkpoint, environment=ALIKE, **settings) as server:
            yield server
        return
    port = free_port()
    environment = {
        "PEER_CHECKPOINT": str(checkpoint.resolve()), "PEER_DTYPE": dtype, "PEER_THREADS": str(threads),
        "PEER_ENGINE": peer.peer_engine, "PEER_BATCH": str(peer.batch), "BENTOML_DO_NOT_TRACK": "true",
        "BENTOML_HOME": str(ROOT / ".cache" / "bentoml"), **ALIKE,
    }  # fmt: skip
    command = [sys.executable, "-m", f"loadtest.peers.{peer.module}", str(port)]
    ready = {"plain": "/ready", "lit": "/health", "bento": "/readyz"}[peer.module]
    if peer.module == "bento":
        command = [sys.executable, "-m", "bentoml", "serve", "loadtest.peers.bento:Ranker", "--host", "127.0.0.1"]
        command += ["--port", str(port), "--working-dir", str(ROOT)]
    with process(command, environment, port=port, ready_path=ready) as server:
        yield server


def _bodies(seed: int, candidates: int, window: int, count: int) -> list[bytes]:
    settings = TrafficSettings(seed=seed, history_window=window)
    traffic = Traffic(settings.with_fixed_candidates(candidates) if candidates else settings)
    return [request.body for request in traffic.take(count)]


def _check_alike(targets: dict[str, Target], candidates: int, window: int, tolerance: float) -> float:
    """The largest difference of a probability between any server and the first; a table of different models would be void."""
    reference: list[np.ndarray[Any, Any]] = []
    largest = 0.0
    for name, target in targets.items():
        for index, body in enumerate(_bodies(1, candidates, window, PROBES)):
            reply = _ask(target, body)
            if reply.status_code != 200:
                raise TargetError(f"{name} answers {reply.status_code}: {reply.text[:300]}")
            found = np.array([candidate["probabilities"] for candidate in reply.json()["candidates"]])
            if len(reference) <= index:
                reference.append(found)
            largest = max(largest, float(np.abs(found - reference[index]).max()))
            if largest > tolerance:
                raise TargetError(f"{name} scores otherwise than {next(iter(targets))}: by up to {largest:.3g}")
    return largest


def _reply_bytes(target: Target, candidates: int, window: int) -> int:
    return len(_ask(target, _bodies(1, candidates, window, 1)[0]).content)


def _ask(target: Target, body: bytes) -> httpx.Response:
    return httpx.post(f"{target.origin}/rank", content=body, headers={"Content-Type": "application/json"}, timeout=60)


def _block(target: Target, bodies: list[bytes], seconds: float) -> dict[str, float]:
    """First 32 clients, then one, on bodies that this server has not seen."""
    address, payloads, warm_up = (target.host, target.port), [target.request(body) for body in bodies], 4 * CLIENTS
    kept = int(SINGLE_SECONDS * MOST_RPS)  # for the one client, however fast the others were
    many = closed_samples(address, payloads[:-kept], clients=CLIENTS, seconds=seconds, warm_up=warm_up)
    one = closed_samples(address, payloads[-kept:], clients=1, seconds=SINGLE_SECONDS, warm_up=4)
    ok, ok_alone = many.where(many.status == 200), one.where(one.status == 200)
    if not len(ok) or not len(ok_alone):
        raise TargetError(f"{target.origin} answered nothing in a block")
    latency = percentiles_ms(ok.service_seconds)
    return {
        "throughput_rps": len(ok) / float(many.done.max()),
        "p50_ms": latency["p50"],
        "p99_ms": latency["p99"],
        "single_p50_ms": percentiles_ms(ok_alone.service_seconds)["p50"],
        "failed": float((many.status != 200).sum() + (one.status != 200).sum()),
    }


def _rows(peers: list[Peer], loads: dict[str, list[dict[str, float]]]) -> list[dict[str, Any]]:
    rows = []
    first = float(np.median([block["throughput_rps"] for block in loads[peers[0].name]]))
    for peer in peers:
        blocks = loads[peer.name]
        row: dict[str, Any] = {"name": peer.name, "engine": peer.engine, "ours": not peer.module}
        for key in ("throughput_rps", "p50_ms", "p99_ms", "single_p50_ms"):
            row[key] = float(np.median([block[key] for block in blocks]))
        rates = [block["throughput_rps"] for block in blocks]
        row["throughput_spread_rps"] = (max(rates) - min(rates)) / 2
        row["failed"] = int(sum(block["failed"] for block in blocks))
        row["ratio"] = row["throughput_rps"] / first
        rows.append(row)
    return rows


def _brief(block: dict[str, float]) -> str:
    failed = f"  failed {block['failed']:.0f}" if block["failed"] else ""
    return f"{block['throughput_rps']:7.1f}/s  p50 {block['p50_ms']:7.1f} ms  alone {block['single_p50_ms']:6.2f} ms{failed}"


def _verdict(rows: list[dict[str, Any]]) -> str:
    ranking = [row for row in rows if row["engine"] != NOTHING] or rows
    fastest, first = max(ranking, key=lambda row: float(row["throughput_rps"])), rows[0]
    return (
        f"{fastest['name']}: {fastest['throughput_rps']:.0f} requests / s at {CLIENTS} clients, "
        f"{fastest['ratio']:.1f} times {first['name']}."
    )


def _markdown(rows: list[dict[str, Any]], dtype: str, threads: int, candidates: int) -> str:
    where = machine()
    lines = [
        "# Peers",
        "",
        f"{where['cpu']}, {where['cores']} cores, {threads} threads, {dtype}, {candidates or 'mixed'} candidates a request, "
        f"commit {where['commit']}, {where['at']}, load average {where['load_average_1m']} at the end.",
        "",
        f"| server | model | requests / s, {CLIENTS} clients | ± | p50 ms | p99 ms | p50 ms, 1 client | × first | failed |",
        "|---|---|--:|--:|--:|--:|--:|--:|--:|",
    ]
    lines += [
        f"| {row['name']} | {row['engine']} | {row['throughput_rps']:.0f} | {row['throughput_spread_rps']:.0f} | {row['p50_ms']:.1f} "
        f"| {row['p99_ms']:.1f} | {row['single_p50_ms']:.2f} | {row['ratio']:.2f} | {row['failed']} |"
        for row in rows
    ]
    return "\n".join(lines) + "\n"


def _versions() -> dict[str, str]:
    names = ("fastapi", "uvicorn", "litserve", "bentoml", "torch")
    found = {}
    for name in names:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
