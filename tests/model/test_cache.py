"""The context cache: exact keys, budget, order of eviction, prefixes and handles."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import OrderedDict
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from loadtest.compositions import small_config
from model.cache import ENTRY_BYTES, HANDLE_BYTES, ContextCache, ContextKey
from model.engine import Item
from model.native.engine import NativeEngine
from model.selftest import same_bits
from tests.model.builders import random_candidates, random_config, random_context, random_ranker

ROOT = Path(__file__).resolve().parents[2]
POST, SURFACE = b"12345678", b"abcd"


def key(user_id: int, length: int) -> ContextKey:
    return ContextKey(user_id, (POST * length, SURFACE * length))


def found(cache: ContextCache[Any], wanted: ContextKey) -> Any:
    """The state of a key, None where it is not kept."""
    entry = cache.find(wanted)
    return None if entry is None else entry.state


def test_every_feature_that_the_checkpoint_sees_is_in_the_key() -> None:
    config = random_config()
    context = random_context(config, 5)
    changed: dict[str, Any] = {
        "user_id": context.user_id ^ 1,
        "post_ids": context.post_ids ^ np.uint64(1),
        "author_ids": context.author_ids ^ np.uint64(1),
        "actions": context.actions + 1,
        "surfaces": context.surfaces + 1,
        "dwell_seconds": context.dwell_seconds + 1,
    }
    original = ContextKey.of(context, config)
    assert ContextKey.of(replace(context), config) == original
    for name, value in changed.items():
        assert ContextKey.of(replace(context, **{name: value}), config) != original, name
    blind = replace(config, has_dwell=False)
    other_dwell = replace(context, dwell_seconds=changed["dwell_seconds"])
    assert ContextKey.of(other_dwell, blind) == ContextKey.of(context, blind)


def test_only_growth_by_new_events_is_a_prefix() -> None:
    assert key(1, 5).grew_from(key(1, 3))
    assert key(1, 5).grew_from(key(1, 0))
    assert not key(1, 5).grew_from(key(1, 5))
    assert not key(1, 3).grew_from(key(1, 5))
    assert not key(2, 5).grew_from(key(1, 3))
    assert not ContextKey(1, (b"x" * 40, SURFACE * 5)).grew_from(key(1, 3))
    assert not ContextKey(1, (POST * 5, b"x" * 20)).grew_from(key(1, 3))


def test_the_newest_prefix_of_a_user_survives_older_evictions() -> None:
    cache: ContextCache[str] = ContextCache(2 * ENTRY_BYTES + 200, prefixes=True)
    for length, state in ((1, "older"), (2, "newer")):
        cache.insert(key(1, length), state, 10)
    cache.insert(key(2, 1), "another", 10)
    assert (found(cache, key(1, 1)), cache.stats().evictions) == (None, 1)
    assert (cache.find_prefix(key(1, 3)), cache.stats().prefixes) == ("newer", 1)
    cache.insert(key(1, 2), "again", 10)  # in the place of the one before
    assert (cache.find_prefix(key(1, 3)), cache.stats().entries) == ("again", 2)


def test_a_cache_that_is_cleared_keeps_nothing_but_its_totals() -> None:
    cache: ContextCache[str] = ContextCache(10 * ENTRY_BYTES, prefixes=True)
    config = random_config()
    handle = cache.name(Item(random_context(config, 3), random_candidates(config, 1), caller="me"), config)
    cache.insert(key(1, 1), "state", 10)
    assert (found(cache, key(1, 1)), found(cache, key(9, 1))) == ("state", None)
    assert cache.context_of(handle, "me", config) is not None
    cache.clear()
    assert (found(cache, key(1, 1)), cache.find_prefix(key(1, 2))) == (None, None)
    assert cache.context_of(handle, "me", config) is None
    stats = cache.stats()
    assert (stats.bytes, stats.entries, stats.hits) == (0, 0, 1)


SIZES = st.integers(0, 60) | st.just(2 * ENTRY_BYTES)  # the largest does not fit alone


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 4), st.integers(0, 3), SIZES), max_size=60))
def test_behaves_as_a_plain_least_recently_used_dictionary(steps: list[tuple[bool, int, int, int]]) -> None:
    budget = 2 * ENTRY_BYTES + 100
    cache: ContextCache[int] = ContextCache(budget, prefixes=True)
    plain: OrderedDict[ContextKey, tuple[int, int]] = OrderedDict()
    for number, (insert, user, length, size) in enumerate(steps):
        wanted = key(user, length)
        if insert:
            total = size + sum(map(len, wanted.events)) + ENTRY_BYTES
            is_kept = cache.insert(wanted, number, size) is not None
            assert is_kept == (total <= budget)
            if is_kept:
                plain.pop(wanted, None)
                plain[wanted] = (number, total)
                while sum(held for _, held in plain.values()) > budget:
                    plain.popitem(last=False)
        else:
            kept = found(cache, wanted)
            assert kept == plain.get(wanted, (None, 0))[0]
            if kept is None:
                older = cache.find_prefix(wanted)
                assert older is None or any(wanted.grew_from(k) and value[0] == older for k, value in plain.items())
            else:
                plain.move_to_end(wanted)
        assert cache.stats().bytes == sum(held for _, held in plain.values()) <= budget
        assert cache.stats().entries == len(plain)


def named(caller: str, dropped: int = 0) -> Item:
    config = random_config()
    return Item(replace(random_context(config, 0), dropped=dropped), random_candidates(config, 0), caller=caller)


def test_handles_are_in_the_budget_and_go_with_their_entry() -> None:
    cache: ContextCache[str] = ContextCache(2 * ENTRY_BYTES + 3 * HANDLE_BYTES, prefixes=False)
    first = cache.insert(ContextKey(1, (POST,)), "first", 0)
    assert first is not None
    handles = [cache.handle(first, named("feed", number)) for number in range(3)]
    assert cache.stats().bytes == ENTRY_BYTES + 8 + 3 * HANDLE_BYTES
    assert cache.handle(first, named("feed")) == handles[0], "made once"
    second = cache.insert(ContextKey(2, (POST,)), "second", 0)
    assert second is not None
    assert (cache.stats().entries, cache.stats().evictions) == (1, 1)
    assert [cache.context_of(handle, "feed", random_config()) for handle in handles] == [None] * 3
    assert cache.handle(first, named("feed")) == "", "it is gone"
    assert cache.stats().bytes == ENTRY_BYTES + 8
    for number in range(100):
        cache.handle(second, named("feed", number))
        assert cache.stats().bytes <= cache.byte_budget


FILLED = """
import os, resource
import torch
from dataclasses import replace
from model.engine import Item
from model.native.engine import NativeEngine
from model.split.engine import SplitEngine
from tests.model.builders import random_candidates, random_config, random_context, random_ranker

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize()

def share(engine, history):
    config, budget = random_config(), 8 * 2**20
    engine = engine(random_ranker(config), cache_bytes=budget)
    none = random_candidates(config, 0)
    items = [Item(random_context(config, history, seed), none, caller="feed") for seed in range(20)]
    engine.forward(items)  # what a first forward takes once
    before, user = resident(), 2**40
    while engine.cache_stats().evictions < 50:
        user += 20
        engine.forward([replace(item, context=replace(item.context, user_id=user + n)) for n, item in enumerate(items)])
    return (resident() - before) / budget

for engine in (NativeEngine, SplitEngine):
    for history in (0, 37):
        if not (child := os.fork()):
            print(share(engine, history), flush=True)
            os._exit(0)
        os.waitpid(child, 0)
"""


@pytest.mark.slow
def test_what_an_engine_keeps_stays_within_its_budget() -> None:
    """As the operating system sees it, in a process for each engine and history: the allocator keeps some of what was freed."""
    command = [sys.executable, "-c", FILLED]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stderr
    shares = [float(line) for line in done.stdout.split()]
    assert len(shares) == 4, done.stderr
    assert all(0.4 < share < 1.5 for share in shares), shares


def test_keys_whose_hashes_collide_change_no_bit() -> None:
    """Python hashes an integer modulo 2^61 − 1, so eight users with one history have one hash: only the comparison tells them apart."""
    config = small_config()
    longest = random_context(config, 60, user_id=7)
    users = [replace(longest, user_id=7 + place * sys.hash_info.modulus) for place in range(8)]
    contexts = [user.first(length) for user in users for length in (3, 60)]
    assert len({hash(ContextKey.of(context, config)) for context in contexts}) == 2
    ranker, candidates = random_ranker(config), random_candidates(config, 5)
    alone = NativeEngine(ranker, torch.bfloat16)
    expected = [alone.forward([Item(context, candidates)])[0].scores for context in contexts]
    assert len({scores.logits.tobytes() for scores in expected}) == len(contexts)
    chance = np.random.default_rng(3)
    for cache_bytes in (60_000, 10**7):
        engine = NativeEngine(ranker, torch.bfloat16, cache_bytes=cache_bytes)
        for _ in range(40):
            drawn = chance.integers(len(contexts), size=4)
            outcomes = engine.forward([Item(contexts[place], candidates) for place in drawn])
            assert all(same_bits(o.scores, expected[place]) for o, place in zip(outcomes, drawn, strict=True))
        stats = engine.cache_stats()
        assert min(stats.hits, stats.prefixes) > 0
        assert (stats.evictions > 0) == (cache_bytes < 10**7)
