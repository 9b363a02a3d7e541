"""The checkpoint of the repository has learned: it ranks by taste, and its report keeps the promised figures."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from model.create import EngineOptions, create_engine
from model.engine import Engine, Item
from tests.support.bodies import inputs_of
from weights.actions import STANDARD_ACTIONS
from weights.checkpoint import Checkpoint, load_checkpoint
from weights.training.demo_example import EVENTS, OTHER_TOPICS, POST_AGE_HOURS, example_request
from weights.world.behaviour import NEGATIVE_ACTIONS
from weights.world.settings import SURFACES
from weights.world.simulate import World

DEMO = Path("weights/demo")
NAMES: dict[str, Any] = json.loads((DEMO / "names.json").read_text())
UNKNOWN_USER = "4242424242424242424"


@pytest.fixture(scope="module")
def example() -> dict[str, Any]:
    body: dict[str, Any] = json.loads((DEMO / "example.json").read_text())
    return body


@pytest.fixture(scope="module")
def checkpoint() -> Checkpoint:
    return load_checkpoint(DEMO)


@pytest.fixture(scope="module")
def engine(checkpoint: Checkpoint) -> Iterator[Engine]:
    engine = create_engine(checkpoint.ranker, EngineOptions(device="cpu", dtype="float32", threads=1))
    engine.warm_up()
    yield engine
    engine.close()


def scores(engine: Engine, checkpoint: Checkpoint, body: dict[str, Any]) -> list[float]:
    """The combined score of every candidate of a request, under the checkpoint's own weights."""
    manifest = checkpoint.manifest
    item = Item(*inputs_of(body, manifest))
    probabilities = engine.forward([item])[0].scores.probabilities
    weights = [manifest.score_weights.get(name, 0.0) for name in manifest.action_names]
    return [float(value) for value in probabilities @ weights]


def topic(post: dict[str, Any]) -> str:
    return str(NAMES["authors"][post["author_id"]]["topic"])


def best_first(body: dict[str, Any], values: list[float]) -> list[dict[str, Any]]:
    order = sorted(range(len(values)), key=lambda index: -values[index])
    return [body["candidates"][index] for index in order]


def assert_taste(body: dict[str, Any], ranked: list[dict[str, Any]]) -> None:
    """Two authors of the liked topic stand first, then the four of other topics, and the reported one of the liked topic last."""
    liked = NAMES["example"]["likes"]
    assert topic(body["history"][-1]) == liked
    assert [topic(post) == liked for post in ranked] == [True] * 2 + [False] * 4 + [True]
    assert ranked[-1]["author_id"] == reported_of(body)


def reported_of(body: dict[str, Any]) -> str:
    """The author whom the last event of the history reports."""
    last = body["history"][-1]
    assert last["actions"] == ["report"]
    return str(last["author_id"])


def test_the_example_ranks_its_users_topic_first_and_the_reported_author_last(
    engine: Engine, checkpoint: Checkpoint, example: dict[str, Any]
) -> None:
    assert_taste(example, best_first(example, scores(engine, checkpoint, example)))


def test_a_report_is_its_authors_alone(engine: Engine, checkpoint: Checkpoint, example: dict[str, Any]) -> None:
    """Without it the author stands with the topic; with it nobody else's score moves half as far."""
    body = copy.deepcopy(example)
    place = [post["author_id"] for post in body["candidates"]].index(reported_of(body))
    body["history"].pop()
    before, after = scores(engine, checkpoint, body), scores(engine, checkpoint, example)
    liked = NAMES["example"]["likes"]
    assert [topic(post) == liked for post in best_first(body, before)] == [True] * 3 + [False] * 4
    drops = [then - now for then, now in zip(before, after, strict=True)]
    own = drops.pop(place)
    assert own > 2 * max(map(abs, drops))


@pytest.mark.parametrize("act", ["report", "block_author", "mute_author"])
def test_whoever_is_turned_away_sinks_whatever_the_topic(
    act: str, engine: Engine, checkpoint: Checkpoint, example: dict[str, Any]
) -> None:
    """Each candidate's author in turn, with an event of another post of that author."""
    for place, post in enumerate(example["candidates"]):
        body = copy.deepcopy(example)
        body["history"][-1] |= {"post_id": str(10**6), "author_id": post["author_id"], "actions": [act]}
        values = scores(engine, checkpoint, body)
        assert min(values) == values[place], post


@pytest.mark.parametrize("liked", NAMES["topics"])
def test_an_unknown_user_who_favorites_a_topic_gets_that_topic(
    liked: str, engine: Engine, checkpoint: Checkpoint, example: dict[str, Any]
) -> None:
    authors = {name: [a for a, entry in NAMES["authors"].items() if entry["topic"] == name] for name in NAMES["topics"]}
    now = example["impression_ts"]
    history = [
        {"post_id": str(10**6 + index), "author_id": author, "actions": ["favorite", "dwell"], "dwell_time": 12.0}
        for index, author in enumerate((authors[liked][:8] * 2)[:16])
    ]
    # eight authors of each topic, none of them in the history: the taste is for the topic, and the mean levels qualities
    shown = [author for name in NAMES["topics"] for author in authors[name][8:16]]
    candidates = [
        {"post_id": str(10**7 + index), "author_id": author, "product_surface": 0, "created_at": now - 7200}
        for index, author in enumerate(shown)
    ]
    body = {"user_id": UNKNOWN_USER, "history": history, "candidates": candidates, "impression_ts": now}

    def means() -> dict[str, float]:
        values = scores(engine, checkpoint, body)
        return {name: sum(values[8 * i : 8 * i + 8]) / 8 for i, name in enumerate(NAMES["topics"])}

    with_history = means()
    assert max(with_history, key=lambda name: with_history[name]) == liked
    body["history"] = []
    assert means() != with_history


def test_the_report_keeps_its_promises() -> None:
    figures = json.loads((DEMO / "report/figures.json").read_text())
    assert figures["verdict"].startswith("The model is ahead of every baseline by every metric")
    way = figures["way_to_optimum"]
    assert way["model"] >= 0.96
    assert way["true affinity"] <= 0.8
    assert figures["calibration_error"] <= 0.01
    whole = figures["ablations"]["none"]["mean_auc"]
    for name, least in (("no history", 0.04), ("shuffled history", 0.08), ("no user", 0.015)):
        assert figures["ablations"][name]["mean_auc"] < whole - least, name


def test_the_directory_is_small_and_its_report_is_of_this_checkpoint(checkpoint: Checkpoint) -> None:
    size = sum(file.stat().st_size for file in DEMO.rglob("*") if file.is_file())
    assert size <= 8 * 10**6
    assert (checkpoint.manifest.name, checkpoint.manifest.action_names) == ("demo", STANDARD_ACTIONS)
    page = (DEMO / "report/report.md").read_text()
    assert checkpoint.manifest.version in page
    assert "phoenix-ranker eval --checkpoint weights/demo --world " in page
    assert {file.name for file in (DEMO / "report").iterdir()} == {"report.md", "figures.json"}


def test_an_example_is_a_reader_with_a_taste_and_a_complaint(world: World) -> None:
    request, story = example_request(world)
    topics = dict(zip(world.authors.ids.tolist(), world.authors.topic.tolist(), strict=True))
    *events, report = request["history"]
    about = [topics[int(event["author_id"])] for event in events]
    taste = max(set(about), key=about.count)
    assert about.count(taste) > EVENTS / 2
    assert {event["product_surface"] for event in events}.isdisjoint([SURFACES.index("following")])
    log = world.log
    for event in events:  # each is of the log, with all that the user did, and no complaint
        row = np.flatnonzero((log.user_id == int(request["user_id"])) & (log.post_id == int(event["post_id"])))
        done = [{name for name, did in zip(log.action_names, log.actions[at], strict=True) if did} for at in row]
        assert set(event["actions"]) in done
        assert event["actions"]
        assert not set(event["actions"]) & set(NEGATIVE_ACTIONS)
    assert (len(events), report["actions"]) == (EVENTS, ["report"])
    authors = [int(post["author_id"]) for post in request["candidates"]]
    assert sorted(topics[author] for author in authors).count(taste) == 3
    assert len({topics[author] for author in authors}) == 1 + OTHER_TOPICS
    assert int(report["author_id"]) in authors
    assert {request["impression_ts"] - post["created_at"] for post in request["candidates"]} == {POST_AGE_HOURS * 3600}
    assert len(story["history"]) == 1 + EVENTS
    again, _ = example_request(world)
    assert again == request
