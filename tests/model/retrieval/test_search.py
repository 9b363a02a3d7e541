"""The fast searches against the definition: the same rows and the same bits, for any corpus, mask, k, batch and thread count."""

from __future__ import annotations

import ctypes
import faulthandler
import mmap
import os
import signal
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from model.engine import EngineError
from model.native.search import NativeIndex
from model.retrieval.corpus import ROWS_PER_STEP, worst_norm
from model.retrieval.search import BLOCK_ROWS, Hits, Index, TorchIndex, Wish, bits_of
from model.tolerances import RETRIEVAL
from tests import retrieval_goldens as goldens
from tests.goldens import GOLDEN

Rows = NDArray[np.float32]
ROWS = np.ones((6, 4), np.float32)


def unit(rows: NDArray[Any]) -> Rows:
    """The rows at unit length."""
    scaled: Rows = np.ascontiguousarray(rows / np.linalg.norm(rows, axis=-1, keepdims=True), np.float32)
    return scaled


def isotropic(rng: np.random.Generator, count: int, width: int) -> Rows:
    """Unit vectors with uniformly random directions."""
    return unit(rng.standard_normal((count, width), np.float32))


@pytest.mark.parametrize(
    "vectors",
    [ROWS.astype(np.float64), np.asfortranarray(ROWS), ROWS[0], ROWS[:0]],
    ids=["float64", "F", "1-D", "none"],
)
def test_vectors_that_the_kernel_would_misread_are_refused(vectors: Any) -> None:
    with pytest.raises(ValueError, match="C-ordered float32"):
        NativeIndex(vectors, threads=1)


@pytest.mark.parametrize("beyond", [0, 1])
def test_nothing_beyond_the_last_row_is_read(beyond: int) -> None:
    """It would end the process: nobody may read the page behind the rows. The control has one row more than there is."""
    pages, count = mmap.mmap(-1, 2 * mmap.PAGESIZE), 7
    place = ctypes.addressof(ctypes.c_char.from_buffer(pages, mmap.PAGESIZE))
    rows = np.frombuffer(pages, np.float32, count * 20, mmap.PAGESIZE - 4 * count * 20).reshape(count, 20)
    rows[:] = unit(np.random.default_rng(5).standard_normal(rows.shape, np.float32))
    if not (child := os.fork()):
        try:
            faulthandler.disable()
            assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(place), mmap.PAGESIZE, 0) == 0
            asked = np.lib.stride_tricks.as_strided(rows, (count + beyond, 20))
            found = NativeIndex(asked, threads=1).search([Wish(rows[2].copy(), 3)])
            os._exit(int(found[0].rows[0] != 2))
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGSEGV * beyond


def test_queries_that_are_copied_live_as_long_as_the_search() -> None:
    """The kernel reads them by address: one that was freed is overwritten by the next."""
    rng = np.random.default_rng(5)
    index = NativeIndex(unit(rng.standard_normal((300, 16), np.float32)), threads=1)
    queries = unit(rng.standard_normal((8, 16), np.float32))
    plain = index.search([Wish(query, 5) for query in queries])
    copied = index.search([Wish(np.repeat(query, 2)[::2], 5) for query in queries])
    assert [found.rows.tolist() for found in copied] == [found.rows.tolist() for found in plain]
    assert len({tuple(found.rows.tolist()) for found in plain}) > 1
    index.close()


@pytest.mark.parametrize("row", [ROWS_PER_STEP - 1, ROWS_PER_STEP])
def test_the_row_whose_length_is_farthest_from_1_is_found(row: int) -> None:
    """A row that is too long follows, in the next step or in the same one."""
    rows = isotropic(np.random.default_rng(1), 2 * ROWS_PER_STEP + 2, 8)
    rows[[2, ROWS_PER_STEP + 3]] = 0
    assert worst_norm(rows)[1] == pytest.approx(1)
    rows[ROWS_PER_STEP + 1] *= 1.1
    rows[row] *= 0.8
    assert worst_norm(rows) == (row, pytest.approx(0.8, rel=1e-6))
    rows[row, 1] = np.nan
    assert worst_norm(rows)[0] == row


def clustered(rng: np.random.Generator, count: int, width: int) -> Rows:
    """A hundred rows around each of many centres."""
    centres = rng.standard_normal((max(1, count // 100), width), np.float32)
    return unit(centres[rng.integers(0, len(centres), count)] + 0.3 * rng.standard_normal((count, width), np.float32))


def crowded(rng: np.random.Generator, count: int, width: int) -> Rows:
    """As the published corpus: all rows around one direction, the best scores close together near 0.9."""
    return unit(rng.standard_normal(width) + 0.4 * rng.standard_normal((count, width), np.float32))


def with_duplicates(rng: np.random.Generator, count: int, width: int) -> Rows:
    rows = isotropic(rng, count, width)
    return rows[rng.integers(0, max(1, count // 5), count)]


def odd(rng: np.random.Generator, count: int, width: int) -> Rows:
    """Zeros of both signs, axes, tiny and huge numbers: exact ties, and rows that 8 bits hold badly."""
    rows = isotropic(rng, count, width)
    rows[:: max(1, count // 7)] = 0.0
    rows[1 :: max(2, count // 7)] = -0.0
    rows[2 :: max(3, count // 11)] = np.eye(width, dtype=np.float32)[0]
    rows[3 :: max(4, count // 13), 1:] *= np.float32(1e-20)
    rows[4 :: max(5, count // 13)] *= np.float32(1e6)
    return rows


CORPORA: list[Callable[[np.random.Generator, int, int], Rows]] = [isotropic, clustered, crowded, with_duplicates, odd]


def same(ours: Hits, theirs: Hits) -> bool:
    """Rows, bits and what could be seen."""
    return (
        ours.rows.tolist() == theirs.rows.tolist()
        and ours.scores.tobytes() == theirs.scores.tobytes()
        and ours.visible == theirs.visible
    )


def wishes_for(rng: np.random.Generator, corpus: Rows, count: int) -> list[Wish]:
    """Queries near rows and far from them, some with a mask, some with a least score, a k of any size."""
    wishes = []
    for _ in range(count):
        near = corpus[rng.integers(0, len(corpus))] + 0.2 * rng.standard_normal(corpus.shape[1])
        query = (near / max(float(np.linalg.norm(near)), 1e-9)).astype(np.float32)
        visible = bits_of(rng.random(len(corpus)) < rng.choice([0.0, 0.02, 0.5, 1.0])) if rng.random() < 0.6 else None
        least = float(rng.choice([-np.inf, -0.1, 0.3]))
        wishes.append(Wish(query, int(rng.choice([1, 2, 7, 50, 200, 5000])), visible, least))
    return wishes


@pytest.mark.parametrize("corpus", CORPORA)
@settings(max_examples=15, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    count=st.sampled_from([1, 2, 63, 64, 65, 100, 1003, 5011]),
    width=st.sampled_from([1, 15, 16, 17, 48, 50, 128, 130]),
)
def test_every_search_is_the_definition(corpus: Any, seed: int, count: int, width: int) -> None:
    rng = np.random.default_rng(seed)
    vectors = corpus(rng, count, width)
    wishes = wishes_for(rng, vectors, 7)
    expected = TorchIndex(vectors, exhaustive=True).search(wishes)
    native = NativeIndex(vectors, threads=2)
    for index in (native, TorchIndex(vectors)):
        assert all(map(same, index.search(wishes), expected))
    assert all(same(native.search([wish])[0], whole) for wish, whole in zip(wishes, expected, strict=True)), "alone"


def test_few_rows_are_scored_in_full() -> None:
    rng = np.random.default_rng(3)
    vectors = crowded(rng, 20_000, 128)
    wishes = [Wish(vectors[place], 200) for place in (1, 2, 3)]
    expected = TorchIndex(vectors, exhaustive=True).search(wishes)
    assert [wish.scored for wish in expected] == [20_000] * 3
    for make in (NativeIndex, TorchIndex):
        found = make(vectors).search(wishes)
        assert all(map(same, found, expected))
        assert max(wish.scored for wish in found) < 5_000


def aligned(width: int = 128) -> tuple[Rows, Rows]:
    """Rows whose rounding errors all point along the query, as far as the bound allows, and the query.

    The first rows look better in 8 bits and are worse; the last ones look worse, and are the best.
    """
    sign = np.where(np.arange(width) % 3 == 0, 1.0, -1.0)
    looks_good = np.random.default_rng(0).integers(-90, 90, (300, width)) * 1.0
    looks_good[:, 0] = 127  # so that the scale is 1
    looks_good[:, 1:] -= np.round((looks_good[:, 1:] @ sign[1:])[:, None] / (width - 1)) * sign[1:]
    looks_good[:, 1] -= (looks_good[:, 1:] @ sign[1:]) * sign[1]
    looks_bad = looks_good[:30].copy()
    looks_bad[:, 2:120] -= sign[2:120]  # less by 118, of which 2 × 0.49 × 127 are rounding
    error = 0.49 * sign
    error[0] = 0
    return np.concatenate([looks_good - error, looks_bad + error]).astype(np.float32), (sign / np.sqrt(width)).astype(
        np.float32
    )


def test_rounding_as_bad_as_the_bound_allows_misses_no_row() -> None:
    """With nine tenths of the bound it would."""
    vectors, query = aligned()
    expected = TorchIndex(vectors, exhaustive=True).search([Wish(query, 30)])[0]
    assert set(expected.rows.tolist()) == set(range(300, 330))
    assert same(NativeIndex(vectors).search([Wish(query, 30)])[0], expected)
    careless = NativeIndex(vectors, defines=["RANKER_BOUND_SHARE=0.9f"])
    assert not same(careless.search([Wish(query, 30)])[0], expected)


def test_rows_and_a_query_without_rounding_errors_miss_no_row() -> None:
    """Whole numbers of two scales: bounds are so narrow that a wrong offset of one scale's rows would drop the best of them."""
    rng = np.random.default_rng(4)
    vectors = rng.integers(-127, 128, (3000, 64)).astype(np.float32)
    vectors[:, 0] = 127
    vectors[::20] *= 2
    wish = Wish(np.ones(64, np.float32), 50)
    expected = TorchIndex(vectors, exhaustive=True).search([wish])[0]
    assert 10 < sum(row % 20 == 0 for row in expected.rows) < 50, "the best are of both scales"
    found = NativeIndex(vectors).search([wish])[0]
    assert same(found, expected)
    assert found.scored < 60


def test_what_the_score_itself_rounds_is_within_the_bound() -> None:
    """Two rows of whole numbers, exact in 8 bits: the second is better, the first has the better score, since 33 added to a sum of
    2^29 counts as 64, and 66 does too. That is 128 roundings of both norms' product; the bound allows for 1 040."""
    large, small = np.full(262, 127), np.ones(249)
    rows = np.stack([np.concatenate([large, small, [2]]), np.concatenate([large, 2 * small, [1]])])
    query = np.concatenate([np.full(262, 16256), np.full(249, 33), [4096]])
    assert rows[0] @ query < rows[1] @ query
    vectors, wish = np.repeat(rows, 16, 1).astype(np.float32), Wish(np.repeat(query, 16).astype(np.float32), 1)
    found, expected = (make(vectors).search([wish])[0] for make in (NativeIndex, TorchIndex))
    assert expected.rows.tolist() == [0]
    assert same(found, expected)


@pytest.mark.parametrize("make", [NativeIndex, TorchIndex])
def test_equal_scores_go_by_row(make: Callable[[Rows], Index]) -> None:
    rows = np.repeat(np.eye(3, 16, dtype=np.float32), 40, axis=0)[np.random.default_rng(1).permutation(120)]
    found = make(rows).search([Wish(np.eye(1, 16, dtype=np.float32)[0], 50)])[0]
    ones, others = np.flatnonzero(rows[:, 0]), np.flatnonzero(rows[:, 0] == 0)
    assert found.rows.tolist() == [*ones, *others[:10]]
    assert not np.signbit(found.scores).any()


@pytest.mark.parametrize("make", [NativeIndex, TorchIndex])
def test_a_score_depends_on_neither_row_nor_corpus(make: Callable[[Rows], Index]) -> None:
    rng = np.random.default_rng(2)
    vectors, query = isotropic(rng, 1003, 128), isotropic(rng, 1, 128)[0]
    whole = make(vectors).search([Wish(query, 1003)])[0]
    bits = {row: score.tobytes() for row, score in zip(whole.rows.tolist(), whole.scores, strict=True)}
    order = rng.permutation(1003)[:517]
    moved = make(np.ascontiguousarray(vectors[order])).search([Wish(query, 517)])[0]
    assert all(score.tobytes() == bits[order[row]] for row, score in zip(moved.rows, moved.scores, strict=True))


@pytest.mark.usefixtures("before_avx2")
def test_without_wide_vectors_it_is_the_same() -> None:
    """The plain code that other processors run, down to the bits."""
    rng = np.random.default_rng(6)
    vectors = odd(rng, 3001, 50)
    wishes = wishes_for(rng, vectors, 9)
    assert all(map(same, NativeIndex(vectors).search(wishes), TorchIndex(vectors, exhaustive=True).search(wishes)))


@pytest.mark.parametrize("name", goldens.NAMES)
@pytest.mark.parametrize("make", [NativeIndex, TorchIndex])
def test_the_published_top_k(make: Callable[[Rows], Index], name: str) -> None:
    """Recorded users and rows, with and without the recorded mask."""
    expected = goldens.arrays(GOLDEN / name / "expected.npz")
    index = make(goldens.arrays(GOLDEN / name / "corpus.npz")["candidate_representations"])
    for request in range(goldens.REQUESTS):
        for what, visible in (("top_k", None), ("masked", bits_of(expected["corpus/mask"]))):
            rows, scores = (expected[f"{request}/{what}_{part}_fp32"] for part in ("indices", "scores"))
            found = index.search([Wish(expected[f"{request}/user_repr_fp32"], len(rows), visible)])[0]
            np.testing.assert_allclose(found.scores, scores, atol=RETRIEVAL[torch.float32].scores, rtol=0)
            moved = scores[found.rows != rows]
            assert all(np.sort(np.abs(scores - score))[1] < 2e-6 for score in moved), "only near ties change places"


@pytest.mark.parametrize("make", [NativeIndex, TorchIndex])
@pytest.mark.parametrize(
    "changes",
    [{"query": np.full(16, np.nan, np.float32)}, {"query": np.zeros(15, np.float32)}, {"k": 0}, {"least": float("nan")},
     {"visible": np.zeros(1, np.uint64)}, {"visible": np.zeros(2, np.int64)}],
)  # fmt: skip
def test_a_wish_that_does_not_fit_is_refused(make: Callable[[Rows], Index], changes: dict[str, Any]) -> None:
    index = make(isotropic(np.random.default_rng(0), 100, 16))
    sound: dict[str, Any] = {"query": np.zeros(16, np.float32), "k": 3, "visible": np.zeros(2, np.uint64)}
    assert len(index.search([Wish(**sound)])[0].rows) == 0
    with pytest.raises(ValueError, match=r"a wish needs|visible must be"):
        index.search([Wish(**(sound | changes))])


def test_a_device_lost_in_a_search_needs_a_new_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(*given: Any) -> Any:
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    index = TorchIndex(ROWS)
    monkeypatch.setattr(torch, "cat", lost)  # joins the products of the blocks
    with pytest.raises(EngineError, match="the device failed: CUDA error") as raised:
        index.search([Wish(ROWS[0], 2)])
    assert raised.value.sticky


def test_an_index_takes_less_than_its_vectors_while_it_is_made() -> None:
    vectors = np.ones((3 * BLOCK_ROWS, 16), np.float32)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        TorchIndex(vectors)
    taken = [event.self_cpu_memory_usage for event in profile.events() or ()]
    assert 0 < max(taken) < vectors.nbytes


def test_blocks_of_rows_are_one_search() -> None:
    rng = np.random.default_rng(97)
    vectors = with_duplicates(rng, 2 * BLOCK_ROWS + 97, 16)
    wishes = wishes_for(rng, vectors, 9)
    expected = TorchIndex(vectors, exhaustive=True).search(wishes)
    index = TorchIndex(vectors)
    assert all(map(same, index.search(wishes), expected))
    assert all(same(index.search([wish])[0], one) for wish, one in zip(wishes, expected, strict=True))
    assert index.search([]) == []
