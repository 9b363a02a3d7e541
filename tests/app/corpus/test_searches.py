"""Searches and changes over a small real corpus: shared scans, failures, deadlines, overload, swaps, restarts, the end."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import shutil
import threading
import weakref
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from app.corpus.loading import LoadedCorpus, corpus_loader
from app.corpus.posts import read_change
from app.errors import CorpusNotLoaded, DeadlineExceeded, EngineDown, NoCorpus, Overloaded
from app.interface import ReloadInProgress
from app.queue.runners import RETRIEVAL_THREAD
from app.settings import Queue, Settings
from model.engine import EngineError
from model.retrieval.inputs import Query
from tests.app.corpus.serving import (
    begun,
    change,
    create,
    found,
    ids_of,
    posts_of,
    query,
    running,
    settings_of,
    watched,
    write_mapped_corpus,
)
from tests.support import corpora
from tests.support.fakes import FakeClock, Gate
from tests.support.rankers import until
from weights.checkpoint import load_manifest
from weights.corpus.changes import load_changed, read_changes
from weights.corpus.snapshot import write_snapshot
from weights.corpus.store import load_corpus_manifest
from weights.errors import CheckpointError, LogLost, NotStored, StorageFull
from weights.text_ids import IdKind

pytestmark = pytest.mark.anyio


async def reached(gate: Gate) -> None:
    assert await asyncio.to_thread(gate.entered.wait, 20)


# searches


async def test_waiting_searches_share_a_scan_and_get_their_own_result(tmp_path: Path) -> None:
    settings, gate = settings_of(tmp_path), Gate()
    load, engines = watched(settings, retrieve=gate)
    async with running(settings, load) as searches:
        first = begun(searches, 1)
        await reached(gate)
        others = [begun(searches, user) for user in range(2, 36)]
        await asyncio.sleep(0)
        gate.opened.set()
        shared = await asyncio.gather(first, *others)
        assert engines[0].scans == [[1], [*range(2, 34)], [34, 35]]
        for user, each in enumerate(shared, 1):
            alone = await begun(searches, user)
            assert each.posts.scores.tobytes() == alone.posts.scores.tobytes()
            assert each.posts.post_ids.tobytes() == alone.posts.post_ids.tobytes()


async def test_keys_take_turns(tmp_path: Path) -> None:
    """One that has sent sixty at once is not ahead of another that comes behind it."""
    settings, gate = settings_of(tmp_path), Gate()
    load, engines = watched(settings, retrieve=gate)
    async with running(settings, load) as searches:
        tasks = [begun(searches, 99)]
        await reached(gate)
        tasks += [begun(searches, user, key="greedy") for user in range(100, 160)]
        await asyncio.sleep(0)
        tasks += [begun(searches, user, key="modest") for user in range(1, 6)]
        await asyncio.sleep(0)
        gate.opened.set()
        await asyncio.gather(*tasks)
    assert engines[0].scans[1][:10] == [100, 1, 101, 2, 102, 3, 103, 4, 104, 5]


@pytest.mark.parametrize(("seconds", "thread"), [(0.9e-3, "MainThread"), (1.1e-3, RETRIEVAL_THREAD)])
async def test_a_short_search_is_computed_at_once(tmp_path: Path, seconds: float, thread: str) -> None:
    settings = settings_of(tmp_path)
    load, engines = watched(settings)
    async with running(settings, load) as searches:
        engines[0].search_seconds = seconds
        for _ in range(3):
            await begun(searches, 1)
    assert engines[0].threads == [RETRIEVAL_THREAD, thread, thread], "the first is not foreseen"


async def test_a_cached_user_is_searched_in_the_loop_despite_encodings(tmp_path: Path) -> None:
    settings = settings_of(tmp_path)
    load, engines = watched(settings)
    async with running(settings, load) as searches:
        engines[0].search_seconds, engines[0].encode_seconds = 0.5e-3, 2e-3
        for user in (1, 1, 2, 2):
            await begun(searches, user)
    assert engines[0].threads == [RETRIEVAL_THREAD, "MainThread", RETRIEVAL_THREAD, "MainThread"]


async def test_a_user_who_cannot_be_looked_up_fails_alone(tmp_path: Path) -> None:
    settings = settings_of(tmp_path)
    load, _ = watched(settings, look_up=lambda given: fail_for_user_3(given[0]))
    async with running(settings, load) as searches:
        ended = await asyncio.gather(*(begun(searches, user) for user in (2, 3, 4)), return_exceptions=True)
    assert [isinstance(one, EngineDown) for one in ended] == [False, True, False]


def fail_for_user_3(queries: Sequence[Query]) -> None:
    if any(query.context.user_id == 3 for query in queries):
        raise RuntimeError("planted")


@pytest.mark.parametrize(("seconds", "thread"), [(1e-4, "MainThread"), (1.0, RETRIEVAL_THREAD)])
async def test_a_search_that_raises_fails_alone_wherever_computed(tmp_path: Path, seconds: float, thread: str) -> None:
    settings = settings_of(tmp_path)
    load, engines = watched(settings, retrieve=fail_for_user_3)
    async with running(settings, load) as searches:
        engines[0].search_seconds = seconds
        await begun(searches, 9)
        ended = await asyncio.gather(*(begun(searches, user) for user in (1, 2, 3, 4)), return_exceptions=True)
    assert [isinstance(one, EngineDown) for one in ended] == [False, False, True, False]
    assert engines[0].scans[1:] == [[1, 2, 3, 4], [1], [2], [3], [4]]
    assert set(engines[0].threads[1:]) == {thread}


async def test_what_waits_after_a_split_batch_is_answered_at_the_end(tmp_path: Path) -> None:
    gate = Gate()

    def fail_together(queries: Sequence[Query]) -> None:
        if len(queries) > 1:
            raise RuntimeError("planted")
        gate(queries)

    settings = settings_of(tmp_path)
    load, _ = watched(settings, retrieve=fail_together)
    async with running(settings, load) as searches:
        tasks = [begun(searches, user) for user in (1, 2, 3)]
        await reached(gate)  # the first is tried by itself, and the others wait for that
        assert not await searches.stop(0.05)
        for task in tasks:
            with pytest.raises(EngineDown, match="The process stops") as refused:
                await task
            assert refused.value.retry_after_seconds is not None
        gate.opened.set()


async def test_a_full_queue_and_an_impossible_deadline_are_refused(tmp_path: Path) -> None:
    settings, gate, clock = (
        settings_of(tmp_path, queue=Queue(max_requests=4, max_wait_seconds=3.0)),
        Gate(),
        FakeClock(),
    )
    load, _ = watched(settings, retrieve=gate)
    async with running(settings, load, clock) as searches:
        with pytest.raises(DeadlineExceeded, match="the deadline had passed on arrival"):
            await begun(searches, 9, clock.now)
        first = begun(searches, 1)
        await reached(gate)
        clock.advance(2.0)  # so long takes one scan
        gate.opened.set()
        await first
        gate.opened.clear()
        gate.entered.clear()
        first = begun(searches, 2)
        await reached(gate)
        with pytest.raises(DeadlineExceeded, match="the predicted wait is longer than the deadline"):
            await begun(searches, 9, clock.now + 3.9)
        others = [begun(searches, user) for user in range(3, 35)]
        await asyncio.sleep(0)
        with pytest.raises(Overloaded, match="the queue is full") as refused:
            await begun(searches, 9)
        assert refused.value.retry_after_seconds
        gate.opened.set()
        await asyncio.gather(first, *others)


async def test_a_device_lost_in_a_search_ends_the_process(tmp_path: Path) -> None:
    """As one lost in a forward of the ranker: only a new process can use it, and nobody would start one."""

    def lose(queries: Sequence[Query]) -> None:
        raise EngineError("planted", sticky=True)

    settings, told = settings_of(tmp_path), list[str]()
    load, _ = watched(settings, retrieve=lose)
    ranker = create(settings, load)
    ranker.on_fatal = told.append
    ranker.start()
    await ranker.wait_ready()
    assert ranker.health().ready
    with pytest.raises(EngineDown):
        await begun(ranker.corpus, 1)
    await until(lambda: bool(told))
    assert told == ["The engine is lost; the log says why."] == [ranker.health().reason]
    assert (ranker.health().ready, ranker.health().failed) == (False, True)
    with pytest.raises(EngineDown):
        ranker.check_open(None)
    await ranker.stop(10.0)


async def test_writing_into_files_that_are_mapped_costs_all_answers(tmp_path: Path) -> None:
    """Until what is there is right again and read again; and no change is made from wrong numbers."""
    write_mapped_corpus(tmp_path)
    async with running(settings_of(tmp_path)) as searches:
        await searches.change(change([1], [900_000]))
        vectors = tmp_path / "corpus-v1" / "vectors.safetensors"
        raw = vectors.read_bytes()
        with vectors.open("r+b") as file:
            file.seek(4096)
            file.write(bytes(8192))
        with pytest.raises(EngineDown):
            await found(searches, query())
        with pytest.raises(NotStored, match="written to"):
            await searches.change(change([2], []))
        vectors.write_bytes(raw)
        await searches.swap(tmp_path / "towers-v1", tmp_path / "corpus-v1")
        assert (await searches.change(change([2], []))).changes == 2


# swaps


async def test_a_swap_changes_towers_and_corpus_between_two_searches(tmp_path: Path) -> None:
    settings, gate = settings_of(tmp_path), Gate()
    corpora.written(tmp_path, seed=5, version="v2")
    load, engines = watched(settings, retrieve=gate)
    async with running(settings, load) as searches:
        old = searches.served
        first, waits = begun(searches, 1), begun(searches, 1)
        await reached(gate)
        new = await searches.swap(tmp_path / "towers-v2", tmp_path / "corpus-v2")
        assert (searches.served, new.manifest.version, new.corpus.version) == (new, "v2", "v2")
        after, late = begun(searches, 1), begun(searches, 1, served=old)
        await asyncio.sleep(0)
        assert not engines[0].closed.is_set()
        gate.opened.set()
        ended = await asyncio.gather(first, waits, after, late)
        scores = [each.posts.scores.tobytes() for each in ended]
        assert scores[0] == scores[1] == scores[3] != scores[2], "which was still held"
        await asyncio.to_thread(engines[0].closed.wait, 5)
        assert engines[0].closed.is_set()
        with pytest.raises(CorpusNotLoaded, match="was replaced") as refused:
            await begun(searches, 1, served=old)
        assert refused.value.retry_after_seconds == 0, "another corpus serves"


async def test_a_failed_swap_changes_nothing_and_two_never_overlap(tmp_path: Path) -> None:
    async with running(settings_of(tmp_path)) as searches:
        served, paths = searches.served, (tmp_path / "towers-v1", tmp_path / "corpus-v1")
        await searches.change(change([1], []))
        with pytest.raises(CheckpointError):
            await searches.swap(paths[0], tmp_path / "nowhere")
        assert searches.served is served
        assert (await searches.change(change([2], []))).changes == 2
        both = await asyncio.gather(searches.swap(*paths), searches.swap(*paths), return_exceptions=True)
        assert [isinstance(one, ReloadInProgress) for one in both] == [False, True]
        assert not {1, 2} & await ids_of(searches)


async def test_a_swap_that_was_given_up_lets_go_of_its_directory(tmp_path: Path) -> None:
    settings, go_on = settings_of(tmp_path), threading.Event()
    corpora.written(tmp_path, version="v2")
    load = corpus_loader(settings)
    made: list[weakref.ref[LoadedCorpus]] = []

    def slow_second(checkpoint: Path, corpus: Path, serving: LoadedCorpus | None) -> LoadedCorpus:
        loaded = load(checkpoint, corpus, serving)
        if serving is not None and not made:
            made.append(weakref.ref(loaded.engine))  # type: ignore[arg-type]
            assert go_on.wait(10)
        return loaded

    async with running(settings, slow_second) as searches:
        swap = asyncio.ensure_future(searches.swap(tmp_path / "towers-v2", tmp_path / "corpus-v2"))
        await until(lambda: bool(made))
        swap.cancel()  # whoever asked for it has gone
        await asyncio.gather(swap, return_exceptions=True)
        del swap  # its error holds the frames
        go_on.set()
        manifest = load_manifest(tmp_path / "towers-v2")

        def is_free() -> bool:
            with suppress(NotStored):
                load_changed(tmp_path / "corpus-v2", manifest)[1].close()
                return True
            return False

        await until(is_free)
        await until(lambda: gc.collect() >= 0 and made[0]() is None)  # nor does it keep its memory
        await searches.swap(tmp_path / "towers-v2", tmp_path / "corpus-v2")


async def test_a_corpus_may_come_later(tmp_path: Path) -> None:
    corpora.written(tmp_path)
    async with running(Settings(threads=1)) as searches:
        assert await searches.state() is None
        with pytest.raises(NoCorpus, match="serves no corpus") as none:
            _ = searches.served
        assert none.value.retry_after_seconds is None
        with pytest.raises(NoCorpus):
            await searches.change(change([1], []))
        await searches.swap(tmp_path / "towers-v1", tmp_path / "corpus-v1")
        assert len((await begun(searches, 1)).posts) == 5


# changes


async def test_a_change_is_on_disk_and_whole_for_the_next_search(tmp_path: Path) -> None:
    settings = settings_of(tmp_path)
    async with running(settings) as searches:
        state = await searches.change(change([1, 2, 9999], [900, 901]))
        assert (state.posts, state.changes, state.deleted, state.mark.sequence) == (299, 1, 2, 1)
        assert {1, 2, 900, 901} & await ids_of(searches) == {900, 901}
        state = await searches.change(change([900], [3, 902]))
        assert (state.posts, state.changes, state.deleted) == (299, 2, 1)
        assert state == await searches.state() or state.deleted != 0


async def test_a_restart_has_the_same_posts_in_the_same_order(tmp_path: Path) -> None:
    settings = settings_of(tmp_path)
    async with running(settings) as searches:
        for step in range(120):
            gone = [1000 + step - 20] if step % 3 else [step % 50 + 1]
            await searches.change(change(gone, [1000 + step] if step % 4 else [1000 + step, 60 + step % 20]))
        before, state = await posts_of(searches), searches.present()
        assert state is not None
        assert len(before) == state.posts
        await searches.swap(tmp_path / "towers-v1", tmp_path / "corpus-v1")
        assert await posts_of(searches) == before
        assert searches.present() == state
    async with running(settings) as again:
        assert await posts_of(again) == before, "ids, order and bits"
        assert again.mark == state.mark
        assert (await again.change(change([3], []))).changes == state.changes + 1


@pytest.mark.parametrize("ids", ["uint64", "text"])
async def test_a_snapshot_serves_what_the_corpus_serves(tmp_path: Path, ids: IdKind) -> None:
    """Posts, order and bits; and the same changes lead from both to the same mark."""
    texts = (
        b'{"upsert": [{"post_id": "%d", "author_id": "b", "topic": "new"}, {"post_id": "post:3", "author_id": "c"}], '
        b'"delete": ["post:1"]}'
    )
    numbers = (
        b'{"upsert": [{"post_id": %d, "author_id": 2, "topic": "new"}, {"post_id": 3, "author_id": 7}], "delete": [1]}'
    )
    body = texts if ids == "text" else numbers
    (tmp_path / "copy").mkdir()
    corpora.written(tmp_path, ids=ids)
    async with running(settings_of(tmp_path)) as searches:
        for number in (900, 901):
            await searches.change(read_change(body % number, ids))
        snapshot = await asyncio.to_thread(write_snapshot, tmp_path / "corpus-v1", tmp_path / "copy" / "corpus-v1")
        assert snapshot.version == "v1+2"
        shutil.copytree(tmp_path / "towers-v1", tmp_path / "copy" / "towers-v1")
        async with running(settings_of(tmp_path / "copy")) as copy:
            for further in (b"", body % 902):
                if further:
                    marks = [(await each.change(read_change(further, ids))).mark for each in (searches, copy)]
                    assert marks[0] == marks[1]
                ours, theirs = [(await found(each, query())).posts for each in (searches, copy)]
                assert ours.post_ids.tolist() == theirs.post_ids.tolist()
                assert ours.scores.tobytes() == theirs.scores.tobytes()
                assert (ours.topics, ours.created_at.tolist(), ours.texts) == (
                    theirs.topics,
                    theirs.created_at.tolist(),
                    theirs.texts,
                )


async def test_a_snapshot_holds_as_many_topics_as_changes_bring(tmp_path: Path) -> None:
    async with running(settings_of(tmp_path)) as searches:
        posts = [{"post_id": 1000 + place, "author_id": 2, "topic": f"topic {place}"} for place in range(10_001)]
        for part in (posts[:9000], posts[9000:]):
            await searches.change(read_change(json.dumps({"upsert": part}).encode(), "uint64"))
        (tmp_path / "copy").mkdir()
        await asyncio.to_thread(write_snapshot, tmp_path / "corpus-v1", tmp_path / "copy" / "corpus-v1")
    shutil.copytree(tmp_path / "towers-v1", tmp_path / "copy" / "towers-v1")
    async with running(settings_of(tmp_path / "copy")) as copy:
        asked = query()
        asked.filters.topics = ("topic 10000",)
        assert (await found(copy, asked)).posts.post_ids.tolist() == [11_000]


async def test_feed_changes_are_made_once_and_after_their_position(tmp_path: Path) -> None:
    """Another corpus may have taken the place of the one that they were read for."""
    async with running(settings_of(tmp_path, feed="redis://127.0.0.1:1/posts")) as searches:
        state = await searches.follow([change([1], [900]), change([2], [901])], "", "5-0")
        assert (state.posts, state.mark.sequence, state.mark.position) == (299, 2, "5-0")
        for after in ("", "4-0"):
            assert (await searches.follow([change([3], [])], after, "6-0")).mark == state.mark
        assert (await searches.follow([], "5-0", "6-0")).mark == state.mark._replace(position="6-0"), (
            "none that can be read"
        )
        assert {1, 2, 3, 900, 901} & await ids_of(searches) == {3, 900, 901}


async def test_searches_go_on_while_new_posts_are_indexed(tmp_path: Path) -> None:
    settings, gate = settings_of(tmp_path), Gate()
    load, _ = watched(settings, prepare=gate)
    async with running(settings, load) as searches:
        changing = asyncio.ensure_future(searches.change(change([1], [900])))
        await reached(gate)
        assert {1, 900} & await ids_of(searches) == {1}
        gate.opened.set()
        await changing
        assert {1, 900} & await ids_of(searches) == {900}


async def test_nothing_is_searched_beside_a_change_of_the_engine(tmp_path: Path) -> None:
    settings, gate = settings_of(tmp_path), Gate()
    load, engines = watched(settings, change=gate)
    async with running(settings, load) as searches:
        engines[0].search_seconds = 1e-4  # else it would wait for its thread in any case
        await begun(searches, 1)
        changing = asyncio.ensure_future(searches.change(change([1], [])))
        await reached(gate)
        waits = begun(searches, 1)
        await asyncio.sleep(0.01)
        assert (engines[0].scans, waits.done()) == ([[1]], False)
        gate.opened.set()
        await changing
        assert 1 not in (await waits).posts.post_ids


async def test_more_changes_at_once_than_there_is_room_for_are_refused(tmp_path: Path) -> None:
    settings, gate = settings_of(tmp_path), Gate()
    load, _ = watched(settings, prepare=gate)
    async with running(settings, load) as searches:
        waiting = [asyncio.ensure_future(searches.change(change([post], []))) for post in (1, 2, 3, 4)]
        await reached(gate)
        with pytest.raises(Overloaded, match="Too many changes") as refused:
            await searches.change(change([5], []))
        assert refused.value.retry_after_seconds
        waiting[0].cancel()
        gate.opened.set()
        ended = await asyncio.gather(*waiting, return_exceptions=True)
        assert [one.changes for one in ended[1:]] == [2, 3, 4], "the first is made though its caller has gone"  # type: ignore[union-attr]
        assert (await searches.change(change([5], []))).changes == 5, "the room of what has ended is free"


async def test_a_change_that_cannot_be_indexed_changes_nothing(tmp_path: Path) -> None:
    def fail(_: object) -> None:
        raise EngineError("planted")

    settings = settings_of(tmp_path)
    load, _ = watched(settings, prepare=fail)
    async with running(settings, load) as searches:
        with pytest.raises(EngineDown, match="cannot be indexed now"):
            await searches.change(change([1], [900]))
        assert searches.mark.sequence == 0
        assert 1 in await ids_of(searches)


async def test_a_stored_change_that_the_engine_lacks_is_read_again(tmp_path: Path) -> None:
    def fail(arguments: Any) -> None:
        if 1 in arguments[0].delete:
            raise MemoryError

    settings = settings_of(tmp_path)
    load, _ = watched(settings, change=fail)
    async with running(settings, load) as searches:
        served = searches.served
        with pytest.raises(EngineDown, match="is on disk but not served yet") as late:
            await searches.change(change([1], []))
        assert late.value.retry_after_seconds == 5.0
        with suppress(EngineDown):  # made when the corpus has been read again, or refused until then
            await searches.change(change([2], []))
        await until(lambda: searches.served is not served)
        assert 1 not in await ids_of(searches)
        assert (await searches.change(change([3], []))).changes in (2, 3)


async def test_a_process_that_can_be_sent_no_change_shares_a_directory(tmp_path: Path) -> None:
    """And one that can be has it alone: the second is refused with a sentence, and so is the end of the first's corpus under it."""
    alone = settings_of(tmp_path)
    shared = settings_of(tmp_path, admin={})
    async with running(shared) as one, running(shared) as two:
        assert await posts_of(one) == await posts_of(two)
        with pytest.raises(StorageFull, match="may not change the corpus"):
            await one.change(change([1], []))
        with pytest.raises(NotStored, match="is in use by another process"):
            async with running(alone):
                pass
    async with running(alone) as one:
        await one.change(change([1], []))
        for settings in (alone, shared):
            with pytest.raises(NotStored, match="give each process a directory of its own"):
                async with running(settings):
                    pass
        corpora.written(tmp_path, seed=5, version="v2")
        await one.swap(tmp_path / "towers-v2", tmp_path / "corpus-v2")
        _, changes, read = load_changed(tmp_path / "corpus-v1", load_manifest(tmp_path / "towers-v1"))
        assert read.mark.sequence == 1, "what was replaced is free"
        changes.close()


async def test_changes_without_their_file_are_refused_until_a_reload(tmp_path: Path) -> None:
    async with running(settings_of(tmp_path)) as searches:
        await searches.change(change([1], []))
        (file,) = (tmp_path / "corpus-v1").glob("changes-*.sqlite")
        file.unlink()
        for _ in range(2):
            with pytest.raises(LogLost, match="was removed or replaced under this process"):
                await searches.change(change([2], []))
        assert 1 not in await ids_of(searches), "it serves on"
        await searches.swap(tmp_path / "towers-v1", tmp_path / "corpus-v1")
        assert (await searches.change(change([2], []))).changes == 1
        assert {1, 2} & await ids_of(searches) == {1}


async def test_a_replaced_corpus_takes_no_change_until_it_is_read(tmp_path: Path) -> None:
    async with running(settings_of(tmp_path)) as searches:
        await searches.change(change([1], []))
        (tmp_path / "new").mkdir()
        _, other = corpora.written(tmp_path / "new")
        shutil.rmtree(tmp_path / "corpus-v1")
        other.rename(tmp_path / "corpus-v1")
        with pytest.raises(NotStored, match="was replaced on the disk; read it again"):
            await searches.change(change([2], []))
        await searches.swap(tmp_path / "towers-v1", tmp_path / "corpus-v1")
        assert (await searches.change(change([2], []))).changes == 1


async def test_a_change_beside_a_swap_is_made_in_what_the_swap_serves(tmp_path: Path) -> None:
    settings, gate = settings_of(tmp_path), Gate()
    corpora.written(tmp_path, seed=5, version="v2")
    gate.opened.set()
    load = corpus_loader(settings)

    def slow(*paths: Any) -> LoadedCorpus:
        loaded = load(*paths)
        gate([])
        return loaded

    async with running(settings, slow) as searches:
        gate.opened.clear()
        gate.entered.clear()
        swapping = asyncio.ensure_future(searches.swap(tmp_path / "towers-v2", tmp_path / "corpus-v2"))
        await reached(gate)
        changing = asyncio.ensure_future(searches.change(change([1], [])))
        await asyncio.wait([changing], timeout=0.1)
        assert not changing.done()
        gate.opened.set()
        await swapping
        assert (await changing).corpus.version == "v2"
        assert 1 not in await ids_of(searches)


async def test_a_change_of_the_other_kind_of_ids_is_refused(tmp_path: Path) -> None:
    """It was read before a swap to a corpus with other ids."""
    corpora.written(tmp_path, ids="text")
    async with running(settings_of(tmp_path)) as searches:
        with pytest.raises(NotStored, match="another kind of ids"):
            await searches.change(change([1], [900]))
        assert (await searches.change(read_change(b'{"delete": ["post:1"]}', "text"))).mark.sequence == 1


# the end


async def test_the_end_waits_for_what_was_begun(tmp_path: Path) -> None:
    settings, gate, writing = settings_of(tmp_path), Gate(), Gate()
    load, engines = watched(settings, retrieve=gate, prepare=writing)
    ranker = create(settings, load)
    with pytest.raises(CorpusNotLoaded, match="is being loaded") as early:
        _ = ranker.corpus.served
    assert early.value.retry_after_seconds == 2.0
    ranker.start()
    await ranker.wait_ready()
    searching, changing = begun(ranker.corpus, 1), asyncio.ensure_future(ranker.corpus.change(change([1], [900])))
    await reached(gate)
    await reached(writing)
    stopping = asyncio.ensure_future(ranker.stop(20.0))
    await asyncio.wait([stopping], timeout=0.1)
    assert not stopping.done()
    gate.opened.set()
    assert len((await searching).posts) == 5
    await asyncio.wait([stopping], timeout=0.1)
    assert not stopping.done()
    writing.opened.set()
    assert (await changing).mark.sequence == 1
    assert await stopping
    await asyncio.to_thread(engines[0].closed.wait, 5)
    with pytest.raises(CorpusNotLoaded):
        _ = ranker.corpus.served


async def test_a_change_that_outlasts_the_end_is_whole(tmp_path: Path) -> None:
    settings, gate = settings_of(tmp_path), Gate()
    load, _ = watched(settings, prepare=gate)
    async with running(settings, load) as searches:
        changing = asyncio.ensure_future(searches.change(change([1], [900])))
        await reached(gate)
        assert not await searches.stop(0.05)
        assert not changing.done()
        gate.opened.set()
        with pytest.raises(EngineDown, match="is on disk but not served yet"):
            await changing
    read = read_changes(tmp_path / "corpus-v1", load_corpus_manifest(tmp_path / "corpus-v1"))
    assert (read.delete.tolist(), read.posts.post_ids.tolist()) == ([1], [900])


async def test_the_directory_is_free_after_the_end(tmp_path: Path) -> None:
    before = {*os.listdir("/proc/self/fd")}
    for _ in range(2):
        async with running(settings_of(tmp_path)) as searches:
            await searches.change(change([1], [900]))
    left = list[str]()
    for each in {*os.listdir("/proc/self/fd")} - before:
        with suppress(FileNotFoundError):
            left.append(os.readlink(f"/proc/self/fd/{each}"))
    assert not [name for name in left if "corpus-v1" in name]
