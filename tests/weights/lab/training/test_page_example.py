"""The example and the names of a checkpoint come from its log: a request that the service takes, and names for whom it shows."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec import structs

pytest.importorskip("pyarrow")

from model.synthetic import random_ranker
from tests.weights.lab.training.small_run import small_config
from weights.actions import DWELL_TIME
from weights.checkpoint import save_checkpoint
from weights.format.manifest import Manifest
from weights.lab.training.page_example import write_example
from weights.lab.world.simulate import World
from weights.tables import TableError


@pytest.fixture
def manifest(world: World, tmp_path: Path) -> Manifest:
    names = world.log.action_names
    ranker = random_ranker(small_config(), 1)
    return save_checkpoint(tmp_path / "out", ranker, name="t", action_names=names, continuous=[DWELL_TIME])


def written(world: World, manifest: Manifest, out: Path, names: Any = None, user: str | None = None) -> tuple[Any, Any]:
    write_example(out, manifest, world.log, names or {}, user)
    example, named = (json.loads((out / name).read_text()) for name in ("example.json", "names.json"))
    return example, named


def test_the_example_is_a_recent_request_with_a_long_history(world: World, manifest: Manifest, tmp_path: Path) -> None:
    example, named = written(world, manifest, tmp_path / "out")
    assert len(example["history"]) == small_config().history_length
    assert len(example["candidates"]) > 1
    assert example["impression_ts"] > np.quantile(world.log.impression_ts, 0.85)
    assert all(event["actions"] and event["dwell_time"] > 0 for event in example["history"])
    met = example["history"] + example["candidates"]
    assert {post["post_id"] for post in met} <= set(named["posts"])
    assert {post["author_id"] for post in met} <= set(named["authors"])
    assert example["user_id"] in named["users"]


def test_given_names_are_used_and_ids_stand_in_for_others(world: World, manifest: Manifest, tmp_path: Path) -> None:
    post, other = map(str, np.unique(world.log.post_id)[:2].tolist())
    author = str(world.log.author_id[0])
    given = {"posts": {post: "Toy Story"}, "authors": {author: {"name": "Animation"}}}
    _, named = written(world, manifest, tmp_path / "out", given)
    assert named["posts"][post]["name"] == "Toy Story"
    assert named["posts"][other]["name"] == f"post {other}"
    assert named["authors"][author] == {"name": "Animation", "topic": "Animation"}
    assert "Animation" in named["topics"], "a log of few authors has them as topics"
    assert any("Animation" in user["likes"] for user in named["users"].values())


def test_names_of_another_form_are_refused(world: World, manifest: Manifest, tmp_path: Path) -> None:
    with pytest.raises(TableError, match="the names of posts must be an object of id → name"):
        write_example(tmp_path / "out", manifest, world.log, {"posts": ["Toy Story"]})


def test_a_log_of_many_authors_has_no_topics(world: World, manifest: Manifest, tmp_path: Path) -> None:
    log = replace(world.log, author_id=world.log.post_id)
    write_example(tmp_path / "out", manifest, log, {})
    named = json.loads((tmp_path / "out/names.json").read_text())
    assert named["topics"] == []
    assert "topic" not in next(iter(named["authors"].values()))


def test_nobody_and_an_unknown_author_have_no_names(world: World, manifest: Manifest, tmp_path: Path) -> None:
    """The page calls them so. Half of the rows are of an unknown author: also some of the example."""
    user, author = world.log.user_id.copy(), world.log.author_id.copy()
    user[user == np.unique(user)[0]] = 0
    author[::2] = 0
    write_example(tmp_path / "out", manifest, replace(world.log, user_id=user, author_id=author), {})
    example, named = (json.loads((tmp_path / "out" / name).read_text()) for name in ("example.json", "names.json"))
    assert "0" in {post["author_id"] for post in example["history"] + example["candidates"]}
    assert "0" not in named["users"].keys() | named["authors"].keys()
    said = named["topics"] + [liked for user in named["users"].values() for liked in user["likes"]]
    assert len(named["topics"]) == len(np.unique(world.log.author_id))
    assert "author 0" not in said


def test_a_user_can_be_asked_for(world: World, manifest: Manifest, tmp_path: Path) -> None:
    user = str(world.log.user_id[0])
    assert written(world, manifest, tmp_path / "out", user=user)[0]["user_id"] == user
    with pytest.raises(
        TableError, match="no request of this user has a history and two candidates; the log covers 2026"
    ):
        write_example(tmp_path / "out", manifest, world.log, {}, "12")


def test_an_example_of_a_log_of_hashes_is_refused(world: World, manifest: Manifest, tmp_path: Path) -> None:
    """Nobody can turn hashes back, and a request with their decimals would name other posts."""
    with pytest.raises(TableError, match="hashes of texts"):
        write_example(tmp_path / "out", structs.replace(manifest, ids="text"), world.log, {})
