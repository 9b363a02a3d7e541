"""The training loop: steps of the optimiser, looks at the validation requests, early stopping. `state` saves and restores it.

A batch depends only on (seed, step), so an interrupted and resumed run gives the same weights as one without a break.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from model.batch import Batch
from model.names import checkpoint_parameters
from model.ranker import Ranker
from weights.lab.training import initial
from weights.lab.training.examples import Examples, HiddenShares, Labels
from weights.lab.training.losses import action_loss, dwell_loss
from weights.lab.training.settings import TrainSettings

TRAIN_ORDER, TRAIN_BATCH = 1, 2  # streams of random numbers
VALIDATION_BATCH = 32
MEMORY_SHARE = 0.1  # of a run's steps: the moving average of a run from scratch looks back no further
LOOK_LOSSES = ("training_loss", "validation_loss", "learning_rate")
LIKE_SIZES = 16  # batches whose requests are sorted by size together: less padding, and still mixed


class TrainingError(ValueError):
    """A run that ended without weights worth keeping; the message says why."""


@dataclass(frozen=True, slots=True)
class Look:
    """One evaluation on the validation requests: after which step, the mean training loss of the steps since the one before, the
    validation loss, and the learning rate of that step."""

    step: int
    training_loss: float
    validation_loss: float
    learning_rate: float


@dataclass(frozen=True, slots=True)
class Status:
    """Progress of the run: steps done and in all, the latest training loss, the latest and best validation loss (NaN and
    infinity before the first look), whether this step ended with a look at the validation requests, and all looks so far."""

    step: int
    steps: int
    loss: float
    validation: float
    best: float
    evaluated: bool
    curve: Sequence[Look] = ()

    @property
    def best_step(self) -> int:
        """The step whose weights are kept: the one with the best validation loss; 0 before there is one."""
        return next((look.step for look in self.curve if look.validation_loss == self.best), 0)

    @property
    def ended(self) -> str:
        """Why the run ended, if this was its last step."""
        if self.step >= self.steps:
            return "all steps were done"
        return f"no better validation loss since step {self.best_step}"


def epoch_batches(sizes: NDArray[np.int64], batch: int, rng: np.random.Generator) -> list[NDArray[np.int64]]:
    """The places of one epoch's requests in random order, `batch` at a time; those of a batch have about the same size.

    `sizes`: tokens of each request, int64 `[R]`. The last batch of a stretch may be smaller.
    """
    order, batches = rng.permutation(len(sizes)), list[NDArray[np.int64]]()
    for start in range(0, len(order), LIKE_SIZES * batch):
        stretch = order[start : start + LIKE_SIZES * batch]
        stretch = stretch[np.argsort(sizes[stretch], kind="stable")]
        cut = np.split(stretch, np.arange(batch, len(stretch), batch))
        batches += [cut[place] for place in rng.permutation(len(cut))]
    return batches


def rate_at(step: int, largest: float, warmup_steps: int, steps: int) -> float:
    """The learning rate of a step, from 0: linear warm-up, then half a cosine down to 0 at the last of `steps`."""
    warm = min(1.0, (step + 1) / warmup_steps)
    return largest * warm * 0.5 * (1 + math.cos(math.pi * step / steps))


class Trainer:
    """Trains one ranker, from `start`'s weights if given. `train` and `validation` are indices of requests in `examples`.

    `dwell_output`: the continuous output that learns the dwell; None if none does.
    """

    def __init__(
        self,
        examples: Examples,
        train: NDArray[np.int64],
        validation: NDArray[np.int64],
        settings: TrainSettings,
        start: Ranker | None = None,
        dwell_output: int | None = None,
    ) -> None:
        self.examples, self.train, self.settings, self.dwell_output = examples, train, settings, dwell_output
        self.validation = validation[np.argsort(examples.sizes[validation], kind="stable")]
        self.groups = examples.groups(
            train,
            settings.max_candidates,
            settings.shared_events if examples.config.context_attention == "causal" else 0,
        )
        self.epoch, self.batches = -1, list[NDArray[np.int64]]()
        self.hidden = HiddenShares(
            settings.hidden_user_share,
            settings.hidden_post_share,
            settings.hidden_author_share,
            settings.hidden_event_share,
            settings.hidden_code_share,
        )
        self.generator = torch.Generator().manual_seed(settings.seed)
        self.ranker = Ranker(examples.config)
        initial.upstream(self.ranker, self.generator)
        if start is not None:
            self.ranker.load_state_dict(start.state_dict())
        else:
            learned = slice(int(examples.starts[train[0]]), int(examples.stops[train[-1]]))
            initial.silence(self.ranker, ~examples.log.take(learned).taught_actions)
        self.ranker.to(settings.device)
        self.optimizer = torch.optim.AdamW(
            self._groups(), lr=settings.learning_rate, betas=(0.9, 0.98), eps=1e-8, fused=True
        )
        self.batches_per_epoch = -(-len(self.groups) // settings.batch_contexts)
        self.steps = max(1, round(settings.epochs * self.batches_per_epoch))
        self.warmup_steps = settings.warmup_steps
        if settings.warmup_share:
            self.warmup_steps = min(self.warmup_steps, max(1, round(settings.warmup_share * self.steps)))
        spread = self.steps // settings.evaluations if settings.evaluations else self.steps
        self.evaluate_every = min(settings.evaluate_every, max(1, spread))
        averaging = settings.averaging
        if start is None:  # a short run would keep much of its first weights
            averaging = min(averaging, max(0.0, 1 - 1 / (MEMORY_SHARE * self.steps)))
        decay = get_ema_multi_avg_fn(averaging)
        self.averaged = AveragedModel(self.ranker, multi_avg_fn=decay) if averaging else None
        shown = examples.stops - examples.starts
        candidates = np.minimum(self.groups.sums(shown), settings.max_candidates)
        self.group_sizes = candidates + examples.history_lengths[self.groups.newest]
        self.shown_per_step = float(candidates.sum()) / self.batches_per_epoch
        self.dwelt_share = max(float((examples.log.dwell_seconds > 0).mean()), 1e-6)
        self.step = 0
        self.loss = math.nan
        self.validation_loss = math.nan
        self.best_loss = math.inf
        self.best: dict[str, Tensor] = {}
        self.looks_without_improvement = 0
        self.curve: list[dict[str, float]] = []
        self.losses: list[float] = []

    @property
    def finished(self) -> bool:
        """Whether all steps are done, or `patience` looks in a row did not improve the validation loss."""
        return self.step >= self.steps or self.looks_without_improvement >= self.settings.patience

    def run(self, report: Callable[[Status], None], save: Callable[[Trainer], None]) -> Ranker:
        """Train to the end; `report` is called after every step, `save` after every look. Returns the best ranker.

        Raises TrainingError if the validation loss never was finite.
        """
        if self.finished:  # resumed when there was nothing left to do
            report(self.status(False))
        while not self.finished:
            self.advance()
            looked = self.step % self.evaluate_every == 0 or self.step == self.steps
            if looked:
                self.evaluate()
                save(self)
            report(self.status(looked))
        if not self.best:
            raise TrainingError(
                f"The validation loss was never a finite number in {self.step} steps, so there is nothing to keep: "
                "lower the rates or the decays"
            )
        self.ranker.load_state_dict(self.best)
        return self.ranker

    def status(self, evaluated: bool) -> Status:
        """Where the run is now."""
        looks = [Look(int(row["step"]), *(row[name] for name in LOOK_LOSSES)) for row in self.curve]
        return Status(self.step, self.steps, self.loss, self.validation_loss, self.best_loss, evaluated, looks)

    def advance(self) -> None:
        """Take one step of the optimiser; the first one also leaves the saddle of the initial values."""
        settings = self.settings
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate(self.step) * group["rate"]
        epoch, place = divmod(self.step, self.batches_per_epoch)
        if epoch != self.epoch:
            order = np.random.default_rng((settings.seed, TRAIN_ORDER, epoch))
            self.epoch = epoch
            self.batches = epoch_batches(self.group_sizes, settings.batch_contexts, order)
        rng = np.random.default_rng((settings.seed, TRAIN_BATCH, self.step))
        groups = [self.groups[index] for index in self.batches[place]]
        batch, seen, labels = self.examples.training_batch(groups, rng, self.hidden, settings.max_candidates)
        self.optimizer.zero_grad()
        loss = self._loss(self.ranker, batch, labels, seen) / self.shown_per_step
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.ranker.parameters(), settings.gradient_norm)
        self.optimizer.step()
        if self.step == 0 and "layers.0.query" in initial.stuck(self.ranker.trunk):
            self._leave_saddle()
        if self.averaged:
            self.averaged.update_parameters(self.ranker)
        self.loss = loss.item()
        self.losses.append(self.loss)
        self.step += 1

    def learning_rate(self, step: int) -> float:
        """See `rate_at`."""
        return rate_at(step, self.settings.learning_rate, self.warmup_steps, self.steps)

    @torch.inference_mode()
    def evaluate(self) -> None:
        """Measure the loss on the unchanged validation requests; keep the weights, or their average, if they are the best so far."""
        ranker = self.averaged.module if self.averaged else self.ranker
        assert isinstance(ranker, Ranker)
        total, shown, size = 0.0, 0, VALIDATION_BATCH
        for start in range(0, len(self.validation), size):
            batch, labels = self.examples.batch(self.validation[start : start + size])
            total += self._loss(ranker, batch, labels).item()
            shown += int(labels.shown.sum())
        self.validation_loss = total / shown
        losses = (
            float(np.mean(self.losses or [math.nan])),
            self.validation_loss,
            self.learning_rate(max(0, self.step - 1)),
        )
        self.curve.append({"step": self.step, **dict(zip(LOOK_LOSSES, losses, strict=True))})
        self.losses = []
        if self.validation_loss < self.best_loss:
            self.best_loss, self.looks_without_improvement = self.validation_loss, 0
            self.best = {name: value.clone() for name, value in ranker.state_dict().items()}
        else:
            self.looks_without_improvement += 1

    def _loss(self, ranker: Ranker, batch: Batch, labels: Labels, seen: Tensor | None = None) -> Tensor:
        """The loss that training minimises, summed over the candidates; a scalar. `seen`: as `forward_shared` takes it."""
        device, dtype = self.settings.device, getattr(torch, self.settings.dtype)
        batch, labels = batch.to(device), labels.to(device)
        if seen is None:
            logits, continuous = ranker(batch, dtype)
        else:
            logits, continuous = forward_shared(ranker, batch, seen.to(device), dtype)
        loss = action_loss(logits, labels)
        if self.dwell_output is not None and self.settings.dwell_weight:
            weight = self.settings.dwell_weight / logits.shape[-1] / self.dwelt_share
            loss = loss + weight * dwell_loss(continuous[..., self.dwell_output], labels)
        return loss

    def _leave_saddle(self) -> None:
        """Call `initial.leave_saddle` on a CPU copy, because the generator draws on the CPU."""
        moved = Ranker(self.examples.config)
        moved.load_state_dict(self.ranker.state_dict())
        initial.leave_saddle(moved, self.generator)
        self.ranker.load_state_dict(moved.state_dict())

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


def forward_shared(
    ranker: Ranker, batch: Batch, seen: Tensor, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """Score candidates of several requests that share a context: logits float32 `[B, C, A]` and continuous values `[B, C, Z]`.

    `seen` int64 `[B, C]`: so many events of the context, the oldest, came before the candidate's request; it sees no others.

    Exact where the context is causal: no event changes an earlier one. The candidate stands as far behind its own newest event as
    it does when served alone; only a right-anchored model has the user's token a few places nearer.
    """
    hidden, mask, start = ranker.build_inputs(batch)
    slots = start - 1
    mask[:, start:, 1:start] &= torch.arange(slots, device=hidden.device) < seen[:, :, None]
    positions = batch.positions.clone()
    if ranker.config.right_anchored:
        positions[:, start:] -= seen.amax(1, keepdim=True) - seen
    logits, continuous = ranker.heads(ranker.trunk(hidden.to(dtype), positions, mask)[:, start:])
    return logits, continuous
