"""Handles of contexts: on every engine what has one is found again, exactly, by whom it is for, as long as the cache keeps it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from model.config import ModelConfig
from model.dense import DenseEngine
from model.engine import Engine, Item
from model.inputs import Context
from model.native.engine import NativeEngine
from model.ranker import Ranker
from model.split.engine import SplitEngine
from tests.model.builders import random_candidates, random_config, random_context, random_ranker

Build = Callable[[Ranker, int], Engine]
ENGINES: dict[str, Build] = {
    "native": lambda ranker, size: NativeEngine(ranker, torch.float32, cache_bytes=size),
    "split": lambda ranker, size: SplitEngine(ranker, cache_bytes=size),
    "dense": lambda ranker, size: DenseEngine(ranker, torch.float32, cache_bytes=size),
}


@pytest.fixture(params=ENGINES, scope="module")
def build(request: pytest.FixtureRequest) -> Build:
    return ENGINES[request.param]


def alone(config: ModelConfig, context: Context, caller: str | None = "feed") -> Item:
    """The context without candidates."""
    return Item(context, random_candidates(config, 0), caller=caller)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("build", "changes"),
    [(build, {}) for build in ENGINES] + [("native", {"has_dwell": False, "has_post_age": False})],
    indirect=["build"],
)
def test_a_request_by_handle_has_the_bits_of_the_whole(build: Build, changes: dict[str, Any]) -> None:
    """With a cache that knows the context, its beginning, or has evicted it: from its columns alone."""
    config = random_config(**changes)
    ranker = random_ranker(config)
    whole, first = random_context(config, 21, seed=4), random_context(config, 21, seed=4).first(13)
    candidates = random_candidates(config, 9)
    expected = [build(ranker, 0).forward([Item(one, candidates)])[0].scores.logits.tobytes() for one in (first, whole)]
    for cache_bytes in (2**22, 2**18):
        engine = build(ranker, cache_bytes)
        for context, bits in zip((first, whole), expected, strict=True):
            handle = engine.forward([alone(config, context)])[0].handle
            assert len(bytes.fromhex(handle)) == 16
            found = engine.context_of(handle, "feed")
            assert found is not None
            assert engine.forward([Item(found, candidates, caller="feed")])[0].handle == handle
            assert engine.forward([Item(found, candidates)])[0].scores.logits.tobytes() == bits
            others = [Item(random_context(config, 30, seed=seed), candidates) for seed in range(100, 160)]
            engine.forward(others if cache_bytes < 2**20 else [])
            assert engine.forward([Item(found, candidates)])[0].scores.logits.tobytes() == bits, "evicted meanwhile"
    changed = replace(whole, post_ids=whole.post_ids ^ np.uint64(1))
    assert build(ranker, 0).forward([Item(changed, candidates)])[0].scores.logits.tobytes() != expected[1], "a control"


def test_the_columns_come_back_as_they_were(build: Build) -> None:
    config = random_config()
    engine = build(random_ranker(config), 2**20)
    nobody = replace(random_context(config, 3), user_id=0)
    for context in (random_context(config, 11), random_context(config, 0), nobody):
        sent = replace(context, dropped=5)
        found = engine.context_of(engine.forward([alone(config, sent)])[0].handle, "feed")
        assert found is not None
        assert (found.user_id, found.dropped, found.is_kept) == (sent.user_id, 5, True)
        for name in ("post_ids", "author_ids", "actions", "surfaces", "dwell_seconds"):
            ours, theirs = getattr(found, name), getattr(sent, name)
            assert (ours.dtype, ours.shape, ours.tobytes()) == (theirs.dtype, theirs.shape, theirs.tobytes()), name
        found.check(config)


@pytest.mark.parametrize("engine", ["native", "split"])
def test_a_context_alone_is_what_a_request_then_finds(engine: str) -> None:
    config = random_config()
    made, context = ENGINES[engine](random_ranker(config), 2**22), random_context(config, 17)
    asked = [alone(config, context), alone(config, context), Item(context, random_candidates(config, 5))]
    assert [made.forward([item])[0].cache for item in asked] == ["miss", "hit", "hit"]
    nobody = replace(random_context(config, 0), user_id=0)
    mixed = [alone(config, nobody), Item(context, random_candidates(config, 3)), alone(config, context)]
    assert [len(outcome.scores) for outcome in made.forward(mixed)] == [0, 3, 0]


def test_only_whom_a_handle_is_for_finds_anything(build: Build) -> None:
    config = random_config()
    ranker, context = random_ranker(config), random_context(config, 7)
    engine = build(ranker, 2**20)
    handles = [engine.forward([alone(config, context, caller)])[0].handle for caller in ("feed", "ads", "", "feed")]
    assert handles[0] == handles[3]
    assert len(set(handles)) == 3, "one context, a handle for each"
    for handle, owner in zip(handles, ("feed", "ads", ""), strict=False):
        assert [caller for caller in ("feed", "ads", "") if engine.context_of(handle, caller)] == [owner]
    assert engine.forward([alone(config, replace(context, dropped=1))])[0].handle not in handles
    assert engine.forward([alone(config, context, None)])[0].handle == "", "none is wanted"
    assert engine.forward([alone(config, replace(context, is_kept=False))])[0].handle == ""
    again = build(ranker, 2**20)
    assert again.context_of(handles[0], "feed") is None
    assert again.forward([alone(config, context)])[0].handle != handles[0], "another load of the same checkpoint"
    engine.close()
    engine.close()
    assert engine.context_of(handles[0], "feed") is None
    assert engine.cache_stats().bytes == 0


def test_without_room_there_is_no_handle(build: Build) -> None:
    config = random_config()
    engine = build(random_ranker(config), 0)
    for _ in range(2):
        assert engine.forward([alone(config, random_context(config, 7))])[0].handle == ""


def test_contexts_are_looked_up_while_the_engine_evicts() -> None:
    """No lock: a look-up gives nothing, or the very columns."""
    config = random_config()
    made = NativeEngine(random_ranker(config), torch.float32, cache_bytes=150_000)
    contexts = [random_context(config, 5 + user % 7, seed=user) for user in range(40)]
    handles: dict[str, int] = {}
    stop, wrong, found = threading.Event(), [], 0

    def compute() -> None:
        while not stop.is_set():
            for user, context in enumerate(contexts):
                handles[made.forward([alone(config, context)])[0].handle] = user

    thread = threading.Thread(target=compute)
    thread.start()
    try:
        while found < 3000 or made.cache_stats().evictions < 100:
            for handle, user in list(handles.items()):
                context = made.context_of(handle, "feed") if handle else None
                found += context is not None
                if context is not None and not np.array_equal(context.post_ids, contexts[user].post_ids):
                    wrong.append(user)
                assert made.context_of(handle, "other") is None
    finally:
        stop.set()
        thread.join()
    assert wrong == []
