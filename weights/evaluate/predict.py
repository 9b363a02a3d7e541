"""Predicts the rows of a log's requests with the ranker, its ablations and the baselines."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from model.batch import collate
from model.inputs import Context
from model.ranker import Ranker
from weights.training.examples import Examples
from weights.training.log import Log

Ablation = Literal["none", "no history", "shuffled history", "shuffled order", "no user"]
ABLATIONS: tuple[Ablation, ...] = ("none", "no history", "shuffled history", "shuffled order", "no user")
Floats = NDArray[np.float32]
BATCH_REQUESTS = 50


@dataclass(frozen=True, slots=True, eq=False)
class Prediction:
    """probabilities float32 `[n, A]`, and the continuous outputs float32 `[n, Z]`."""

    probabilities: Floats
    continuous: Floats


@torch.inference_mode()
def predict(
    ranker: Ranker,
    examples: Examples,
    requests: NDArray[np.int64],
    ablation: Ablation = "none",
    seed: int = 1,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Prediction:
    """Predictions for the rows of the given requests, in their order. An ablation removes something from every context."""
    change = _ablation(ablation, examples, requests, np.random.default_rng(seed))
    probabilities, outputs = [], []
    for start in range(0, len(requests), BATCH_REQUESTS):
        chunk = requests[start : start + BATCH_REQUESTS]
        rows = [examples.rows(index) for index in chunk]
        batch = collate(
            [(change(int(i)), examples.candidates(i, r)) for i, r in zip(chunk, rows, strict=True)], examples.config
        )
        logits, continuous = ranker(batch)
        shown = torch.arange(logits.shape[1]) < torch.tensor([len(r) for r in rows])[:, None]
        probabilities.append(torch.sigmoid(logits[shown]).numpy())
        outputs.append(continuous[shown].numpy())
        progress(min(start + BATCH_REQUESTS, len(requests)), len(requests))
    return Prediction(np.concatenate(probabilities), np.concatenate(outputs))


def _ablation(
    ablation: Ablation, examples: Examples, requests: NDArray[np.int64], rng: np.random.Generator
) -> Callable[[int], Context]:
    """A function from a request to the context shown to the ranker."""
    if ablation == "none":
        return examples.context
    if ablation == "no user":
        return lambda index: replace(examples.context(index), user_id=0)
    if ablation == "no history":
        return lambda index: examples.context(index).rows(slice(0))
    if ablation == "shuffled order":
        return lambda index: (context := examples.context(index)).rows(rng.permutation(len(context)))
    other = dict(zip(requests.tolist(), rng.permutation(requests).tolist(), strict=True))
    return lambda index: replace(examples.context(other[index]), user_id=examples.context(index).user_id)


def popularity(train: Log, test: Log, strength: float = 20.0) -> Floats:
    """Action rates of the post in the training period, shrunk towards its author's, which are shrunk towards the overall rates.

    `strength`: the number of impressions that the rate shrunk towards counts as.
    """
    everybody = np.broadcast_to(train.actions.mean(0), test.actions.shape)
    author = _shrunk_rates(train.author_id, train.actions, test.author_id, everybody, strength)
    return _shrunk_rates(train.post_id, train.actions, test.post_id, author, strength)


def affinity(train: Log, test: Log, author_topics: Mapping[int, int] | None, strength: float = 5.0) -> Floats:
    """The user's rates with the author, shrunk towards the user's with the topic, the user's in all, and the overall rates.

    Without topics the step between user and author is left out.
    """
    everybody = np.broadcast_to(train.actions.mean(0), test.actions.shape)
    rates = _shrunk_rates(train.user_id, train.actions, test.user_id, everybody, strength)
    if author_topics:
        keys = [_pair(log.user_id, _topics(log.author_id, author_topics)) for log in (train, test)]
        rates = _shrunk_rates(keys[0], train.actions, keys[1], rates, strength)
    keys = [_pair(log.user_id, log.author_id) for log in (train, test)]
    return _shrunk_rates(keys[0], train.actions, keys[1], rates, strength)


def _topics(author_ids: NDArray[np.uint64], author_topics: Mapping[int, int]) -> NDArray[np.uint64]:
    authors, which = np.unique(author_ids, return_inverse=True)
    return np.array([author_topics.get(int(author), len(author_topics)) for author in authors], np.uint64)[which]


def _pair(left: NDArray[np.uint64], right: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """One key for a pair, by a wrapping multiply-add; equal pairs give equal keys, others collide with a chance of 2^-64."""
    with np.errstate(over="ignore"):
        return left * np.uint64(0x9E3779B97F4A7C15) ^ (right + np.uint64(0x632BE59BD9B4E019)) * np.uint64(
            0xD6E8FEB86659FD93
        )


def _shrunk_rates(
    seen: NDArray[np.uint64], actions: NDArray[np.bool_], wanted: NDArray[np.uint64], prior: Floats, strength: float
) -> Floats:
    """`(positives + strength · prior) / (impressions + strength)` of each wanted key, float32 `[n, A]`."""
    keys, which = np.unique(seen, return_inverse=True)
    counts = np.bincount(which)
    positives = np.stack([np.bincount(which, column) for column in actions.T], 1)
    place = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    known = (keys[place] == wanted)[:, None]
    count = np.where(known, counts[place][:, None], 0)
    total = np.where(known, positives[place], 0)
    return np.asarray((total + strength * prior) / (count + strength), np.float32)
