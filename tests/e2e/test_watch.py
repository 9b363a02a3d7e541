"""Watched towers and corpus: a real process follows links that are renamed over the old ones, and refuses what is broken."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest

from loadtest.servers.launch import Server
from loadtest.soak.corpora import USERS, Oracle, search_request
from tests.e2e.process import DEMO, serving

LOOK_SECONDS = 0.05
CHANGE_SECONDS = 60.0
JSON = {"content-type": "application/json"}


class Watched:
    """A server that watches the links `towers` and `posts` of a directory, and the corpora that they may lead to."""

    def __init__(self, root: Path, server: Server, oracles: dict[str, Oracle]) -> None:
        self.root = root
        self.server = server
        self.oracles = oracles
        self.client = httpx.Client(base_url=server.url, timeout=30)

    def served(self) -> str:
        """The version of towers and corpus in /info."""
        retrieval = self.client.get("/info").json()["retrieval"]
        assert retrieval["model"]["version"] == retrieval["corpus"]["version"]
        version: str = retrieval["corpus"]["version"]
        return version

    def refusals(self) -> list[str]:
        """Why reloads were refused."""
        return [line["reason"] for line in self.server.lines if line["event"] == "reload_failed"]

    def answers_as(self, name: str) -> bool:
        """Whether every user gets this corpus's posts, order and bits, and is told its version."""
        expected = [self.oracles[name].expected(user, 0) for user in range(USERS)]
        return [self._answer(user, name) for user in range(USERS)] == expected

    def _answer(self, user: int, name: str) -> tuple[list[int], bytes]:
        body = search_request(user, "/retrieve").partition(b"\r\n\r\n")[2]
        found = self.client.post("/retrieve", content=body, headers=JSON).raise_for_status().json()
        assert (found["model"]["version"], found["corpus"]["version"]) == (name, name)
        scores = np.array([post["score"] for post in found["posts"]], np.float32)
        return [int(post["post_id"]) for post in found["posts"]], scores.tobytes()


def point(link: Path, place: Path) -> None:
    """As an operator swaps a directory: a new link, renamed over the old one."""
    fresh = link.with_name(f"{link.name}.new")
    fresh.symlink_to(place)
    fresh.rename(link)


def until(holds: Callable[[], object]) -> None:
    deadline = time.monotonic() + CHANGE_SECONDS
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(LOOK_SECONDS)


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    root = tmp_path_factory.mktemp("watched")
    oracles = {name: Oracle(name, root, number) for number, name in enumerate("ab")}
    point(root / "towers", oracles["a"].towers)
    point(root / "posts", oracles["a"].corpus)
    links = {
        "retrieval__checkpoint": str(root / "towers"),
        "retrieval__corpus": str(root / "posts"),
    }  # not where they lead
    with serving(DEMO, threads=1, reload__watch_seconds=LOOK_SECONDS, **links) as server:
        watched = Watched(root, server, oracles)
        yield watched
        watched.client.close()


def test_a_corpus_beside_is_served_once_both_links_lead_there(watched: Watched) -> None:
    """With the corpus alone it is refused: other towers made it."""
    other = watched.oracles["b"]
    assert watched.answers_as("a")
    point(watched.root / "posts", other.corpus)
    until(watched.refusals)
    assert "were made by towers b" in watched.refusals()[-1]
    assert watched.served() == "a"
    assert watched.answers_as("a")
    point(watched.root / "towers", other.towers)
    until(lambda: watched.served() == "b")
    assert watched.answers_as("b")
    assert len(watched.refusals()) == 1


def test_a_damaged_corpus_is_refused_with_its_file_and_the_next_one_is_served(watched: Watched) -> None:
    first = watched.oracles["a"]
    assert watched.served() == "b"
    damaged = shutil.copytree(first.corpus, watched.root / "damaged")
    vectors = bytearray((damaged / "vectors.safetensors").read_bytes())
    vectors[-1] ^= 1
    (damaged / "vectors.safetensors").write_bytes(vectors)
    point(watched.root / "posts", damaged)
    point(watched.root / "towers", first.towers)
    until(lambda: "vectors.safetensors" in watched.refusals()[-1])
    assert watched.served() == "b"
    assert watched.answers_as("b")
    point(watched.root / "posts", first.corpus)
    until(lambda: watched.served() == "a")
    assert watched.answers_as("a")
