"""The retrieval engine against the published users and the plain search: batches, cache, filters, fallbacks, refusals."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from model.device import set_given_up
from model.engine import EngineError
from model.inputs import Context
from model.native.build import HERE, build_kernel
from model.native.search import NativeIndex
from model.native.tower import NativeTower
from model.presets import with_preset
from model.retrieval.corpus import KEPT_TOPICS, Corpus
from model.retrieval.engine import SEGMENT_ROWS, DeviceIndex, RetrievalEngine, RetrievalOptions, TorchTower
from model.retrieval.inputs import Change, Filters, Mark, NewPosts, Query, Retrieved
from model.retrieval.search import Hits, Index, TorchIndex, Wish
from model.retrieval.towers import Towers
from model.tolerances import RETRIEVAL
from tests import retrieval_goldens as goldens
from tests.goldens import GOLDEN
from tests.model.builders import random_config
from tests.support.random_models import random_model, retrieval_config
from weights.checkpoint import Encoder

NAME = "retrieval-mlp-gqa"
NONE = np.empty(0, np.uint64)
WAYS: dict[str, dict[str, Any]] = {
    "native": {"backend": "native"},
    "torch": {"backend": "torch"},
    "as on a card": {"device": "cpu:0"},
}


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Encoder:
    return goldens.imported(GOLDEN / NAME / "retrieval", tmp_path_factory.mktemp("engine") / "towers")


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    posts = goldens.arrays(GOLDEN / NAME / "corpus.npz")
    names, topics = np.unique(posts["topics"], return_inverse=True)
    ids = posts["post_ids"].astype(np.uint64), posts["author_ids"].astype(np.uint64)
    created = np.arange(len(topics)) * 60
    vectors = posts["candidate_representations"]
    return Corpus("x", "1", "d", *ids, vectors, created, topics.astype(np.int32), tuple(names.tolist()))


@pytest.fixture(scope="module")
def contexts(encoder: Encoder) -> list[Context]:
    return goldens.contexts(NAME, encoder.towers.config)


@pytest.fixture(params=WAYS)
def engine(request: pytest.FixtureRequest, encoder: Encoder, corpus: Corpus) -> RetrievalEngine:
    made = RetrievalEngine(encoder.towers, corpus, RetrievalOptions(**WAYS[request.param], threads=2))
    made.warm_up()
    backend = WAYS[request.param].get("backend", "native")
    assert type(made.tower) is {"native": NativeTower, "torch": TorchTower}[backend]
    return made


def wanted(context: Context, k: int = 50, **filters: Any) -> Query:
    return Query(context, k, Filters(filters.pop("exclude", NONE), **filters))


def same(ours: Retrieved, theirs: Retrieved) -> bool:
    return ours.post_ids.tobytes() == theirs.post_ids.tobytes() and ours.scores.tobytes() == theirs.scores.tobytes()


def test_the_corpus_is_searched_by_as_many_threads_as_wanted(encoder: Encoder, corpus: Corpus) -> None:
    running = []
    for threads in (1, 4):
        engine = RetrievalEngine(encoder.towers, corpus, RetrievalOptions(threads=threads))
        engine.tower.close()
        running.append(len(os.listdir("/proc/self/task")))
        engine.close()
    assert running[1] == running[0] + 3


def test_torch_serves_a_user_tower_that_the_kernel_refuses(corpus: Corpus, contexts: list[Context]) -> None:
    """Batched with others and alone, a user has one vector."""
    sizes = {
        "width": corpus.width,
        "layers": 1,
        "actions": contexts[0].actions.shape[1],
        "has_dwell": False,
        "has_post_age": False,
    }
    ranker = with_preset(random_config(**sizes, continuous_actions=0), "vanilla")
    towers = random_model(retrieval_config(ranker), 3)
    assert isinstance(towers, Towers)
    engine = RetrievalEngine(towers, corpus, RetrievalOptions(cache_bytes=0))
    assert engine.notes["user_tower"]["backend"] == "torch"
    assert engine.notes["user_tower"]["reason"].startswith("the native kernel does not know this trunk's norm, ")
    together = engine.retrieve([wanted(context) for context in contexts[:3]]).retrieved
    assert all(
        same(ours, engine.retrieve([wanted(context)]).retrieved[0])
        for ours, context in zip(together, contexts[:3], strict=True)
    )
    with pytest.raises(EngineError, match="does not know this trunk"):
        RetrievalEngine(towers, corpus, RetrievalOptions(backend="native"))


@pytest.mark.parametrize("name", goldens.NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_native_tower_has_the_published_numbers(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    towers = goldens.imported(GOLDEN / name / "retrieval", tmp_path / "towers").towers
    expected = goldens.arrays(GOLDEN / name / "expected.npz")
    contexts = goldens.contexts(name, towers.config)
    tower = NativeTower(towers, dtype, threads=2)
    together = tower.encode(contexts)
    for index, context in enumerate(contexts):
        kind = str(dtype).removeprefix("torch.").replace("bfloat16", "bf16").replace("float32", "fp32")
        off = np.abs(together[index] - expected[f"{index}/user_repr_{kind}"]).max()
        assert off <= RETRIEVAL[dtype].elements
        assert tower.encode([context])[0].tobytes() == together[index].tobytes(), "alone and in a batch"
    one_thread = NativeTower(towers, dtype, threads=1).encode(contexts[::-1])[::-1]
    assert one_thread.tobytes() == together.tobytes()


def test_the_published_posts_are_retrieved(engine: RetrievalEngine, contexts: list[Context], corpus: Corpus) -> None:
    expected = goldens.arrays(GOLDEN / NAME / "expected.npz")
    answers = engine.retrieve([wanted(context) for context in contexts]).retrieved
    for index, answer in enumerate(answers):
        scores = expected[f"{index}/top_k_scores_fp32"]
        if index == 7:  # nobody: every score is 0; two rows of the corpus are hidden, one of them for its zero vector
            continue
        kept = ~corpus.hidden[expected[f"{index}/top_k_indices_fp32"]]
        count = int(kept.sum())
        np.testing.assert_allclose(answer.scores[:count], scores[kept], atol=RETRIEVAL[torch.float32].scores, rtol=0)
        ids = corpus.post_ids[expected[f"{index}/top_k_indices_fp32"]][kept]
        moved = scores[kept][answer.post_ids[:count] != ids]
        assert all(np.sort(np.abs(scores - score))[1] < 2e-6 for score in moved)


def test_nothing_depends_on_the_batch_or_the_cache(engine: RetrievalEngine, contexts: list[Context]) -> None:
    together = engine.retrieve([wanted(context) for context in contexts]).retrieved
    assert not any(answer.cached for answer in together)
    again = engine.retrieve([wanted(context) for context in contexts[::-1]]).retrieved[::-1]
    assert all(answer.cached for answer in again)
    fresh = RetrievalEngine(engine.towers, engine.corpus, replace(engine.options, cache_bytes=0))
    alone = [fresh.retrieve([wanted(context)]).retrieved[0] for context in contexts]
    for answers in (again, alone):
        assert all(map(same, together, answers))
    stats = engine.cache_stats()
    assert (stats.hits, stats.misses) == (len(contexts), len(contexts) + 1), "one miss of the warm-up"
    assert fresh.cache_stats().entries == 0


def test_a_vector_is_cached_by_the_exact_events(engine: RetrievalEngine, contexts: list[Context]) -> None:
    context = contexts[4]
    changed = replace(context, surfaces=np.concatenate((context.surfaces[:-1], [(context.surfaces[-1] + 1) % 16])))
    dwelled = replace(context, dwell_seconds=context.dwell_seconds + 7)
    first, other, same_user = engine.retrieve([wanted(one) for one in (context, changed, dwelled)]).retrieved
    assert not same(first, other)
    assert same(first, same_user), "dwell is nothing to the towers"
    assert engine.cache_stats().entries == 2


def test_the_tokens_of_users_that_are_to_be_encoded_are_counted(
    engine: RetrievalEngine, contexts: list[Context]
) -> None:
    known, *others = contexts[:3]
    engine.retrieve([wanted(known)])
    users = engine.look_up([wanted(one) for one in (known, *others, *others)])
    assert users.uncached_tokens == sum(1 + len(one.post_ids) for one in others)


def test_filters_come_before_the_best(engine: RetrievalEngine, contexts: list[Context], corpus: Corpus) -> None:
    context = contexts[4]
    (everything,) = engine.retrieve([wanted(context, 256)]).retrieved
    assert everything.visible == len(everything.post_ids) == len(corpus) - int(corpus.hidden.sum())
    row = {post: place for place, post in reversed(list(enumerate(corpus.post_ids.tolist())))}
    assert corpus.topics is not None
    topic = corpus.topic_names[int(corpus.topics[row[everything.post_ids[0].item()]])]
    exclude = np.array([everything.post_ids[0], everything.post_ids[3], 12345], np.uint64)
    cases: list[tuple[Query, Any]] = [
        (wanted(context, 9, exclude=exclude), lambda place: everything.post_ids[place] not in exclude),
        (wanted(context, 9, topics=(topic, "nothing")), lambda place: everything.topics[place] == topic),
        (wanted(context, 9, topics=("nothing",)), lambda place: False),
        (wanted(context, 9, topics=()), lambda place: False),
        (wanted(context, 9, created_after=6001), lambda place: row[everything.post_ids[place].item()] * 60 >= 6001),
        (
            wanted(context, 9, created_after=600, created_before=6001),
            lambda place: 600 <= row[everything.post_ids[place].item()] * 60 <= 6001,
        ),
        (replace(wanted(context, 256), least=0.1), lambda place: everything.scores[place] >= np.float32(0.1)),
    ]
    answers = engine.retrieve([request for request, _ in cases]).retrieved
    for answer, (request, shown) in zip(answers, cases, strict=True):
        places = [place for place in range(len(everything.post_ids)) if shown(place)]
        assert answer.post_ids.tolist() == everything.post_ids[places[: request.k]].tolist()
        assert answer.scores.tobytes() == everything.scores[places[: request.k]].tobytes()
        if request.least == -np.inf:
            assert answer.visible == len(places)


def test_without_times_a_maximum_age_hides_all(engine: RetrievalEngine, contexts: list[Context]) -> None:
    corpus = replace(engine.corpus, created_at=None, topics=None)
    timeless = RetrievalEngine(engine.towers, corpus, engine.options)
    (answer,) = timeless.retrieve([wanted(contexts[0], created_after=1)]).retrieved
    assert (len(answer.post_ids), answer.visible) == (0, 0)
    (answer,) = timeless.retrieve([wanted(contexts[0])]).retrieved
    assert answer.topics == [None] * 50


def test_any_of_many_topics_is_wanted(engine: RetrievalEngine, contexts: list[Context], corpus: Corpus) -> None:
    """More sets of topics than are remembered, each asked for twice."""
    (everything,) = engine.retrieve([wanted(contexts[4], len(corpus))]).retrieved
    for number in range(2 * KEPT_TOPICS):
        names = tuple(name for place, name in enumerate(corpus.topic_names) if number >> place % 6 & 1)
        wish = wanted(contexts[4], len(corpus), topics=(*names, f"nothing {number}"))
        for answer in engine.retrieve([wish, wish]).retrieved:
            assert len(answer.post_ids) == sum(topic in names for topic in everything.topics)


def test_the_corpus_of_other_towers_is_refused(encoder: Encoder, corpus: Corpus) -> None:
    turned = replace(corpus, vectors=np.ascontiguousarray(corpus.vectors[:, ::-1]))
    with pytest.raises(EngineError, match="does not hold the vectors of this retrieval checkpoint"):
        RetrievalEngine(encoder.towers, turned).warm_up()
    narrow = replace(corpus, vectors=np.ascontiguousarray(corpus.vectors[:, :32]))
    with pytest.raises(ValueError, match="vectors of width 32, the towers of 64"):
        RetrievalEngine(encoder.towers, narrow)


@pytest.mark.usefixtures("before_avx2")
def test_without_wide_vectors_users_are_encoded_by_torch(encoder: Encoder, corpus: Corpus) -> None:
    engine = RetrievalEngine(encoder.towers, corpus)
    assert engine.notes["user_tower"]["backend"] == "torch"
    assert "AVX2" in engine.notes["user_tower"]["reason"]
    assert engine.notes["search"] == {"backend": "native"}


def test_without_a_compiler_torch_encodes_and_searches(
    encoder: Encoder, corpus: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert RetrievalEngine(encoder.towers, corpus).notes["user_tower"]["backend"] == "native"
    monkeypatch.setenv("PATH", "")
    engine = RetrievalEngine(encoder.towers, corpus)
    engine.warm_up()
    for what in ("user_tower", "search"):
        assert engine.notes[what]["backend"] == "torch"
        assert "install g++" in engine.notes[what]["reason"]


class OffByABit(TorchIndex):
    """On a device whose scores differ from the definition's in their last bit."""

    def search(self, wishes: Sequence[Wish]) -> list[Hits]:
        return [replace(one, scores=np.nextafter(one.scores, np.float32(2))) for one in super().search(wishes)]


def no_cuda(vectors: Any, device: str) -> Index:
    """As torch says it where it was built without CUDA, with an error that is no RuntimeError and has no text."""
    raise AssertionError


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        (OffByABit, "cpu:0: the search's rows and scores differ from the definition's on this device"),
        (no_cuda, "cpu:0: AssertionError"),
    ],
)
def test_a_device_that_fails_or_differs_in_bits_is_not_used(
    encoder: Encoder, corpus: Corpus, contexts: list[Context], broken: DeviceIndex, said: str
) -> None:
    options = RetrievalOptions(device="cpu:0")
    expected = RetrievalEngine(encoder.towers, corpus).retrieve([wanted(contexts[0])]).retrieved[0]
    assert RetrievalEngine(encoder.towers, corpus, options).notes["search"] == {"backend": "torch", "device": "cpu:0"}
    engine = RetrievalEngine(encoder.towers, corpus, options, on_device=broken)
    engine.warm_up()
    assert engine.notes["search"] == {"backend": "native", "not_on_device": said}
    assert same(engine.retrieve([wanted(contexts[0])]).retrieved[0], expected)


def test_a_device_on_which_nothing_ranks_is_not_searched_on(encoder: Encoder, corpus: Corpus) -> None:
    """A search that hangs there would hang the server; ranking was tried in a child process."""
    made = []

    def counted(vectors: NDArray[np.float32], device: str) -> Index:
        made.append(device)
        return TorchIndex(vectors, device)

    set_given_up(torch.device("cpu"), True)
    try:
        engine = RetrievalEngine(encoder.towers, corpus, RetrievalOptions(device="cpu:0"), on_device=counted)
    finally:
        set_given_up(torch.device("cpu"), False)
    said = "cpu:0: every way of ranking there failed its checks"
    assert engine.notes["search"] == {"backend": "native", "not_on_device": said}
    assert made == []


def as_new(corpus: Corpus, rows: Any, ids: Any) -> NewPosts:
    """The vectors of some rows under other ids."""
    topics: list[str | None] = [None if row % 3 == 0 else f"topic {row % 5}" for row in rows]
    created = np.asarray(rows, np.int64) * 60
    return NewPosts(np.asarray(ids, np.uint64), corpus.author_ids[rows], created, topics, corpus.vectors[rows])


def random_corpus(posts: int) -> Corpus:
    """With unit vectors as wide as those of the towers."""
    vectors = np.random.default_rng(0).standard_normal((posts, 64), np.float32)
    ids = np.arange(1, posts + 1, dtype=np.uint64)
    return Corpus("x", "1", "d", ids, ids, vectors / np.linalg.norm(vectors, axis=1, keepdims=True))


@pytest.mark.parametrize("most", [5, SEGMENT_ROWS // 2])
def test_changes_are_what_an_oracle_says(encoder: Encoder, corpus: Corpus, contexts: list[Context], most: int) -> None:
    """After each change of at most so many posts, a search equals one of a corpus that holds the same posts and was never changed, in
    ids and bits. Small changes share one segment, large ones fill several."""
    corpus = corpus if most == 5 else random_corpus(6 * most)
    chance = np.random.default_rng(1)
    changed, at_once = (RetrievalEngine(encoder.towers, corpus, RetrievalOptions(threads=1)) for _ in range(2))
    deleted, new = set[int](), dict[int, int]()  # as a change that says all of it at once: a row for each new post
    segments = []
    live = {int(corpus.post_ids[row]): row for row in np.flatnonzero(~corpus.hidden)[::-1].tolist()}
    for step in range(42):
        rows = chance.choice(np.flatnonzero(~corpus.hidden), chance.integers(1, most + 1), replace=False)
        known = chance.choice(np.array(list(live), np.uint64), len(rows), replace=False).tolist()
        if step % 3 == 2:
            gone = [*known, 10**15]
            nothing = as_new(corpus, np.empty(0, np.int64), [])
            assert changed.change(Change(np.array(gone, np.uint64), nothing, Mark(step + 1))) == len(known)
            for post in known:
                del live[post]
                new.pop(post, None)
            deleted.update(gone)
        else:
            ids = [post if chance.random() < 0.4 else 10**12 + step * 10**6 + at for at, post in enumerate(known)]
            change = Change(NONE, as_new(corpus, rows, ids), Mark(step + 1))
            changed.change(change, changed.prepare(change) if step % 2 else None)
            live |= dict(zip(ids, rows.tolist(), strict=True))
            for post, row in zip(ids, rows.tolist(), strict=True):
                new.pop(post, None)  # it goes to the end
                new[post] = row
            deleted.difference_update(ids)
        assert (changed.posts, changed.changes) == (len(live), step + 1)
        segments.append(len(changed.segment_rows) - 1)
        posts = np.array(list(live), np.uint64)
        plain = replace(corpus, post_ids=posts, author_ids=corpus.author_ids[list(live.values())],
                        vectors=np.ascontiguousarray(corpus.vectors[list(live.values())]), topics=None, created_at=None)  # fmt: skip
        oracle = RetrievalEngine(encoder.towers, plain, RetrievalOptions(threads=1))
        asked = [wanted(context, 40, exclude=posts[:5]) for context in contexts[:3]]
        for ours, theirs in zip(changed.retrieve(asked).retrieved, oracle.retrieve(asked).retrieved, strict=True):
            assert ours.scores.tobytes() == theirs.scores.tobytes()
            assert ours.visible == theirs.visible
            last = ours.scores[-1]  # posts with equal vectors may stand in another order, or beyond the end
            assert {p for p, s in zip(ours.post_ids.tolist(), ours.scores, strict=True) if s > last} == {
                p for p, s in zip(theirs.post_ids.tolist(), theirs.scores, strict=True) if s > last
            }
        oracle.close()
    at_once.change(Change(np.array(list(deleted), np.uint64), as_new(corpus, list(new.values()), list(new)), Mark(42)))
    assert (at_once.posts, at_once.changes, at_once.mark) == (changed.posts, changed.changes, changed.mark)
    assert max(segments) == (1 if most == 5 else 3)
    asked = [wanted(context, changed.posts) for context in contexts]
    assert all(map(same, at_once.retrieve(asked).retrieved, changed.retrieve(asked).retrieved))


def test_deleted_and_replaced_posts_take_no_memory_for_long(encoder: Encoder) -> None:
    """Posts come and go for a long time: at most twice the posts that are there are kept, however many there were."""
    corpus = random_corpus(SEGMENT_ROWS // 4)
    rows, steps, kept = np.arange(len(corpus)), 100, 25
    engine, rows_made = RetrievalEngine(encoder.towers, corpus, RetrievalOptions(threads=1)), 0
    for step in range(steps):
        first = 10**12 + step * len(rows)
        change = Change(
            (first - kept * len(rows) + rows).astype(np.uint64), as_new(corpus, rows, first + rows), Mark(step + 1)
        )
        added = engine.prepare(change)
        rows_made += len(added[0].corpus) if added[0] else 0
        engine.change(change, added)
        new = len(rows) * min(step + 1, kept)
        assert engine.posts == len(rows) + new
        assert sum(engine.segment_rows[1:]) <= 2 * (new + SEGMENT_ROWS)
    assert rows_made < 8 * steps * len(rows), "a post is seldom indexed again"
    assert len(engine.segment_rows) < 8


def test_a_new_post_has_its_time_and_topic(encoder: Encoder, corpus: Corpus, contexts: list[Context]) -> None:
    engine = RetrievalEngine(encoder.towers, corpus)
    engine.change(Change(NONE, as_new(corpus, [40, 41], [1, 2]), Mark()))
    (only,) = engine.retrieve([wanted(contexts[4], 9, topics=("topic 0",))]).retrieved
    assert (only.post_ids.tolist(), only.topics, only.created_at.tolist()) == ([1], ["topic 0"], [2400])
    (young,) = engine.retrieve([wanted(contexts[4], 300, created_after=2401)]).retrieved
    assert 2 in young.post_ids.tolist()
    assert 1 not in young.post_ids.tolist()
    engine.change(Change(NONE, replace(as_new(corpus, [40], [1]), vectors=np.zeros((1, 64), np.float32)), Mark()))
    (gone,) = engine.retrieve([wanted(contexts[4], 300)]).retrieved
    assert 1 not in gone.post_ids.tolist(), "a zero vector is hidden, and so is what it replaced"


def test_a_change_needs_neither_compiler_nor_kernel_on_the_disk(
    encoder: Encoder, corpus: Corpus, contexts: list[Context], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "kernels").mkdir(mode=0o700)
    for source in ("kernel.cpp", "search.cpp"):  # those that are built already
        shutil.copy2(build_kernel(source=HERE / source).path, tmp_path / "kernels")
    made = RetrievalEngine(encoder.towers, corpus, RetrievalOptions(threads=1, kernel_directory=tmp_path / "kernels"))
    assert {path.name.partition("-")[0] for path in (tmp_path / "kernels").iterdir()} == {"kernel", "search"}
    shutil.rmtree(tmp_path / "kernels")
    monkeypatch.setenv("PATH", "")
    made.change(Change(NONE, as_new(corpus, [40], [900_001]), Mark()))
    assert 900_001 in made.retrieve([wanted(contexts[0], len(corpus))]).retrieved[0].post_ids


def test_what_is_closed_leaves_no_thread_and_serves_nobody(
    encoder: Encoder, corpus: Corpus, contexts: list[Context]
) -> None:
    engine = RetrievalEngine(encoder.towers, corpus, RetrievalOptions(threads=3))
    index = NativeIndex(corpus.vectors, threads=1)
    engine.retrieve([wanted(contexts[0])])
    running = len(os.listdir("/proc/self/task"))
    for closed in (engine, engine, index, index):
        closed.close()
    assert len(os.listdir("/proc/self/task")) <= running - 4, "two of the tower and two of the search"
    with pytest.raises(EngineError, match="closed"):
        engine.tower.encode(contexts[:1])
    with pytest.raises(EngineError, match="closed"):
        index.search([])
