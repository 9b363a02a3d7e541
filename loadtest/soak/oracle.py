"""Expected replies, from a server without cache or batching, and closed-loop traffic that is checked against them."""

from __future__ import annotations

import asyncio
import hashlib
import random
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from loadtest.generate.http_client import Client, Reply
from loadtest.generate.payload import rank_request
from loadtest.machine import ROOT
from loadtest.servers.launch import HOST, Server, free_port
from loadtest.soak.servers import real
from weights.checkpoint import load_manifest
from weights.format.manifest import MANIFEST_NAME
from weights.synthetic.small_checkpoint import write_small_checkpoint

NAMES = ("v0", "v1")
TOKEN = "soak"

Fingerprint = bytes


def fingerprint(reply: Reply) -> Fingerprint:
    """Names the part of a reply that must be the same bits each time: everything but the timings."""
    scored, _, _ = reply.body.partition(b'"timings_ms"')
    return hashlib.blake2b(scored, digest_size=16).digest()


def requests(count: int) -> list[bytes]:
    """Payloads of odd sizes; a few users come back with other candidates, so that their contexts can be cached."""
    sizes = (1, 7, 33, 64, 65, 100, 513)
    return [
        rank_request(1 + row % (count // 2 + 1) + 10**6 * (row % 3), sizes[row % len(sizes)]) for row in range(count)
    ]


@contextmanager
def two_checkpoints() -> Iterator[Path]:
    """A directory with `v0`, the checkpoint of the repository, and `v1`, the same shape with other weights and action names."""
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        shutil.copytree(ROOT / "weights" / "demo", root / NAMES[0])
        write_small_checkpoint(root / NAMES[1], seed=1)
        rename_actions(root / NAMES[1])
        yield root


def rename_actions(checkpoint: Path) -> None:
    """Give each action of a checkpoint another name, so that a reply in the words of another version is seen."""
    manifest = load_manifest(checkpoint)
    renamed = manifest.relabelled(
        action_names=tuple(f"{name}_again" for name in manifest.action_names),
        score_weights={f"{name}_again": weight for name, weight in manifest.score_weights.items()},
    )
    (checkpoint / MANIFEST_NAME).write_bytes(renamed.to_json())


def admin_settings(root: Path) -> dict[str, object]:
    """Settings of a server whose checkpoint can be changed; `swap` does it."""
    digest = hashlib.sha256(TOKEN.encode()).hexdigest()
    return {"checkpoint": root / NAMES[0], "admin__port": free_port(), "admin__token_sha256": digest}


async def swap(port: object, name: str) -> int:
    """Ask the admin port for another checkpoint; returns the status."""
    async with httpx.AsyncClient(timeout=60, headers={"Authorization": f"Bearer {TOKEN}"}) as client:
        reply = await client.post(f"http://{HOST}:{port}/admin/reload", json={"checkpoint": name})
        return reply.status_code


async def learn(server: Server, payloads: list[bytes]) -> tuple[str, list[Fingerprint]]:
    """The version that a server names, and the fingerprint of each payload's reply when it is asked alone."""
    async with Client(HOST, server.port, max_connections=1, keep_bodies=True) as client:
        replies = [await client.ask(each) for each in payloads]
    bad = [reply.status for reply in replies if reply.status != 200]
    if bad:
        raise RuntimeError(f"the oracle answered {bad[0]}")
    return replies[0].headers[b"x-model-version"].decode(), [fingerprint(reply) for reply in replies]


def oracles(root: Path, payloads: list[bytes]) -> dict[str, list[Fingerprint]]:
    """Version → expected fingerprint of each payload, from servers of their own without cache, batching and swaps."""
    known = {}
    for name in NAMES:
        with real(checkpoint=root / name, cache__bytes=0, batching__enabled="false") as server:
            version, expected = asyncio.run(learn(server, payloads))
            known[version] = expected
    return known


@dataclass
class Checked:
    """Closed-loop traffic, each reply held against the oracle. `crossed` counts replies that belong to another request."""

    known: Mapping[str, list[Fingerprint]]
    payloads: list[bytes]
    cancel_share: float = 0.0
    answered: int = 0
    refused: int = 0
    cancelled: int = 0
    crossed: int = 0
    lost: int = 0
    versions: dict[str, int] = field(default_factory=dict)
    stop: bool = False

    async def run(self, server: Server, clients: int) -> None:
        """Ask at random until `stop` is set."""
        async with Client(HOST, server.port, max_connections=clients, keep_bodies=True, timeout_seconds=20) as client:
            await asyncio.gather(*(self._ask_on(client, server.port, random.Random(seed)) for seed in range(clients)))

    async def _ask_on(self, client: Client, port: int, draw: random.Random) -> None:
        while not self.stop:
            row = draw.randrange(len(self.payloads))
            if draw.random() < self.cancel_share:
                await vanish(port, self.payloads[row], draw.random() * 0.01)
                self.cancelled += 1
            else:
                self._check(row, await client.ask(self.payloads[row]))

    def _check(self, row: int, reply: Reply) -> None:
        if reply.status in (429, 503):
            self.refused += 1
        elif reply.status != 200:
            self.lost += 1
        else:
            version = reply.headers[b"x-model-version"].decode()
            self.answered += 1
            self.versions[version] = self.versions.get(version, 0) + 1
            self.crossed += self.known[version][row] != fingerprint(reply)


async def vanish(port: int, request: bytes, after_seconds: float) -> None:
    """Send a request and go away without waiting for the reply."""
    try:
        _, writer = await asyncio.open_connection(HOST, port)
    except OSError:
        return
    writer.write(request)
    await asyncio.sleep(after_seconds)
    writer.transport.abort()
