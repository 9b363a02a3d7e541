"""The training loop: steps of the optimiser, evaluations on the validation requests, early stopping. `state` saves and restores it.

A batch depends only on (seed, step), so an interrupted and resumed run gives the same weights as one without a break. With
several processes, each computes its part of the batch, and all take the same step.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from model.batch import collate
from model.names import checkpoint_parameters
from model.ranker import Ranker
from weights.training import initial
from weights.training.examples import Examples, training_batch
from weights.training.processes import Objective, Processes, weight_sums
from weights.training.settings import TrainSettings

TRAIN_ORDER, TRAIN_BATCH = 1, 2  # streams of random numbers


@dataclass(frozen=True, slots=True)
class Status:
    """Progress of the run: steps done and in all, the latest training loss, the latest and best validation loss (NaN and
    infinity before the first evaluation), whether this step ended with an evaluation, and the impressions that all
    processes together have trained on since their start."""

    step: int
    steps: int
    loss: float
    validation: float
    best: float
    evaluated: bool
    impressions: int


@lru_cache(maxsize=2)  # a batch may reach from one epoch into the next
def epoch_order(seed: int, epoch: int, requests: int) -> NDArray[np.int64]:
    """The order of the requests in one epoch, `[requests]`."""
    return np.random.default_rng((seed, TRAIN_ORDER, epoch)).permutation(requests)


class Trainer:
    """Trains one ranker, from `start`'s weights if given. `train` and `validation` are indices of requests in `examples`."""

    def __init__(
        self,
        examples: Examples,
        train: NDArray[np.int64],
        validation: NDArray[np.int64],
        settings: TrainSettings,
        start: Ranker | None = None,
        processes: Processes | None = None,
        dwell_output: int = 0,
    ) -> None:
        self.examples, self.train, self.validation, self.settings = examples, train, validation, settings
        self.processes = processes or Processes()
        self.part = self.processes.part(settings.batch_requests)
        generator = torch.Generator().manual_seed(settings.seed)
        self.ranker = Ranker(examples.config)
        draw = initial.unit if settings.init == "unit" else initial.upstream
        draw(self.ranker, generator)
        if start is not None:
            self.ranker.load_state_dict(start.state_dict())
        self.ranker.to(settings.device)
        self.plain = Objective(self.ranker, settings.continuous_weight, getattr(torch, settings.dtype), dwell_output)
        self.objective: nn.Module = self.plain  # `distribute` wraps it
        self.generator = generator
        self.optimizer = torch.optim.AdamW(self._groups(), lr=settings.learning_rate, betas=(0.9, 0.98), eps=1e-8)
        self.steps = max(1, round(settings.epochs * len(train) / settings.batch_requests))
        self.step = 0
        self.loss = math.nan
        self.validation_loss = math.nan
        self.best_loss = math.inf
        self.best: dict[str, Tensor] = {}
        self.evaluations_without_improvement = 0
        self.curve: list[tuple[float, float, float]] = []
        """Learning rate, loss and validation loss of every step; the last is NaN for a step without an evaluation."""
        self.impressions = 0

    @property
    def finished(self) -> bool:
        """Whether all steps are done, or `patience` evaluations in a row did not improve the validation loss."""
        return self.step >= self.steps or self.evaluations_without_improvement >= self.settings.patience

    def run(self, report: Callable[[Status], None], save: Callable[[Trainer], None]) -> Ranker:
        """Train to the end; `report` is called after every step, `save` after every evaluation. Returns the best ranker."""
        self.distribute()
        while not self.finished:
            self.advance()
            evaluated = self.step % self.settings.evaluate_every == 0 or self.step == self.steps
            if evaluated:
                self.evaluate()
            validation = self.validation_loss if evaluated else math.nan
            self.curve.append((self.learning_rate(self.step - 1), self.loss, validation))
            if evaluated:
                save(self)
            losses = self.loss, self.validation_loss, self.best_loss
            report(Status(self.step, self.steps, *losses, evaluated, self.impressions))
        self.ranker.load_state_dict(self.best)
        return self.ranker

    def distribute(self) -> None:
        """Exchange gradients from now on, if there are other processes. All must hold the same weights."""
        self.objective = self.processes.distributed(self.plain)

    def advance(self) -> None:
        """Take one step of the optimiser; the first one also leaves the saddle of the initial values."""
        settings = self.settings
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate(self.step) * group["rate"]
        rng = np.random.default_rng((settings.seed, TRAIN_BATCH, self.step))
        batch, labels = training_batch(
            self.examples,
            self._indices(),
            rng,
            fresh_user_share=settings.fresh_user_share,
            fresh_post_share=settings.fresh_post_share,
            max_candidates=settings.max_candidates,
            part=self.part,
        )
        batch, labels = batch.to(settings.device), labels.to(settings.device)
        self.optimizer.zero_grad()
        loss = self.objective(batch, labels)
        loss.backward()
        self.processes.exchange(self.ranker.tables, batch)
        torch.nn.utils.clip_grad_norm_(self.ranker.parameters(), settings.gradient_norm)
        self.optimizer.step()
        if self.step == 0 and "layers.0.query" in initial.stuck(self.ranker.trunk):
            self._leave_saddle()
        self.loss = self.processes.mean(loss)
        self.impressions += round(int(labels.shown.sum()) * self.processes.size / labels.shown_weight)
        self.step += 1

    def learning_rate(self, step: int) -> float:
        """Linear warm-up, then half a cosine down to 0 at the last step."""
        settings = self.settings
        warm = min(1.0, (step + 1) / settings.warmup_steps)
        return settings.learning_rate * warm * 0.5 * (1 + math.cos(math.pi * step / self.steps))

    @torch.inference_mode()
    def evaluate(self) -> None:
        """Measure the loss on the unchanged validation requests; keep the weights if they are the best so far.

        Raises ProcessesError if processes hold different weights.
        """
        if self.processes.size > 1:
            self.processes.agree({f"weights at step {self.step}": weight_sums(self.ranker)})
        starts = range(0, len(self.validation), self.settings.batch_requests)
        mine = [self._validation_chunk(start) for start in starts[self.processes.rank :: self.processes.size]]
        everyone = self.processes.gather(mine)  # of n processes, each has every n-th chunk
        total, weight = 0.0, 0
        for number in range(len(starts)):
            loss, shown = everyone[number % self.processes.size][number // self.processes.size]
            total, weight = total + loss * shown, weight + shown
        self.validation_loss = total / weight
        if self.validation_loss < self.best_loss:
            self.best_loss, self.evaluations_without_improvement = self.validation_loss, 0
            self.best = {name: value.clone() for name, value in self.ranker.state_dict().items()}
        else:
            self.evaluations_without_improvement += 1

    def _validation_chunk(self, start: int) -> tuple[float, int]:
        """The loss of a batch of validation requests from `start` on, and its number of candidates."""
        examples, device = self.examples, self.settings.device
        indices = self.validation[start : start + self.settings.batch_requests]
        rows = [examples.rows(index) for index in indices]
        requests = [(examples.context(i), examples.candidates(i, r)) for i, r in zip(indices, rows, strict=True)]
        labels = examples.labels(rows)
        loss = self.plain(collate(requests, examples.config).to(device), labels.to(device))
        return loss.item(), int(labels.shown.sum())

    def _leave_saddle(self) -> None:
        """Call `initial.leave_saddle` on a CPU copy, because the generator draws on the CPU."""
        moved = Ranker(self.examples.config)
        moved.load_state_dict(self.ranker.state_dict())
        initial.leave_saddle(moved, self.generator)
        self.ranker.load_state_dict(moved.state_dict())

    def _indices(self) -> NDArray[np.int64]:
        """The requests of this step; each epoch has its own permutation."""
        size = self.settings.batch_requests
        place = np.arange(self.step * size, (self.step + 1) * size)
        count, seed = len(self.train), self.settings.seed
        return self.train[
            [epoch_order(seed, epoch, count)[row] for epoch, row in zip(*divmod(place, count), strict=True)]
        ]

    def _groups(self) -> list[dict[str, object]]:
        """Parameter groups: matrices and embedding tables have a decay each, norm scales and biases none.

        Norm scales that start from 0 learn faster, queries and keys slower.
        """
        settings, named = self.settings, list(checkpoint_parameters(self.ranker))

        def kind(name: str, parameter: Tensor) -> str:
            if name.startswith("tables."):
                return "table"
            if name.endswith(initial.QUERY_KEY):
                return "query or key"
            if name.endswith((*initial.PRE_NORMS, "_bias")):
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
