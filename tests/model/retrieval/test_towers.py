"""The published retrieval model's numbers, through import, save, load and the plain towers."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from model.inputs import Context
from model.native.tower import NativeTower
from model.retrieval.towers import Towers
from model.tolerances import RETRIEVAL
from tests import retrieval_goldens as goldens
from tests.goldens import GOLDEN
from tests.goldens import context as context_of
from tests.model.builders import random_config, random_context
from tests.support.random_models import random_model, retrieval_config
from weights.checkpoint import Encoder


class Golden(NamedTuple):
    """One recording: our import of its towers, its users, and what the published towers gave."""

    name: str
    encoder: Encoder
    contexts: list[Context]
    expected: dict[str, Any]


@pytest.fixture(scope="module", params=goldens.NAMES)
def golden(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Golden:
    name: str = request.param
    encoder = goldens.imported(GOLDEN / name / "retrieval", tmp_path_factory.mktemp("towers") / name)
    contexts = goldens.contexts(name, encoder.towers.config)
    return Golden(name, encoder, contexts, goldens.arrays(GOLDEN / name / "expected.npz"))


def distance(left: Any, right: Any) -> float:
    assert left.shape == right.shape
    return float(np.abs(left - right).max())


def test_the_user_tower_equals_the_published_one(golden: Golden) -> None:
    towers, elements = golden.encoder.towers, RETRIEVAL[torch.float32].elements
    together = towers.encode_users(golden.contexts).numpy()
    rounded = towers.encode_users(golden.contexts, torch.bfloat16).numpy()
    for index, context in enumerate(golden.contexts):
        published = golden.expected[f"{index}/user_repr_fp32"]
        alone = towers.encode_users([context]).numpy()[0]
        assert distance(alone, published) <= elements
        assert distance(together[index], alone) <= elements
        assert (
            distance(rounded[index], golden.expected[f"{index}/user_repr_bf16"]) <= RETRIEVAL[torch.bfloat16].elements
        )
        if published.any():
            assert rounded[index] @ published >= 0.9998
            assert distance(rounded[index], published) > elements  # it is bfloat16


def test_the_candidate_tower_equals_the_published_one(golden: Golden, tmp_path: Path) -> None:
    corpus = goldens.arrays(GOLDEN / golden.name / "corpus.npz")
    ids = (corpus["post_ids"].astype(np.uint64), corpus["author_ids"].astype(np.uint64))
    ours = golden.encoder.towers.encode_posts(*ids).numpy()
    assert distance(ours, corpus["candidate_representations"]) <= RETRIEVAL[torch.float32].elements
    half = goldens.imported(GOLDEN / golden.name / "retrieval", tmp_path / "half", table_dtype="bfloat16")
    rounded = half.towers.encode_posts(*ids).numpy()
    assert distance(rounded, golden.expected["corpus/representations_bf16_tables"]) <= RETRIEVAL[torch.bfloat16].posts
    assert distance(rounded, ours) > RETRIEVAL[torch.float32].elements


def test_nobody_and_no_post_are_zero(golden: Golden) -> None:
    towers = golden.encoder.towers
    nobody = random_context(towers.config, 3, user_id=0)
    nobody.post_ids[:] = 0
    assert not towers.encode_users([nobody]).any()
    assert not towers.encode_posts(np.zeros(1, np.uint64), np.zeros(1, np.uint64)).any()


@pytest.mark.parametrize("functions", [1, 3])
def test_events_without_a_post_are_absent_for_any_hash_count(functions: int) -> None:
    hashes = replace(random_config().post_hashes, scales=(3, 5, 7)[:functions], biases=(1, 2, 3)[:functions])
    shape = random_config(post_hashes=hashes, author_hashes=hashes, user_hashes=hashes)
    towers = random_model(retrieval_config(shape), 3)
    assert isinstance(towers, Towers)
    context = random_context(towers.config, 20)
    known = towers.encode_users([context.first(15)]).numpy()[0]
    assert distance(towers.encode_users([context]).numpy()[0], known) > 1000 * RETRIEVAL[torch.float32].elements
    context.post_ids[15:] = 0
    assert distance(towers.encode_users([context]).numpy()[0], known) <= RETRIEVAL[torch.float32].elements
    assert towers.encode_posts(context.post_ids[:2], context.author_ids[:2]).square().sum(1).numpy() == pytest.approx(1)


def test_towers_in_training_encode_without_a_graph() -> None:
    config = retrieval_config(random_config())
    towers = random_model(config, 3).requires_grad_(True)
    assert isinstance(towers, Towers)
    ids = np.array([5, 6], np.uint64)
    for vectors in (towers.encode_posts(ids, ids), towers.encode_users([random_context(config, 9)])):
        assert not vectors.requires_grad


def test_the_order_of_the_history_matters(golden: Golden) -> None:
    """Negative control: with upstream's initial weights a user is a bag of tokens, and much above would hold all the same."""
    context = golden.contexts[4]
    turned = replace(context, post_ids=context.post_ids[::-1].copy(), author_ids=context.author_ids[::-1].copy(),
                     actions=context.actions[::-1].copy(), surfaces=context.surfaces[::-1].copy())  # fmt: skip
    before, after = golden.encoder.towers.encode_users([context, turned])
    assert float((before - after).abs().max()) > 1000 * RETRIEVAL[torch.float32].elements


@pytest.mark.parametrize("name", ["phoenix-mini", "phoenix-right-anchored"])
def test_the_joined_pipeline_retrieves_the_published_posts(name: str, tmp_path: Path) -> None:
    """User, corpus and order of the published retrieve → rank pipeline."""
    source = goldens.PIPELINES / "golden-retrieval" / f"pipeline-{name}"
    if not source.exists():
        pytest.skip("the shared goldens of the pipeline are not beside this checkout")
    encoder = goldens.imported(goldens.PIPELINES / "golden" / name / "retrieval", tmp_path / name)
    corpus = goldens.arrays(goldens.PIPELINES / "golden" / name / "sports_corpus.npz")
    expected = goldens.arrays(source / "expected.npz")
    for index, recorded in enumerate(json.loads((source / "sequences.json").read_text())):
        sequence = recorded["sequence"]
        sequence = sequence | {"history": sequence["history"][: encoder.towers.config.history_length]}
        for event in sequence["history"]:
            event["actions"] = {key: value for key, value in event["actions"].items() if int(key) < 19}
        user = encoder.towers.encode_users([context_of(sequence, encoder.towers.config)]).numpy()[0]
        assert distance(user, expected[f"{index}/user_repr_fp32"]) <= RETRIEVAL[torch.float32].elements
        scores = corpus["candidate_representations"] @ user
        rows = np.argsort(-scores, kind="stable")[: recorded["top_k"]]
        wanted, wanted_scores = expected[f"{index}/retrieved_ids_fp32"], expected[f"{index}/retrieved_scores_fp32"]
        assert distance(scores[rows], wanted_scores) <= RETRIEVAL[torch.float32].scores
        place = {post: row for row, post in enumerate(corpus["post_ids"].tolist())}
        theirs = [place[post] for post in wanted.tolist()]
        assert distance(scores[rows], scores[theirs]) < 2e-6, "only near ties may change places"


@pytest.mark.parametrize("linear", [True, False])
def test_codes_move_posts_and_users(linear: bool) -> None:
    """Each post as if alone; a code of 0 adds nothing; the kernel's users are the definition's."""
    config = retrieval_config(random_config(), linear_projection=linear)
    towers = random_model(config, 3)
    assert isinstance(towers, Towers)
    ids, rng = np.arange(1, 7, dtype=np.uint64), np.random.default_rng(1)
    codes = rng.integers(1, config.code_values + 1, (6, config.code_levels))
    codes[5] = 0
    vectors, plain = towers.encode_posts(ids, ids, codes).numpy(), towers.encode_posts(ids, ids).numpy()
    assert (vectors[:5] != plain[:5]).any(1).all()
    assert (vectors[5] == plain[5]).all()
    alone = np.concatenate([towers.encode_posts(ids[i : i + 1], ids[i : i + 1], codes[i : i + 1]) for i in range(6)])
    assert distance(alone, vectors) <= RETRIEVAL[torch.float32].posts
    contexts = [random_context(config, length, length) for length in (5, 37)]
    users = towers.encode_users(contexts).numpy()
    tower = NativeTower(towers, threads=1)
    assert distance(tower.encode(contexts), users) <= 1e-5
    tower.close()
    bare = [replace(context, codes=np.zeros((len(context), 0), np.int64)) for context in contexts]
    assert (towers.encode_users(bare).numpy() != users).any(1).all()
