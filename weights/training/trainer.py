"""The training loop: steps of the optimiser, evaluations on the validation requests, early stopping. `state` saves and restores it.

A batch depends on (seed, step) alone, so an interrupted and resumed run gives the same weights as one without a break.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from model.batch import collate
from model.ranker import Ranker
from weights.training import initial
from weights.training.examples import Examples, training_batch
from weights.training.losses import total_loss
from weights.training.settings import TrainSettings

TRAIN_ORDER, TRAIN_BATCH = 1, 2  # streams of random numbers


@dataclass(frozen=True, slots=True)
class Status:
    """How far the run is: steps done, of how many, the latest training loss, the latest and best validation loss (NaN
    and infinity before the first evaluation), whether this step ended with an evaluation."""

    step: int
    steps: int
    loss: float
    validation: float
    best: float
    evaluated: bool


class Trainer:
    """Trains one ranker, from `start`'s weights where it is given. `train` and `validation` are indices of requests in `examples`."""

    def __init__(
        self,
        examples: Examples,
        train: NDArray[np.int64],
        validation: NDArray[np.int64],
        settings: TrainSettings,
        start: Ranker | None = None,
    ) -> None:
        self.examples, self.train, self.validation, self.settings = examples, train, validation, settings
        generator = torch.Generator().manual_seed(settings.seed)
        self.ranker = Ranker(examples.config)
        draw = initial.unit if settings.init == "unit" else initial.upstream
        draw(self.ranker, generator)
        if start is not None:
            self.ranker.load_state_dict(start.state_dict())
        self.generator = generator
        self.optimizer = torch.optim.AdamW(self._groups(), lr=settings.learning_rate, betas=(0.9, 0.98), eps=1e-8)
        self.steps = max(1, round(settings.epochs * len(train) / settings.batch_requests))
        self.step = 0
        self.loss = math.nan
        self.validation_loss = math.nan
        self.best_loss = math.inf
        self.best: dict[str, Tensor] = {}
        self.evaluations_without_improvement = 0

    @property
    def finished(self) -> bool:
        """All steps are done, or `patience` evaluations in a row did not improve the validation loss."""
        return self.step >= self.steps or self.evaluations_without_improvement >= self.settings.patience

    def run(self, report: Callable[[Status], None], save: Callable[[Trainer], None]) -> Ranker:
        """Train to the end; `report` is called after every step, `save` after every evaluation. It returns the best ranker."""
        while not self.finished:
            self.advance()
            evaluated = self.step % self.settings.evaluate_every == 0 or self.step == self.steps
            if evaluated:
                self.evaluate()
                save(self)
            report(Status(self.step, self.steps, self.loss, self.validation_loss, self.best_loss, evaluated))
        self.ranker.load_state_dict(self.best)
        return self.ranker

    def advance(self) -> None:
        """One step of the optimiser; the first one also leaves the saddle of the initial values."""
        settings = self.settings
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate() * group["rate"]
        rng = np.random.default_rng((settings.seed, TRAIN_BATCH, self.step))
        batch, labels = training_batch(
            self.examples,
            self._indices(),
            rng,
            fresh_user_share=settings.fresh_user_share,
            fresh_post_share=settings.fresh_post_share,
            max_candidates=settings.max_candidates,
        )
        self.optimizer.zero_grad()
        logits, continuous = self.ranker(batch)
        loss = total_loss(logits, continuous, labels, settings.continuous_weight)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.ranker.parameters(), settings.gradient_norm)
        self.optimizer.step()
        if self.step == 0 and "layers.0.query" in initial.stuck(self.ranker.trunk):
            initial.leave_saddle(self.ranker, self.generator)
        self.loss = loss.item()
        self.step += 1

    def learning_rate(self) -> float:
        """Linear warm-up, then half a cosine down to 0 at the last step."""
        settings = self.settings
        warm = min(1.0, (self.step + 1) / settings.warmup_steps)
        return settings.learning_rate * warm * 0.5 * (1 + math.cos(math.pi * self.step / self.steps))

    @torch.inference_mode()
    def evaluate(self) -> None:
        """Measure the loss on the unchanged validation requests; keep the weights if they are the best so far."""
        total, weight = 0.0, 0
        for start in range(0, len(self.validation), self.settings.batch_requests):
            indices = self.validation[start : start + self.settings.batch_requests]
            rows = [self.examples.rows(index) for index in indices]
            requests = [
                (self.examples.context(i), self.examples.candidates(i, r)) for i, r in zip(indices, rows, strict=True)
            ]
            labels = self.examples.labels(rows)
            logits, continuous = self.ranker(collate(requests, self.examples.config))
            loss = total_loss(logits, continuous, labels, self.settings.continuous_weight)
            total, weight = total + loss.item() * int(labels.shown.sum()), weight + int(labels.shown.sum())
        self.validation_loss = total / weight
        if self.validation_loss < self.best_loss:
            self.best_loss, self.evaluations_without_improvement = self.validation_loss, 0
            self.best = {name: value.clone() for name, value in self.ranker.state_dict().items()}
        else:
            self.evaluations_without_improvement += 1

    def _indices(self) -> NDArray[np.int64]:
        """The requests of this step: each epoch is a permutation of its own."""
        size = self.settings.batch_requests
        place = np.arange(self.step * size, (self.step + 1) * size)
        epochs = place // len(self.train)
        orders = {
            int(epoch): np.random.default_rng((self.settings.seed, TRAIN_ORDER, int(epoch))).permutation(
                len(self.train)
            )
            for epoch in np.unique(epochs)
        }
        return self.train[[orders[int(epoch)][p % len(self.train)] for epoch, p in zip(epochs, place, strict=True)]]

    def _groups(self) -> list[dict[str, object]]:
        """Decay for matrices, a decay of their own for embedding tables, none for norm scales and biases.

        Norm scales that start from 0 learn faster, queries and keys slower.
        """
        settings, named = self.settings, list(self.ranker.named_parameters())

        def kind(name: str, parameter: Tensor) -> str:
            if name.startswith("tables."):
                return "table"
            if name.endswith(initial.QUERY_KEY):
                return "query or key"
            if name.endswith((*initial.PRE_NORMS, *initial.HEAD_NORMS, "_bias")):
                return "inner norm"
            return "matrix" if parameter.ndim == 2 else "outer norm"

        groups = {  # weight decay, factor of the learning rate
            "table": (settings.table_decay, 1.0),
            "matrix": (settings.weight_decay, 1.0),
            "query or key": (settings.weight_decay, settings.attention_rate),
            "inner norm": (0.0, 1.0),
            "outer norm": (0.0, settings.norm_rate),
        }
        return [
            {"params": [p for name, p in named if kind(name, p) == group], "weight_decay": decay, "rate": rate}
            for group, (decay, rate) in groups.items()
        ]
