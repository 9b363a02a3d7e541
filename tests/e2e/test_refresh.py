"""A running service that watches the link serves what refresh publishes, and what it goes back to, without a lost request."""

from __future__ import annotations

import threading
from pathlib import Path

import httpx
import pytest

pytest.importorskip("duckdb")

from loadtest.server import PLAIN, Server, serving, wait_until
from tests.weights.call import run
from tests.weights.lab.loop.nights import OPTIONS, make_nights
from weights.checkpoint import load_manifest
from weights.lab.training.page_example import request_body


class Callers:
    """Threads that rank without a break, and what they were answered: the status and the model's version."""

    def __init__(self, server: Server, body: object, threads: int = 2) -> None:
        self.answers: list[tuple[int, str]] = []
        self._server, self._body, self._ends = server, body, threading.Event()
        self._threads = [threading.Thread(target=self._call) for _ in range(threads)]

    def __enter__(self) -> Callers:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ends.set()
        for thread in self._threads:
            thread.join()

    def _call(self) -> None:
        with httpx.Client(base_url=self._server.url, timeout=60, verify=PLAIN) as client:
            while not self._ends.is_set():
                reply = client.post("/rank", json=self._body)
                said = reply.json()
                self._ends.wait(0.005)  # leaves the processor to the turn
                self.answers.append((reply.status_code, said["model"]["version"] if reply.is_success else str(said)))

    def newest(self) -> str:
        return self.answers[-1][1] if self.answers else ""


@pytest.mark.slow
def test_a_published_version_is_served_without_a_lost_request(tmp_path: Path) -> None:
    nights = make_nights(tmp_path)
    link, first = nights.link(tmp_path), load_manifest(nights.checkpoint).version
    nights.serve(tmp_path, 0)
    nights.act(tmp_path, 0)
    where = "--checkpoint", link, "--out", tmp_path / "loop"
    with (
        serving(link, reload__watch_seconds=0.25, threads=1, logs__level="error") as server,
        Callers(server, request_body(nights.examples, len(nights.examples) - 1)) as callers,
    ):
        code, said = run("refresh", "--served", tmp_path / "served", "--events", tmp_path / "events", *where, *OPTIONS)
        assert code == 0, said
        published = load_manifest(link).version
        wait_until(lambda: callers.newest() == published, 60, server)
        assert run("refresh", "--back", *where)[0] == 0
        wait_until(lambda: callers.newest() == first, 60, server)
    assert {status for status, _ in callers.answers} == {200}
    assert {version for _, version in callers.answers} == {first, published}
