"""Frames are what docs/fronts.md says, byte for byte, and give back the same bits."""

from __future__ import annotations

import struct
from dataclasses import replace

import msgspec
import numpy as np
import pytest

from app.fronts import frames
from app.fronts.frames import (
    Answer,
    Rank,
    columns_of,
    encode,
    from_engine,
    from_front,
    inputs_of,
    scores_bytes,
    scores_of,
)
from loadtest.soak import fake_engine
from model.inputs import Candidates, Context, Scores

ACTIONS = 3
CONFIG = replace(fake_engine.CONFIG, history_length=63)


def inputs(history: int, candidates: int, seed: int = 1) -> tuple[Context, Candidates]:
    draw = np.random.default_rng(seed)

    def ids(count: int) -> np.ndarray:
        return draw.integers(0, 2**64, count, np.uint64)

    def words(count: int, rows: int = CONFIG.product_surfaces) -> np.ndarray:
        return draw.integers(0, rows, count, np.int64)

    context = Context(
        int(ids(1)[0]), ids(history), ids(history), draw.random((history, ACTIONS), np.float32), words(history),
        draw.random(history, np.float32),
    )  # fmt: skip
    return context, Candidates(
        ids(candidates), ids(candidates), words(candidates), words(candidates, CONFIG.post_age_buckets)
    )


def rank(context: Context, candidates: Candidates) -> Rank:
    return Rank(7, 1, 12.5, "feed", context.user_id, len(context), len(candidates), *columns_of(context, candidates))


@pytest.mark.parametrize(("history", "count"), [(0, 1), (1, 1), (17, 7), (63, 65)])
def test_a_request_arrives_as_it_was_sent(history: int, count: int) -> None:
    context, candidates = inputs(history, count)
    frame = from_front.decode(encode(rank(context, candidates))[4:])
    assert isinstance(frame, Rank)
    assert (frame.id, frame.model, frame.deadline, frame.key) == (7, 1, 12.5, "feed")
    found, posts = inputs_of(frame, CONFIG)
    assert found.user_id == context.user_id
    for name in ("post_ids", "author_ids", "actions", "surfaces", "dwell_seconds"):
        sent, came = getattr(context, name), getattr(found, name)
        assert (came.dtype, came.shape, came.tobytes()) == (sent.dtype, sent.shape, sent.tobytes()), name
        assert came.flags.aligned
    for name in ("post_ids", "author_ids", "surfaces", "age_buckets"):
        sent, came = getattr(candidates, name), getattr(posts, name)
        assert (came.dtype, came.tobytes()) == (sent.dtype, sent.tobytes()), name


@pytest.mark.parametrize("change", [{"history": 3}, {"candidates": 6}, {"candidates": 2**40}, {"floats": b""}])
def test_columns_of_another_length_are_refused(change: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="length"):
        inputs_of(msgspec.structs.replace(rank(*inputs(2, 5)), **change), CONFIG)


BEYOND = {
    "surfaces": (0, "surfaces", (-1, 16, 2**40, -(2**63))),
    "surfaces of candidates": (1, "surfaces", (-1, 16, 2**40, -(2**63))),
    "ages": (1, "age_buckets", (-1, CONFIG.post_age_buckets, 2**40)),
}


@pytest.mark.parametrize("name", BEYOND)
def test_what_the_models_tables_lack_is_refused(name: str) -> None:
    part, column, values = BEYOND[name]
    for value in (*values, 15):
        asked = inputs(3, 5)
        getattr(asked[part], column)[-1] = value
        if value == 15:
            inputs_of(rank(*asked), CONFIG)  # the last row of all tables here
        else:
            with pytest.raises(ValueError, match="beyond the model"):
                inputs_of(rank(*asked), CONFIG)
    with pytest.raises(ValueError, match="beyond the model's history"):
        inputs_of(rank(*inputs(64, 5)), CONFIG)


@pytest.mark.parametrize(
    "change",
    [
        {"history": -1}, {"history": 2**31}, {"candidates": 0}, {"candidates": -3}, {"first_slot": -1}, {"first_slot": 2**40},
        {"user_id": -1}, {"deadline": -1.0}, {"deadline": float("nan")},
    ],
    ids=str,
)  # fmt: skip
def test_a_number_that_no_front_sends_is_no_frame(change: dict[str, object]) -> None:
    sent = encode(msgspec.structs.replace(rank(*inputs(2, 5)), **change))
    with pytest.raises(msgspec.ValidationError):
        from_front.decode(sent[4:])


@pytest.mark.parametrize(("count", "outputs"), [(1, 0), (7, 1), (65, 2)])
def test_scores_arrive_as_the_same_bits(count: int, outputs: int) -> None:
    draw = np.random.default_rng(2)
    logits, probabilities = draw.random((2, count, ACTIONS), np.float32)
    scores = Scores(logits, probabilities, draw.random((count, outputs), np.float32), finite=True)
    frame = from_engine.decode(encode(Answer(1, "hit", 0.1, 0.2, True, scores_bytes(scores)))[4:])
    assert isinstance(frame, Answer)
    found = scores_of(frame, count, ACTIONS)
    assert found.finite
    for name in ("logits", "probabilities", "continuous"):
        sent, came = getattr(scores, name), getattr(found, name)
        assert (came.shape, came.tobytes()) == (sent.shape, sent.tobytes())


def test_scores_of_fewer_candidates_are_refused() -> None:
    frame = Answer(1, "hit", 0.0, 0.0, True, b"\0" * 4 * (2 * ACTIONS + 1))
    with pytest.raises(ValueError, match="reshape"):
        scores_of(frame, 2, ACTIONS)


def test_a_frame_can_be_written_without_us() -> None:
    """The bytes of a request by hand, as the page on the protocol describes them."""
    words = struct.pack("<7Q", 11, 12, 13, 21, 22, 23, 24)  # one history item, one candidate
    floats = struct.pack("<4f", 1.0, 0.0, 0.5, 2.5)
    body = b"\x9e\x01\x05\x02\xcb" + struct.pack(">d", 99.5) + b"\xc0\xcf" + struct.pack(">Q", 2**63)
    body += (
        b"\x01\x01\xc4" + bytes([len(words)]) + words + b"\xc4" + bytes([len(floats)]) + floats + b"\xc2\xc2\xc3\x00"
    )
    frame = from_front.decode(body)
    assert encode(frame) == struct.pack("<I", len(body)) + body
    context, candidates = inputs_of(frame, replace(CONFIG, product_surfaces=32))
    assert (frame.id, frame.model, frame.deadline, frame.key, context.user_id) == (5, 2, 99.5, None, 2**63)
    assert [column.tolist() for column in (context.post_ids, context.author_ids, context.surfaces)] == [
        [11],
        [12],
        [13],
    ]
    assert context.actions.tolist() == [[1.0, 0.0, 0.5]]
    assert context.dwell_seconds.tolist() == [2.5]
    assert candidates.age_buckets.tolist() == [24]


def test_a_frame_that_is_too_long_is_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames, "MAX_BYTES", 100)
    with pytest.raises(ValueError, match="bytes"):
        encode(rank(*inputs(2, 5)))
