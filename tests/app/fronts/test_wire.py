"""Messages carry every method of the interface, and give back the same bits."""

from __future__ import annotations

import inspect
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any, get_type_hints

import msgspec
import numpy as np
import pytest

from app.errors import Overloaded
from app.fronts import wire
from app.fronts.wire import METHODS, encode, from_engine, from_front
from app.interface import (
    CheckpointNotFound,
    Found,
    Health,
    Ranked,
    Reloads,
    Retrieval,
    ServedModel,
    ServedRetrieval,
    Service,
)
from loadtest.machine import DEMO
from loadtest.soak import fake_engine
from model.engine import EngineInfo
from model.inputs import FEW, Candidates, Context, Scores
from model.retrieval.inputs import Filters, Mark, PostChange, PostRows, Query, Retrieved
from weights.corpus.manifest import CorpusManifest
from weights.errors import StorageFull
from weights.format.manifest import Manifest

ACTIONS = 3
CONFIG = replace(fake_engine.CONFIG, history_length=63)
NONE = np.empty(0, np.uint64)


def inputs(history: int, candidates: int, seed: int = 1) -> tuple[Context, Candidates]:
    draw = np.random.default_rng(seed)

    def ids(count: int) -> np.ndarray:
        return draw.integers(0, 2**64, count, np.uint64)

    def words(count: int, rows: int = CONFIG.product_surfaces) -> np.ndarray:
        return draw.integers(0, rows, count, np.int64)

    context = Context(
        int(ids(1)[0]), ids(history), ids(history), draw.random((history, ACTIONS), np.float32), words(history),
        draw.random(history, np.float32), is_kept=False,
    )  # fmt: skip
    posts = Candidates(
        ids(candidates), ids(candidates), words(candidates), words(candidates, CONFIG.post_age_buckets), 5
    )
    return context, posts


def flat(value: Any) -> Any:
    """A value as lists of plain ones, with arrays as their types, shapes and bytes."""
    if isinstance(value, np.ndarray):
        return str(value.dtype), value.shape, value.tobytes()
    if isinstance(value, list | tuple):
        return [flat(each) for each in value]
    names = getattr(value, "__struct_fields__", None) or getattr(value, "__dataclass_fields__", None)
    return value if names is None else [type(value).__name__, *(flat(getattr(value, name)) for name in names)]


def test_every_method_that_waits_for_the_engine_travels_and_no_other() -> None:
    waiting = {
        name: owner
        for owner in (Service, Retrieval, Reloads)
        for name, function in vars(owner).items()
        if inspect.isfunction(function) and not name.startswith("_")
        if inspect.iscoroutinefunction(function) or "done" in get_type_hints(function)
    }
    assert waiting.pop("stop") is Service  # each process stops by itself
    assert {name: method.owner for name, method in METHODS.items()} == waiting


@pytest.mark.parametrize(("history", "count"), [(0, 1), (1, 1), (17, 7), (63, 65)])
def test_questions_arrive_as_they_were_sent(history: int, count: int) -> None:
    context, candidates = inputs(history, count)
    ids = candidates.post_ids
    query = Query(context, 7, Filters(ids, ("art",), -(2**63)), -0.5)
    change = PostChange(ids, PostRows(ids, ids, ids.view(np.int64), [None, *["art"] * (count - 1)]))
    for name, arguments in {
        "rank": (1, 12.5, "feed", True, False, context, candidates),
        "attention": (1, context, candidates, 12.5),
        "retrieve": (2, query, 12.5, None),
        "change": (change,),
        "reload": (Path("a"), True),
        "reload_retrieval": (None, Path("b")),
        "compact": (),
    }.items():
        sent = METHODS[name].question(7, *arguments)
        came = from_front.decode(encode(sent)[4:])
        assert flat(came) == flat(sent), name
    came = from_front.decode(encode(METHODS["rank"].question(7, 1, 1.0, None, False, False, context, candidates))[4:])
    came.context.check(CONFIG)
    came.candidates.check(CONFIG)


BEYOND = {
    "surfaces": (0, "surfaces", (-1, 16, 2**40, -(2**63))),
    "surfaces of candidates": (1, "surfaces", (-1, 16, 2**40, -(2**63))),
    "ages": (1, "age_buckets", (-1, CONFIG.post_age_buckets, 2**40)),
}


@pytest.mark.parametrize("count", [1, FEW, FEW + 1])
@pytest.mark.parametrize("name", BEYOND)
def test_what_the_models_tables_lack_is_refused(name: str, count: int) -> None:
    part, column, values = BEYOND[name]
    for value in (*values, 15):
        asked = inputs(min(count, CONFIG.history_length), count)[part]
        getattr(asked, column)[-1] = value
        if value == 15:
            asked.check(CONFIG)  # the last row of all tables here
        else:
            with pytest.raises(ValueError, match="beyond the model"):
                asked.check(CONFIG)
    with pytest.raises(ValueError, match="beyond the model's history"):
        inputs(64, 5)[0].check(CONFIG)
    asked = inputs(0, count)[1]
    replace(asked, first_slot=2**31 - 1).check(CONFIG)
    for slot in (-1, 2**31):
        with pytest.raises(ValueError, match="beyond the model's slots"):
            replace(asked, first_slot=slot).check(CONFIG)


def test_rows_of_candidates_and_joined_scores_keep_their_columns() -> None:
    candidates, places = inputs(0, 5)[1], np.array([4, 0, 2])
    names = ("post_ids", "author_ids", "surfaces", "age_buckets")
    taken = candidates.rows(places)
    assert all(np.array_equal(getattr(taken, name), getattr(candidates, name)[places]) for name in names)
    scores = Scores(*np.random.default_rng(1).random((3, 5, 2), np.float32))
    joined = Scores.concatenate([scores.rows(slice(0, 3)), scores.rows(slice(3, 5))])
    assert all(
        np.array_equal(getattr(joined, name), getattr(scores, name))
        for name in ("logits", "probabilities", "continuous")
    )


@pytest.mark.parametrize(
    "change", [{"k": 0}, {"k": 2**40}, {"least": float("nan")}, {"filters": Filters(NONE, None, 2**63)}], ids=str
)
def test_a_query_that_no_body_could_ask_for_is_refused(change: dict[str, Any]) -> None:
    query = Query(inputs(3, 1)[0], 7, Filters(NONE))
    query.check(CONFIG)
    with pytest.raises(ValueError, match="out of range"):
        replace(query, **change).check(CONFIG)
    with pytest.raises(ValueError, match="beyond the model's history"):
        replace(query, context=inputs(64, 1)[0]).check(CONFIG)


@pytest.mark.parametrize(
    ("posts", "gone", "time", "topics"),
    [((1, 1), (), 0, 2), ((1,), (1,), 0, 1), ((0,), (), 0, 1), ((), (), 0, 0), ((1,), (), -1, 1), ((1,), (), 0, 0)],
)
def test_a_change_that_no_body_could_ask_for_is_refused(
    posts: tuple[int, ...], gone: tuple[int, ...], time: int, topics: int
) -> None:
    ids = np.array(posts, np.uint64)
    with pytest.raises(ValueError, match="change"):
        PostChange(np.array(gone, np.uint64), PostRows(ids, ids, np.full(len(ids), time), [None] * topics)).check()
    PostChange(NONE, PostRows(some := np.array([5, 6], np.uint64), some, some.view(np.int64), [None] * 2)).check()


def test_a_change_with_texts_for_only_some_of_its_posts_is_refused() -> None:
    new, gone = np.array([5, 6], np.uint64), np.array([7, 8], np.uint64)
    for texts, gone_texts in ((2, 2), (0, 0), (1, 2), (2, 1)):
        rows = PostRows(new, new, new.view(np.int64), [None] * 2, [("post", "author")] * texts)
        change = PostChange(gone, rows, ["post"] * gone_texts)
        if texts == gone_texts:
            change.check()
        else:
            with pytest.raises(ValueError, match="text ids for only some"):
                change.check()


def test_bytes_that_are_no_column_are_no_message() -> None:
    body = encode(METHODS["attention"].question(7, 1, *inputs(1, 1), 1.0))[4:]
    eight = b"author_ids\xc4\x08"
    assert body.count(eight) == 2
    from_front.decode(body)
    for wrong in (b"author_ids\xc4\x07", b"author_ids\xd9\x08", b"author_idz\xc4\x08"):
        with pytest.raises((msgspec.MsgspecError, ValueError)):
            from_front.decode(body.replace(eight, wrong))


@pytest.mark.parametrize(("count", "outputs"), [(1, 0), (7, 1), (65, 2)])
def test_results_arrive_as_the_same_bits(count: int, outputs: int) -> None:
    draw = np.random.default_rng(2)
    logits, probabilities = draw.random((2, count, ACTIONS), np.float32)
    scores = Scores(logits, probabilities, draw.random((count, outputs), np.float32), finite=True)
    ids, topics = np.arange(2**63, 2**63 + count, dtype=np.uint64), [None, *["art"] * (count - 1)]
    posts = Retrieved(
        ids, ids + np.uint64(1), logits[:, 0].copy(), ids.view(np.int64), topics, 8, 7, True, 6, 5, Mark(4, "ab", "1-2")
    )
    for name, result in {
        "rank": Ranked(scores, "hit", 0.1, 0.2),
        "retrieve": Found(posts, 0.1, 0.2, 0.3),
        "attention": draw.random((2, 1, count, 4), np.float32),
        "exposition": b"# HELP",
        "reload": None,
    }.items():
        sent = METHODS[name].answer(3, result)
        assert flat(from_engine.decode(encode(sent)[4:])) == flat(sent), name


def test_errors_arrive_as_what_they_are_or_the_nearest_known() -> None:
    class Odd(StorageFull):
        pass

    full, absent = Overloaded("full", retry_after_seconds=1.5), CheckpointNotFound("x")
    for error, kind in ((full, Overloaded), (Odd("disk"), StorageFull), (absent, CheckpointNotFound)):
        came = from_engine.decode(encode(wire.Failed.of(1, error))[4:]).error()
        assert type(came) is kind
        assert str(came) == str(error)
    assert getattr(wire.Failed.of(1, Overloaded(retry_after_seconds=1.5)).error(), "retry_after_seconds", None) == 1.5


def test_a_message_can_be_written_without_us() -> None:
    """Bytes by hand, as the page on the protocol describes them."""
    with pytest.raises(msgspec.ValidationError):
        from_front.decode(b"\x92\xa6cancek\x07")
    body = b"\x92\xa6cancel\x07"
    assert encode(from_front.decode(body)) == struct.pack("<I", len(body)) + body


@pytest.mark.parametrize("deadline", [0.0, -0.5, float("nan")])
@pytest.mark.parametrize("number", [0, -1])
def test_numbers_and_deadlines_are_not_negative(number: int, deadline: float) -> None:
    sent = encode(METHODS["attention"].question(number, 1, *inputs(1, 1), deadline))[4:]
    if (number, deadline) == (0, 0.0):
        assert from_front.decode(sent).id == 0
    else:
        with pytest.raises(msgspec.ValidationError, match=">= 0"):
            from_front.decode(sent)


def test_what_serves_arrives_as_it_was_sent() -> None:
    """And a state of which only the health is known offers nothing."""
    manifest, corpus = (
        kind.from_json((DEMO.with_name(name) / "manifest.json").read_bytes())
        for kind, name in ((Manifest, "demo-towers"), (CorpusManifest, "demo-posts"))
    )
    for served in (
        ServedRetrieval(manifest, corpus, 3, 2, {"a": 1}),
        ServedModel(manifest, EngineInfo("cpu", "float32", "native", "shared", {"a": 1})),
    ):
        came = from_engine.decode(encode(wire.Serve.of(7, served))[4:])
        assert (came.number, flat(came.served())) == (7, flat(served))
    unknown = wire.State(Health(False, False, False, False, "why"))
    assert (unknown.model, unknown.corpus, unknown.second, unknown.answers) == (0, 0, 0, False)
    assert (unknown.closed, unknown.retry_after_seconds) == ("", 0.0)


def test_a_message_that_is_too_long_is_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "MAX_BYTES", 100)
    with pytest.raises(ValueError, match="bytes"):
        encode(METHODS["attention"].question(7, 1, *inputs(9, 5), 1.0))
