"""A position that is sent as `product_surface`: the model learns how it moves the clicks, and one fixed surface leaves it out."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

pytest.importorskip("pyarrow")

from tests.weights.lab.training.small_run import TRAINING, small_config
from weights.lab.evaluate.predict import predict
from weights.lab.training.examples import Examples
from weights.lab.training.log import Log
from weights.lab.training.run import train

POSTS, SHOWN, REQUESTS = 10, 5, 1500


@pytest.fixture(scope="module")
def log() -> Log:
    """Each user comes once. Post 10 is the best and post 1 the worst, but the worst are mostly shown first, where clicks are eight times
    as likely as at the end."""
    rng = np.random.default_rng(1)
    lists = [
        np.sort(rng.choice(POSTS, SHOWN, replace=False)) if rng.random() < 0.8 else rng.permutation(POSTS)[:SHOWN]
        for _ in range(REQUESTS)
    ]
    post, place = np.concatenate(lists), np.tile(np.arange(SHOWN), REQUESTS)
    clicked = rng.random(len(post)) < (0.1 + 0.04 * post) * 8.0 ** (-place / (SHOWN - 1))
    request, zeros = np.repeat(np.arange(1, REQUESTS + 1), SHOWN), np.zeros(len(post), np.int64)
    ids = (post + 1).astype(np.uint64)
    return Log(
        request_id=request.astype(np.uint64), impression_ts=1_600_000_000 + 60 * request, user_id=request.astype(np.uint64), post_id=ids,
        author_id=ids, product_surface=place, created_at=zeros, dwell_seconds=zeros.astype(np.float32), actions=clicked[:, None],
        action_names=("click",),
    )  # fmt: skip


def qualities(log: Log) -> NDArray[np.float64]:
    """What a ranker that is trained on the log predicts for each post on surface 0, the mean over the newest requests, `[POSTS]`."""
    config = replace(small_config(), actions=1)
    settings = replace(TRAINING, epochs=4, hidden_post_share=0.0, hidden_user_share=0.9)
    ranker = train(log, config, settings)
    examples = Examples(replace(log, product_surface=np.zeros(len(log), np.int64)), config)
    newest = np.arange(REQUESTS - 300, REQUESTS)
    probability = predict(ranker, examples, newest).probabilities[:, 0]
    post = log.post_id[-300 * SHOWN :]
    return np.array([probability[post == each].mean() for each in range(1, POSTS + 1)])


@pytest.mark.slow
def test_a_position_sent_as_surface_does_not_count_as_quality(log: Log) -> None:
    best = np.arange(POSTS)
    with_places = np.corrcoef(qualities(log), best)[0, 1]
    without = np.corrcoef(qualities(replace(log, product_surface=np.zeros(len(log), np.int64))), best)[0, 1]
    assert with_places > 0.8
    assert without < 0.3
