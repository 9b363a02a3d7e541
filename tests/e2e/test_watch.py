"""A service that watches its directories: it follows links that are renamed over the old ones, and refuses what is broken."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from structlog.testing import capture_logs

from app.settings import Reload, Retrieval, Settings
from loadtest.server import DEMO, example, wait_until
from tests.app.api.live import ready
from tests.support import corpora
from weights.actions import STANDARD_ACTIONS
from weights.checkpoint import load_checkpoint, save_checkpoint

SECONDS = 120.0


def point(link: Path, place: Path) -> None:
    """As an operator swaps a directory: a new link, renamed over the old one."""
    fresh = link.with_name(f"{link.name}.new")
    fresh.symlink_to(place)
    fresh.rename(link)


@dataclass
class Watched:
    """A service that watches the links `towers` and `posts` of `root`; the directories that they may lead to, by version."""

    root: Path
    client: httpx.Client
    directories: dict[str, tuple[Path, Path]]
    log: Sequence[Mapping[str, Any]]
    answers: dict[str, Any] = field(default_factory=dict)

    def version(self) -> str:
        retrieval = self.client.get("/info").json()["retrieval"]
        assert retrieval["model"]["version"] == retrieval["corpus"]["version"]
        version: str = retrieval["corpus"]["version"]
        return version

    def refusals(self) -> list[str]:
        """Why reloads were refused."""
        return [line["reason"] for line in self.log if line["event"] == "reload_failed"]

    def answers_as(self, version: str) -> bool:
        """Whether replies name this version, and are those of the first time that it served."""
        replies = [self.client.post("/retrieve", json={"user_id": user, "k": 50}) for user in range(1, 6)]
        found = [reply.raise_for_status().json() for reply in replies]
        assert {(each["model"]["version"], each["corpus"]["version"]) for each in found} == {(version, version)}
        posts = [each["posts"] for each in found]
        return bool(self.answers.setdefault(version, posts) == posts)


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[Watched]:
    root = tmp_path
    both = {name: corpora.written(root, seed, name, actions=STANDARD_ACTIONS) for seed, name in enumerate(("a", "b"))}
    links = root / "towers", root / "posts"
    for link, place in zip(links, both["a"], strict=True):
        point(link, place)
    with watching(DEMO, retrieval=Retrieval(checkpoint=links[0], corpus=links[1])) as client, capture_logs() as log:
        yield Watched(root, client, both, log)


@contextmanager
def watching(checkpoint: Path, **groups: Any) -> Iterator[httpx.Client]:
    """A client of a service that looks at its directories four times a second."""
    settings = Settings(port=0, checkpoint=checkpoint, threads=1, reload=Reload(watch_seconds=0.25), **groups)
    with ready(settings) as live, httpx.Client(base_url=live.url, timeout=60) as client:
        yield client


def test_towers_and_posts_are_served_once_both_links_lead_there(watched: Watched) -> None:
    towers, posts = watched.directories["b"]
    assert watched.answers_as("a")
    point(watched.root / "posts", posts)
    wait_until(watched.refusals, SECONDS)
    assert "were made by towers b" in watched.refusals()[-1]
    assert watched.version() == "a"
    assert watched.answers_as("a")
    point(watched.root / "towers", towers)
    wait_until(lambda: watched.version() == "b", SECONDS)
    assert watched.answers_as("b")
    assert watched.answers["a"] != watched.answers["b"]
    assert len(watched.refusals()) == 1, "what was refused is not tried again"


def test_damaged_posts_are_refused_by_file_and_the_next_serve(watched: Watched) -> None:
    towers, posts = watched.directories["b"]
    assert watched.answers_as("a")
    damaged = shutil.copytree(posts, watched.root / "damaged")
    vectors = bytearray((damaged / "vectors.safetensors").read_bytes())
    vectors[-1] ^= 1
    (damaged / "vectors.safetensors").write_bytes(vectors)
    point(watched.root / "posts", damaged)
    point(watched.root / "towers", towers)
    wait_until(lambda: any("vectors.safetensors" in why for why in watched.refusals()), SECONDS)
    assert watched.answers_as("a")
    point(watched.root / "posts", posts)
    wait_until(lambda: watched.version() == "b", SECONDS)
    assert watched.answers_as("b")


def test_after_a_new_checkpoint_requests_speak_its_words(tmp_path: Path) -> None:
    """The directory itself is replaced, by a checkpoint that names its actions otherwise."""
    place, fresh = tmp_path / "served", tmp_path / "fresh"
    shutil.copytree(DEMO, place)
    demo = load_checkpoint(DEMO)
    names = [f"action_{number}" for number in range(len(demo.manifest.action_names))]
    save_checkpoint(
        fresh, demo.ranker, name="other", version="v2", action_names=names, continuous=demo.manifest.continuous
    )

    def body(action: str) -> dict[str, Any]:
        return {**example(), "weights": {action: 1.0}, "history": []}

    with watching(place) as client:
        assert [client.post("/rank", json=body(word)).status_code for word in ("favorite", "action_0")] == [200, 422]
        place.rename(tmp_path / "old")
        fresh.rename(place)
        wait_until(lambda: client.get("/info").json()["model"]["name"] == "other", SECONDS)
        assert [client.post("/rank", json=body(word)).status_code for word in ("favorite", "action_0")] == [422, 200]
        assert client.post("/rank", json=body("action_0")).json()["actions"] == names
