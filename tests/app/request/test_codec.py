"""The codec: the same columns and bytes as the plain path, or none."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import chain, islice
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.errors import InvalidRequest, ServiceError
from app.http.rank import Parsed, Ranking
from app.request import codec, features
from app.request.body import decode
from app.request.codec import Codec, Packed, load_library
from app.request.reply import ReplyFormat, ranked, render
from app.request.validate import Request, check
from app.request.vocabulary import Vocabulary
from app.request.wires import OBJECTS
from app.settings import Limits, Settings
from app.telemetry.exchange import Exchange
from loadtest.fuzz import bodies
from loadtest.fuzz.bodies import in_arrays
from loadtest.fuzz.sources import corpus
from model.config import ModelConfig
from model.inputs import Scores
from tests.app.bounds import bounded
from tests.app.fakes import FakeEngine, loaded
from tests.app.odd_bodies import USER_IDS, mutated
from tests.app.request.sanitized_codec import told
from tests.app.serving import VOCABULARY, checked, good, served
from weights.format.manifest import Manifest

MANIFEST = loaded(FakeEngine()).checkpoint.manifest
LIMITS = Limits()
FORM = ReplyFormat.of(MANIFEST)

LIBRARY = load_library()
assert LIBRARY is not None
CODEC = Codec(LIBRARY, MANIFEST, VOCABULARY, LIMITS)
WRITTEN = replace(FORM, codec=CODEC)


def plain(raw: bytes, config: ModelConfig, words: Vocabulary = VOCABULARY) -> list[Any] | None:
    """What the plain path makes of a body, None where it refuses it."""
    try:
        request = check(decode(raw, LIMITS), words)
    except ServiceError:
        return None
    return told(request, features.context_of(request, config), features.candidates_of(request, config))


def compiled(raw: bytes, config: ModelConfig, made: Codec = CODEC) -> list[Any] | None:
    packed = made.read(raw)
    return None if packed is None else told(*packed.unpack(config))


def differing(
    raws: Iterable[bytes], made: Codec = CODEC, manifest: Manifest = MANIFEST, words: Vocabulary = VOCABULARY
) -> list[bytes]:
    """Bodies that the codec takes though the plain path refuses them, or reads otherwise."""
    read = ((raw, compiled(raw, manifest.config, made)) for raw in raws)
    return [raw for raw, found in read if found is not None and found != plain(raw, manifest.config, words)]


def problems(read: Callable[[], Any]) -> list[tuple[str, str]]:
    """What is wrong with a body."""
    with pytest.raises(ServiceError) as caught:
        read()
    assert isinstance(caught.value, InvalidRequest)
    return list(caught.value.problems)


@settings(max_examples=150, deadline=None)
@given(bodies.nearly_valid())
def test_nearly_valid_bodies_are_read_alike_or_declined(value: Any) -> None:
    assert differing([json.dumps(value).encode()]) == []


@pytest.mark.parametrize("count", [6000, pytest.param(5_000_000, marks=[pytest.mark.long, pytest.mark.timeout(1800)])])
def test_mutated_bodies_and_odd_ways_to_write_a_value_are_read_alike_or_declined(count: int) -> None:
    raw = json.dumps(good(user_id="@", weights=..., request_id=...)).encode()
    odd = (raw.replace(b'"@"', written) for written in USER_IDS)
    assert differing(chain(islice(mutated(2), count), odd)) == []


def test_most_good_bodies_are_taken() -> None:
    raws = [raw for raw in corpus(3) if plain(raw, MANIFEST.config) is not None]
    assert sum(CODEC.read(raw) is not None for raw in raws) > 0.9 * len(raws) > 20
    for body in (good(), good(history=in_arrays(good()["history"][:1] * 3)), good(history=..., reply="columns")):
        assert isinstance(CODEC.read(json.dumps(body, indent=2).encode()), Packed)


@pytest.mark.parametrize("rule", ["product_surfaces", "post_age_granularity_minutes", "history_length"])
def test_another_rule_would_be_noticed(rule: str) -> None:
    assert LIBRARY is not None
    other = replace(MANIFEST, config=replace(MANIFEST.config, **{rule: 20}))
    post = {"post_id": 1, "author_id": 1, "product_surface": 19}
    odd = good(), good(candidates=[post]), good(history=[good()["history"][0]] * 25)
    raws = [json.dumps(body).encode() for body in odd]
    assert differing(raws, Codec(LIBRARY, other, VOCABULARY, LIMITS))
    assert differing(raws) == []


VALUES = [
    b"1", b"0", b"0.0", b"-0", b"-1", b"1e0", b"1E+2", b"1.5e-3", b".5", b"5.", b"1e", b"1e999", b"1e-999", b"00", b"0x1", b"NaN",
    b"4503599627370497.5", b"9007199254740993", b"123456789012345678901", b"0.1000000000000000055511151231257827021181583404541015625",
    b"1e6", b"1000000.1", b"30.000001", b"1e300", b"true", b"null", b'"1"', b"[]", b"{}", b"1 ", b" 1", b"1\t\n", b"1\x00", b"1]",
]  # fmt: skip


@pytest.mark.parametrize("place", [
    b'"dwell_time": 12.5', b'"reply": 0.5', b'"product_surface": 3', b'"created_at": 1779990000', b'"impression_ts": 1780000000',
    b'"top_k": 3', b'"favorite": 1.0', b'"author_id": 5', b'"request_id": "page-7"',
])  # fmt: skip
def test_values_of_every_field(place: bytes) -> None:
    raw = json.dumps(good()).encode()
    assert place in raw
    name = place.partition(b":")[0]
    assert differing(raw.replace(place, b"%b:%b" % (name, value), 1) for value in VALUES) == []


def test_a_body_that_is_cut_anywhere_is_declined() -> None:
    raw = json.dumps(good()).encode()
    assert CODEC.read(raw) is not None
    assert [end for end in range(len(raw)) if CODEC.read(raw[:end]) is not None] == []
    assert CODEC.read(raw + b"]") is CODEC.read(raw + b"\x00") is CODEC.read(b"") is None
    assert CODEC.read(bytearray(raw)) is not None


def test_more_than_the_limits_is_declined() -> None:
    assert LIBRARY is not None
    raw = json.dumps(good()).encode()
    for name, most in (("max_candidates", 3), ("max_history", 3), ("max_values", sum(map(raw.count, b",[{\\")))):
        for limit, is_taken in ((most, True), (most - 1, False)):
            limits = bounded(LIMITS, max_values=limit) if name == "max_values" else Limits(**{name: limit})
            assert (Codec(LIBRARY, MANIFEST, VOCABULARY, limits).read(raw) is not None) == is_taken, name


def test_a_request_that_was_read_for_another_model_is_read_again() -> None:
    raw = json.dumps(good()).encode()
    with served() as (_, service):
        ranking = Ranking(service, Settings())
        other = replace(service.model, manifest=replace(MANIFEST, config=replace(MANIFEST.config, history_length=1)))
        vocabulary, form = ranking.words_of(other.manifest)
        packed = OBJECTS.decode(raw, {}, LIMITS, vocabulary)
        assert isinstance(packed, Packed)
        parsed = Parsed(packed, packed.candidates, packed.events, other, vocabulary, form)
        job = ranking.prepare(parsed, OBJECTS, None, Exchange("", 0.0, "POST", "/rank"))
        assert told(job.request, job.context, job.candidates) == plain(raw, MANIFEST.config)
        job.ticket.release()


# replies


def both(request: Request, scores: Scores) -> tuple[bytes, bytes]:
    tail = {"history_used": 1, "timings_ms": {"parse": 0.1}}
    return b"".join(render(request, scores, WRITTEN, **tail)), b"".join(render(request, scores, FORM, **tail))  # type: ignore[arg-type]


def asked(count: int, **changes: Any) -> Request:
    posts = [{"post_id": str(place) if place % 3 else place, "author_id": 1} for place in range(count)]
    return checked(good(candidates=posts, **({"top_k": ..., "actions_wanted": ..., "request_id": ...} | changes)))


def scored(numbers: Any, count: int) -> Scores:
    probabilities = np.resize(np.asarray(numbers, np.float32), (count, 3))
    return Scores(probabilities, probabilities, np.resize(probabilities[::-1], (count, 1)))


finite = st.integers(0, 2**32 - 1).map(lambda bits: np.uint32(bits).view(np.float32)).filter(np.isfinite)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.one_of(finite, st.floats(0, 1, width=32)), min_size=1, max_size=60),
    st.integers(1, 40),
    st.sampled_from(["objects", "columns"]),
    st.one_of(st.none(), st.integers(1, 50)),
    st.one_of(st.none(), st.lists(st.sampled_from(["report", "favorite", "reply"]), unique=True)),
)
def test_replies_are_the_same_bytes(
    numbers: list[float], count: int, form: str, top_k: int | None, wanted: list[str] | None
) -> None:
    changes = {name: value for name, value in (("top_k", top_k), ("actions_wanted", wanted)) if value is not None}
    with np.errstate(over="ignore"):  # of an output near the largest float32, times its scale
        ours, theirs = both(asked(count, reply=form, **changes), scored(numbers, count))
    assert ours == theirs


def test_numbers_are_written_as_orjson_does() -> None:
    random = np.random.default_rng(0)
    exponents = np.arange(255, dtype=np.uint32) << 23
    edges = [exponents + offset for offset in (0, 1, 2, 2**22, 2**23 - 1)]
    tens = [np.float32(10.0**power) for power in range(-45, 39)]
    near = [np.nextafter(np.array(tens, np.float32), np.float32(side)) for side in (0, 1e38)]
    drawn = random.integers(0, 0x7F800000, 90_000, dtype=np.uint32).view(np.float32)
    few = np.concatenate(edges).view(np.float32), tens, *near, drawn, random.random(9000, np.float32)
    numbers, request = np.concatenate(few), replace(asked(3), weights=np.array([1e-30, -3.0, 1.7]))
    for start in range(0, len(numbers), 12_000):
        part = numbers[start : start + 12_000]
        count = len(part) // 3
        posts = replace(request.candidates, post_ids=np.arange(count, dtype=np.uint64), sent=None)
        many = replace(request, candidates=posts)
        with np.errstate(over="ignore"):
            ours, theirs = both(many, scored(part, count))
        assert ours == theirs


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_every_float_is_written_as_orjson_does() -> None:
    """All 2^32 of them: four minutes."""
    assert LIBRARY is not None
    width, rows = 512, codec.MOST_ROWS
    wide = replace(MANIFEST, action_names=tuple(f"a{place}" for place in range(width)), score_weights={},
                   config=replace(MANIFEST.config, actions=width))  # fmt: skip
    made = Codec(LIBRARY, wide, Vocabulary.of(wide), LIMITS)
    request = replace(asked(1, reply="columns"), weights=np.zeros(width))
    posts = replace(request.candidates, post_ids=np.zeros(rows, np.uint64), sent=None)
    zeros = np.zeros((rows, 1), np.float32)
    for start in range(0, 2**32, width * rows):
        numbers = np.arange(start, start + width * rows, dtype=np.uint64).astype(np.uint32).view(np.float32)
        numbers[~np.isfinite(numbers)] = 0  # which are never written
        scores = Scores(zeros, numbers.reshape(rows, width), zeros)
        ours = made.write(replace(request, candidates=posts), replace(scores, logits=scores.probabilities), b"", b"")
        theirs = b'"probabilities":' + orjson.dumps(scores.probabilities, option=orjson.OPT_SERIALIZE_NUMPY)
        assert ours is not None
        assert ours.startswith(theirs, ours.index(b'"probabilities"')), hex(start)


@settings(max_examples=150, deadline=None)
@given(
    st.integers(1, 300),
    st.integers(0, 2**32 - 1),
    st.sampled_from([0, 1, 2, 3, 40]),
    st.sampled_from([0.0, 1.0, 1e9, 1e38]),
)
def test_ranks_are_the_same_bits(count: int, seed: int, distinct: int, outlier: float) -> None:
    """Many that are equal, all that are, one far from the others, zeros of either sign, sums of no finite range."""
    random = np.random.default_rng(seed)
    rows = random.random((count, 3), np.float32)
    rows = np.resize(rows[:distinct], (count, 3)) if distinct else rows
    rows[random.integers(0, count, count // 4)] *= random.choice([0, -0.0, -1, 1e-30])
    rows[random.integers(0, count), 0] += np.float32(outlier)
    weights = random.choice([0.0, -1.0, 1.0, 1e9, 1e-30], 3)
    request, scores = replace(asked(1), weights=weights), Scores(rows, rows, rows[:, :1])
    for ours, theirs in zip(ranked(scores, request, WRITTEN), ranked(scores, request, FORM), strict=True):
        assert ours.dtype == theirs.dtype
        assert ours.tobytes() == theirs.tobytes()


def test_what_cannot_be_ranked_is_declined() -> None:
    request = replace(asked(1), weights=np.ones(3))
    assert CODEC.rank(scored([1], 3), request) is not None
    assert CODEC.rank(scored([1], 0), request) is None
    assert CODEC.rank(replace(scored([1], 3), probabilities=np.ones((3, 2), np.float32)), request) is None
    for count in (2, 5):
        assert CODEC.rank(scored([1], 3), replace(request, weights=np.ones(count))) is None
    assert CODEC.rank(scored([1], 3), replace(request, weights=np.ones(3) * np.inf)) is None
    assert CODEC.rank(scored([1], codec.MOST_ROWS + 1), request) is None


def test_arrays_that_do_not_fit_are_declined() -> None:
    request, scores = asked(3), scored([0.5], 3)
    for wrong in (
        replace(scores, probabilities=scores.probabilities.astype(np.float64)),
        replace(scores, probabilities=scores.probabilities[:, :2]),
        replace(scores, probabilities=np.asfortranarray(np.random.rand(3, 3).astype(np.float32))),
        replace(scores, continuous=np.zeros((3, 2), np.float32)),
    ):
        assert CODEC.write(request, wrong, b"", b"") is None
    assert CODEC.write(request, scores, b"<", b">") is not None
    assert CODEC.write(request, scored([0.5], codec.MOST_ROWS + 1), b"", b"") is None
    assert CODEC.write(replace(request, wanted=[0, 2]), scores, b"", b"") is not None
    for wanted in ([3], [-1], [2**62], [0, 1, 2, 0]):
        assert CODEC.write(replace(request, wanted=wanted), scores, b"", b"") is None
    for count in (-1, 2**40, 2**62, 2**70, -(2**70)):
        assert CODEC._rank(count, b"", b"", np.ones(3), b"") == b""


def test_without_a_compiler_everything_goes_the_plain_way(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    load_library.cache_clear()
    try:
        assert load_library() is None
    finally:
        monkeypatch.undo()
        load_library.cache_clear()
    assert orjson.loads(both(asked(2), scored([0.25], 2))[1])["candidates"][0]["rank"] == 1
