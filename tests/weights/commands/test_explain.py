"""`python -m weights explain`: files, the page that needs no other, and refusals."""

from __future__ import annotations

import json
import re
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from model.batch import collate
from model.inputs import Context
from tests import goldens
from tests.weights.call import call
from weights.actions import default_score_weights
from weights.checkpoint import load_checkpoint, load_encoder, load_manifest
from weights.corpus.store import load_corpus
from weights.explain.figures import figures_of
from weights.explain.request import read_request

ROOT = Path(__file__).parents[3]
DEMO = ROOT / "weights" / "demo"
PANELS = [
    "mask",
    "isolation",
    "positions",
    "attention",
    "candidate",
    "soft-cap",
    "updates",
    "changes",
    "rope",
    "retrieval",
]


RETRIEVAL = ("--retrieval", ROOT / "weights/demo-towers", "--corpus", ROOT / "weights/demo-posts")


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo explained, with its posts; `tests/weights/test_text_logs.py` has an explanation without any."""
    out = tmp_path_factory.mktemp("explained")
    done = call("explain", DEMO, "--out", out, "--candidate", 4, *RETRIEVAL)
    assert done.exit_code == 0, done.output
    assert "10 pictures" in done.stdout
    return out


@pytest.fixture
def request_() -> dict[str, Any]:
    request: dict[str, Any] = json.loads((DEMO / "example.json").read_text())
    return request


def test_the_demo_is_explained(out: Path, request_: dict[str, Any]) -> None:
    figures = json.loads((out / "figures.json").read_text())
    assert len(figures["tokens"]) == 1 + len(request_["history"]) + len(request_["candidates"])
    assert "Kaja Moreau: report" in figures["tokens"], "the demo's names"
    reported = figures["score_changes"][len(request_["history"]) - 1]
    assert min(reported) == reported[4] < -0.5, "the report costs its author's post most"
    for name in PANELS:
        assert (out / f"{name}.png").read_bytes().startswith(b"\x89PNG")


def test_the_page_needs_nothing_else(out: Path) -> None:
    page = (out / "index.html").read_text()
    assert len(re.findall('src="data:image/png;base64,', page)) == len(PANELS)
    assert not re.findall(r'(?:src|href)="(?!data:)|url\(|@import|<script', page)
    assert "Attention is not an explanation" in page
    assert page.count("<figcaption>") == len(PANELS)


def test_both_shapes_of_a_request_are_the_same(request_: dict[str, Any]) -> None:
    manifest = load_manifest(DEMO)
    rows = read_request(request_, manifest, {})
    for name in ("history", "candidates"):
        request_[name] = {key: [row[key] for row in request_[name]] for key in request_[name][0]}
    columns = read_request(request_, manifest, {})
    assert columns.tokens == rows.tokens
    assert columns.impression_ts == rows.impression_ts
    np.testing.assert_equal(columns.weights, rows.weights)
    for part in ("context", "candidates"):
        ours, theirs = (getattr(each, part) for each in (columns, rows))
        for field in fields(ours):
            np.testing.assert_equal(getattr(ours, field.name), getattr(theirs, field.name), field.name)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"user_id": 1}, "candidates"),
        ({"user_id": 1, "candidates": []}, "candidates are missing"),
        (
            {"user_id": 1, "candidates": [{"post_id": 1, "author_id": 1}], "weights": {"unheard": 1}},
            "no action unheard",
        ),
        (
            {"user_id": 1, "candidates": [{"post_id": 1, "author_id": 1}], "weights": {"favorite": float("nan")}},
            "no finite",
        ),
        ({"user_id": 1, "candidates": [{"post_id": 1, "author_id": 1}], "weights": {"19": 1}}, "no action 19"),
        ({"user_id": 1, "candidates": [{"post_id": 1, "author_id": 1}], "weights": "unheard"}, "unheard"),
        ({"context": "2f5ddb690f8f80243917d06266bae65e", "candidates": [{"post_id": 1, "author_id": 1}]}, "user_id is"),
        (
            {
                "user_id": 1,
                "candidates": [{"post_id": 1, "author_id": 1}],
                "history": [{"post_id": 1, "author_id": 1, "actions": 2**19}],
            },
            "no action 19",
        ),
        ({"user_id": 1, "candidates": [{"post_id": 1, "author_id": 1}]}, "choose 0 to 0"),
        ([], "JSON object"),
    ],
)
def test_what_is_no_request_is_refused_in_a_sentence(body: object, said: str, tmp_path: Path) -> None:
    (tmp_path / "request.json").write_text(json.dumps(body))
    refused = call("explain", DEMO, "--request", tmp_path / "request.json", "--out", tmp_path / "out", "--candidate", 1)
    assert refused.exit_code == 1
    assert said in refused.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("mask", [0, 5, 2**18 + 2, 2**19 - 1])
def test_masks_places_and_sets_of_weights_stand_for_what_they_stand_for_in_rank(mask: int) -> None:
    manifest = load_manifest(DEMO)
    names = [name for place, name in enumerate(manifest.action_names) if mask >> place & 1]
    post = {"post_id": 1, "author_id": 1}

    def read(actions: object, weights: object) -> tuple[list[list[float]], list[float]]:
        body = {"user_id": 1, "candidates": [post], "history": [post | {"actions": actions}], "weights": weights}
        found = read_request(body, manifest, {})
        return found.context.actions.tolist(), found.weights.tolist()

    assert read(mask, {"1": 2.5}) == read(names, {manifest.action_names[1]: 2.5})
    taken, weights = read(names, default_score_weights(manifest.action_names, "x-2026-09"))
    assert read(mask, "x-2026-09") == (taken, [*weights, 0.004 * 30]), "a second of dwell counts as well"


def test_a_change_of_the_dwell_is_part_of_the_change_of_the_score(request_: dict[str, Any]) -> None:
    loaded, scores = load_checkpoint(DEMO), []
    for weights in ("x-2026-09", default_score_weights(loaded.manifest.action_names, "x-2026-09")):
        request = read_request(request_ | {"weights": weights}, loaded.manifest, {})
        scores.append(figures_of(loaded.ranker, request).score_changes[-1])  # without the user

    def dwell(context: Context) -> np.ndarray[Any, Any]:
        return loaded.ranker(collate([(context, request.candidates)], loaded.manifest.config))[1][0, :, 0].numpy()  # type: ignore[no-any-return]

    moved = dwell(request.context) - dwell(replace(request.context, user_id=0))
    assert np.abs(moved).max() > 1e-3
    assert np.allclose(scores[0] - scores[1], 0.004 * 30 * moved, atol=1e-6)


def test_a_checkpoint_without_an_example_needs_a_request(tmp_path: Path) -> None:
    checkpoint = goldens.imported("phoenix-jan-gqa", tmp_path / "ranker")
    refused = call("explain", checkpoint, "--out", tmp_path / "out")
    assert (refused.exit_code, refused.stderr) == (1, f"{checkpoint} has no example.json: give --request.\n")
    refused = call("explain", checkpoint, "--out", tmp_path / "out", "--request", tmp_path)
    assert (refused.exit_code, refused.stderr) == (1, f"{tmp_path} cannot be read: Is a directory.\n")
    (deep := tmp_path / "deep.json").write_text("[" * 100_000)
    refused = call("explain", checkpoint, "--out", tmp_path / "out", "--request", deep)
    assert (refused.exit_code, f"{deep} cannot be read as JSON" in refused.stderr) == (1, True)


def test_a_corpus_is_one_more_picture(out: Path, request_: dict[str, Any], tmp_path: Path) -> None:
    """The posts are those of the plain definition, and the ranker's order is one of them."""
    found = json.loads((out / "figures.json").read_text())["retrieval"]
    encoder = load_encoder(ROOT / "weights/demo-towers")
    corpus = load_corpus(ROOT / "weights/demo-posts").corpus
    context = read_request(request_, load_manifest(DEMO), {}).context
    cosines = corpus.vectors @ encoder.towers.encode_users([context])[0].numpy()
    seen = {event["post_id"] for event in request_["history"]}
    order = [row for row in np.argsort(-cosines, kind="stable") if str(corpus.post_ids[row]) not in seen][:200]
    assert found["best"] == [str(post) for post in corpus.post_ids[order]]
    assert sorted(found["final_ranks"]) == list(range(1, 201))
    assert found["final_ranks"] != list(range(1, 201))
    assert sum(found["counts"]) == (~corpus.hidden).sum()
    assert 0.1 < found["explained"] < 1
    refused = call("explain", DEMO, "--out", tmp_path / "out", *RETRIEVAL[:2])
    assert (refused.exit_code, "belong together" in refused.stderr) == (1, True)
