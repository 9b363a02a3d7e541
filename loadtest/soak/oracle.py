"""Expected replies, from a server without cache or batching, and callers that check their replies against them."""

from __future__ import annotations

import hashlib
import random
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx

from loadtest.generate.http_client import Reply
from loadtest.generate.payload import rank_request
from loadtest.machine import DEMO
from loadtest.servers.launch import HOST, Server, free_port
from loadtest.soak.clients import Callers, ask_all
from loadtest.soak.servers import real
from weights.checkpoint import load_manifest
from weights.format.manifest import MANIFEST_NAME
from weights.synthetic.small_checkpoint import write_small_checkpoint

NAMES = ("v0", "v1")
TOKEN = "soak"

Known = Mapping[str, Mapping[bytes, bytes]]
"""Fingerprints of replies, by version and request."""


def fingerprint(reply: Reply) -> bytes:
    """A hash of the part of a reply that must not change: everything except the timings."""
    scored, _, _ = reply.body.partition(b'"timings_ms"')
    return hashlib.blake2b(scored, digest_size=16).digest()


def requests(count: int) -> list[bytes]:
    """Payloads of odd sizes. A few users return with other candidates, so that their contexts can be cached."""
    sizes = (1, 7, 33, 64, 65, 100, 513)
    return [
        rank_request(1 + row % (count // 2 + 1) + 10**6 * (row % 3), sizes[row % len(sizes)]) for row in range(count)
    ]


@contextmanager
def two_checkpoints() -> Iterator[Path]:
    """A directory with `v0`, the checkpoint of the repository, and `v1`, the same shape with other weights and action names."""
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        shutil.copytree(DEMO, root / NAMES[0])
        write_small_checkpoint(root / NAMES[1], seed=1)
        rename_actions(root / NAMES[1])
        yield root


def rename_actions(checkpoint: Path) -> None:
    """Rename each action of a checkpoint, so that a reply with another version's names is noticed."""
    manifest = load_manifest(checkpoint)
    renamed = replace(
        manifest,
        action_names=tuple(f"{name}_again" for name in manifest.action_names),
        score_weights={f"{name}_again": weight for name, weight in manifest.score_weights.items()},
    )
    (checkpoint / MANIFEST_NAME).write_bytes(renamed.to_json())


def admin_settings(root: Path) -> dict[str, object]:
    """Settings of a server whose checkpoint `swap` can change."""
    digest = hashlib.sha256(TOKEN.encode()).hexdigest()
    return {"checkpoint": root / NAMES[0], "admin__port": free_port(), "admin__token_sha256": digest}


def admin_client(port: object) -> httpx.AsyncClient:
    """A client of a server's admin port."""
    headers = {"Authorization": f"Bearer {TOKEN}"}
    return httpx.AsyncClient(base_url=f"http://{HOST}:{port}", headers=headers, timeout=60)


def swap(port: object, name: str, seconds: float = 60.0) -> int:
    """Ask the admin port to load a checkpoint. Return the status, 0 without a reply in time."""
    url, headers = f"http://{HOST}:{port}/admin/reload", {"Authorization": f"Bearer {TOKEN}"}
    try:
        return httpx.post(url, json={"checkpoint": name}, headers=headers, timeout=seconds).status_code
    except httpx.HTTPError:
        return 0


def learn(server: Server, payloads: Sequence[bytes]) -> Known:
    """Send each payload alone to an idle server; return the fingerprints. Raises RuntimeError unless all get 200."""
    replies = ask_all(server.port, payloads, keep_bodies=True, timeout_seconds=60)
    bad = [reply.status for reply in replies if reply.status != 200]
    if bad:
        raise RuntimeError(f"the oracle answered {bad[0]}")
    prints = {payload: fingerprint(reply) for payload, reply in zip(payloads, replies, strict=True)}
    return {replies[0].headers[b"x-model-version"].decode(): prints}


def oracles(root: Path, payloads: Sequence[bytes]) -> Known:
    """Expected replies of both checkpoints, each from its own server without cache, batching and swaps."""
    known: dict[str, Mapping[bytes, bytes]] = {}
    for name in NAMES:
        with real(checkpoint=root / name, cache__bytes=0, batching__max_requests=1) as server:
            known |= learn(server, payloads)
    return known


class Checked(Callers):
    """Callers that send known payloads. `crossed` counts replies that differ from the oracle; `versions` counts replies by version."""

    def __init__(self, known: Known, port: int, clients: int, **options: Any) -> None:
        payloads = list(next(iter(known.values())))

        def payload(draw: random.Random) -> bytes:
            return draw.choice(payloads)

        super().__init__(port, clients, payload, keep_bodies=True, timeout_seconds=20, **options)
        self.known = known
        self.answered = self.refused = self.crossed = self.lost = 0
        self.versions: Counter[str] = Counter()

    def note(self, payload: bytes, reply: Reply) -> None:
        """Check a reply against the oracle. Keeps no reply, since memory is being watched."""
        if reply.status in (429, 503):
            self.refused += 1
        elif reply.status != 200:
            self.lost += 1
        else:
            version = reply.headers[b"x-model-version"].decode()
            self.answered += 1
            self.versions[version] += 1
            self.crossed += self.known[version][payload] != fingerprint(reply)
