"""Predicts the rows of a log's requests with the ranker, whole or with something taken away."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from model.batch import collate
from model.inputs import Context
from model.ranker import Ranker
from model.ranking import Calibration
from weights.lab.training.examples import Examples

Ablation = Literal["none", "no history", "shuffled history", "shuffled order", "no user"]
ABLATIONS: tuple[Ablation, ...] = ("none", "no history", "shuffled history", "shuffled order", "no user")
Floats = NDArray[np.float32]
BATCH_REQUESTS = 50
SEED = 1


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
    progress: Callable[[int, int], None] = lambda done, total: None,
    *,
    corrections: Calibration | None = None,
) -> Prediction:
    """Predictions for the rows of the given requests, in their order. An ablation removes something from every context. `corrections`: the
    checkpoint's calibration; without it the probabilities are the model's own."""
    change = _ablation(ablation, examples, requests, np.random.default_rng(SEED))
    order = np.argsort(examples.sizes[requests], kind="stable")  # requests of like size are padded least
    predictions: list[Prediction] = []
    for start in range(0, len(order), BATCH_REQUESTS):
        indices = requests[order[start : start + BATCH_REQUESTS]].tolist()
        rows = [examples.rows(index) for index in indices]
        batch = collate(
            [(change(index), examples.candidates(r)) for index, r in zip(indices, rows, strict=True)], examples.config
        )
        logits, continuous = ranker(batch)
        shown = torch.arange(logits.shape[1]) < torch.tensor([len(r) for r in rows])[:, None]
        own = logits[shown]
        probabilities = corrections.probabilities(own.numpy()) if corrections else torch.sigmoid(own).numpy()
        predictions.append(Prediction(probabilities, continuous[shown].numpy()))
        progress(min(start + BATCH_REQUESTS, len(order)), len(order))
    computed = rows_of(examples, requests[order])
    back = np.argsort(computed)
    place = back[np.searchsorted(computed[back], rows_of(examples, requests))]
    return Prediction(
        np.concatenate([part.probabilities for part in predictions])[place],
        np.concatenate([part.continuous for part in predictions])[place],
    )


def rows_of(examples: Examples, requests: NDArray[np.int64]) -> NDArray[np.int64]:
    """The rows of the log shown in these requests, one request after the other."""
    return np.concatenate([examples.rows(index) for index in requests.tolist()])


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
