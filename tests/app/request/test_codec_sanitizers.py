"""The codec under the address and undefined-behaviour sanitizers, on bodies that were good once and on replies of odd numbers."""

from __future__ import annotations

import itertools
import json
import pickle
import shutil
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from app.request import codec
from app.request.codec import Codec
from tests.app.odd_bodies import mutated
from tests.app.serving import good
from tests.sanitized import AS_IT_IS, Plant, run_sanitized

SOURCE = Path(codec.__file__).parent / "native/codec.cpp"
pytest.importorskip("torch", reason="what the codec is compared with needs torch")
import tests.app.request.test_codec as ids  # noqa: E402
import tests.app.request.test_retrieval as posts  # noqa: E402
import tests.app.request.test_text_ids as texts  # noqa: E402
from tests.app.request.sanitized_codec import CASES, Cases  # noqa: E402

MODULE = "tests.app.request.sanitized_codec"
MUTATED = 1000
NO_END = "a member whose value has no end is read on"
PLANT = Plant("reader.h", "at >= end || depth < 0", "depth < 0", ") throw Declined();")

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++ here")


def read(raws: Iterable[bytes], made: Codec, plain: Callable[[bytes], Any]) -> list[tuple[bytes, list[Any]]]:
    """Each body with what the plain path makes of it, nothing where the codec leaves it to that."""
    return [(raw, [] if made.read(raw) is None else plain(raw) or []) for raw in raws]


def written(asked: Any, scores: Any, form: Any, **tail: Any) -> tuple[tuple[Any, ...], dict[str, Any], bytes]:
    """A reply, with the bytes of the plain path."""
    tail = {"history_used": 0, "timings_ms": {}} | tail
    return (asked, scores), tail, b"".join(ids.render(asked, scores, form, **tail))


@np.errstate(over="ignore")  # of an output near the largest float32, times its scale
def cases() -> list[Cases]:
    """Of integer ids, of texts, and of requests for posts, whose longer window is six."""
    raw, replies = json.dumps(good()).encode(), []
    for count, form in ((1, "objects"), (7, "columns"), (300, "objects")):
        numbers = np.random.default_rng(count).integers(0, 0x7F800000, 3 * count, dtype=np.uint32).view(np.float32)
        weights = np.array([1e-30, -3.0, 1.7, *[0.004] * (count == 7)])
        asked = replace(ids.asked(count, reply=form), weights=weights, has_offset=count == 7)
        replies.append(written(asked, ids.scored(numbers, count), ids.FORM))
    bodies = [*(raw[:end] for end in range(len(raw))), *islice(mutated(5), MUTATED)]
    plain = read(bodies, ids.CODEC, lambda raw: ids.plain(raw, ids.MANIFEST.config))
    found = [Cases(ids.MANIFEST, ids.LIMITS, plain, replies, [])]

    bodies = [raw[:end] for raw in texts.GOOD_ONES for end in range(0, len(raw) + 1, 5)]
    spoken = read([*bodies, *islice(mutated(6, texts.GOOD_ONES), MUTATED)], texts.CODEC, texts.plain)
    replies = [
        written(texts.asked(["é", '"', ",", "a" * 128], reply=form), texts.scored(4), texts.FORM)
        for form in ("objects", "columns")
    ]
    found.append(Cases(texts.MANIFEST, texts.LIMITS, spoken, replies, []))

    models, replies = posts.compiled_models(), []
    for count, wish in itertools.product((1, 7, 300), posts.WISHED):
        asked, scores, tail = posts.ranking(np.random.default_rng(count).random((count, 3), np.float32), wish)
        replies.append(written(asked, scores, ids.FORM, **tail))
    for_posts = [(raw, posts.plain_told(raw, models), posts.plain_told(raw, models[:1])) for raw in posts.sent(100)]
    manifest = replace(posts.MANIFEST, config=models[1].config)
    return [*found, Cases(manifest, posts.LIMITS, [], replies, for_posts)]


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, str]]:
    """The exit code of all cases with what is planted, and what they printed."""
    directory = tmp_path_factory.mktemp("sanitized")
    (directory / CASES).write_bytes(pickle.dumps(cases()))
    return run_sanitized(directory, SOURCE, MODULE, "address,undefined", {NO_END: PLANT})


def test_the_sanitizers_have_nothing_to_say(ended: dict[str, tuple[int, str]]) -> None:
    assert ended[AS_IT_IS] == (0, "0 differ\n")


def test_a_read_beyond_the_end_is_seen(ended: dict[str, tuple[int, str]]) -> None:
    code, told = ended[NO_END]
    assert code != 0
    assert "buffer-overflow" in told
    assert "Reader::keep" in told
