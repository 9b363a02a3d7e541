"""The codec under the address and undefined-behaviour sanitizers, on bodies that were good once and on replies of odd numbers."""

from __future__ import annotations

import itertools
import json
import shutil
import sys
from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from app.request import codec
from app.request.codec import Codec, open_library
from tests.app.odd_bodies import mutated
from tests.app.serving import VOCABULARY, good
from tests.sanitized import run_sanitized

SOURCE = Path(codec.__file__).parent / "native/codec.cpp"
pytest.importorskip("torch", reason="what the codec is compared with needs torch")
import tests.app.request.test_retrieval as posts  # noqa: E402
import tests.app.request.test_text_ids as texts  # noqa: E402
from tests.app.request.test_codec import FORM, LIMITS, MANIFEST, asked, differing, render, scored  # noqa: E402

MODULE = "tests.app.request.test_codec_sanitizers"
MUTATED = 1000

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++ here")


def read_and_write(library: Path) -> int:
    """Bodies that are read otherwise than by the plain path, and replies of other bytes than its own."""
    made = Codec(open_library(library), MANIFEST, VOCABULARY, LIMITS)
    raw = json.dumps(good()).encode()
    different = len(differing([raw[:end] for end in range(len(raw))] + list(islice(mutated(5), MUTATED)), made))
    for count, form in ((1, "objects"), (7, "columns"), (300, "objects")):
        numbers = np.random.default_rng(count).integers(0, 0x7F800000, 3 * count, dtype=np.uint32).view(np.float32)
        weights = np.array([1e-30, -3.0, 1.7, *[0.004] * (count == 7)])
        request = replace(asked(count, reply=form), weights=weights, has_offset=count == 7)
        forms, scores = (replace(FORM, codec=made), FORM), scored(numbers, count)
        ours, theirs = (b"".join(render(request, scores, use, history_used=0, timings_ms={})) for use in forms)
        different += ours != theirs
    spoken = Codec(open_library(library), texts.MANIFEST, texts.WORDS, LIMITS)
    bodies = [raw[:end] for raw in texts.GOOD_ONES for end in range(0, len(raw) + 1, 5)]
    different += len(texts.differing([*bodies, *islice(mutated(6, texts.GOOD_ONES), MUTATED)], spoken))
    for form in ("objects", "columns"):
        request, scores = texts.asked(["é", '"', ",", "a" * 128], reply=form), texts.scored(4)
        forms = replace(texts.FORM, codec=spoken), texts.FORM
        ours, theirs = (b"".join(render(request, scores, use, history_used=0, timings_ms={})) for use in forms)
        different += ours != theirs
    for count, wish in itertools.product((1, 7, 300), posts.WISHED):
        numbers = np.random.default_rng(count).random((count, 3), np.float32)
        ours, theirs = posts.replies(open_library(library), numbers, wish)
        different += ours != theirs
    return different + len(posts.differing(posts.sent(100), posts.compiled_models(open_library(library)))[0])


def test_the_sanitizers_have_nothing_to_say(tmp_path: Path) -> None:
    done = run_sanitized(tmp_path, SOURCE, MODULE, "address,undefined")
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    assert done.stdout == "0 differ\n"
    assert "Sanitizer" not in done.stderr
    assert "runtime error" not in done.stderr


def test_a_read_beyond_the_end_is_seen(tmp_path: Path) -> None:
    """A member whose value has no end."""
    plant = ("reader.h", "if (at >= end || depth < 0) throw Declined();", "if (depth < 0) throw Declined();")
    done = run_sanitized(tmp_path, SOURCE, MODULE, "address", plant)
    assert done.returncode != 0
    assert "buffer-overflow" in done.stderr
    assert "Reader::keep" in done.stderr


if __name__ == "__main__":
    print(f"{read_and_write(Path(sys.argv[1]))} differ")
