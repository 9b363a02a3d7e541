"""Exchanges gradients between the processes of a training run, so that all take the step that one process would take.

With torchrun each process computes its part of every batch. Gradients of the trunk go through DistributedDataParallel; those of the
embedding tables are sent as row ids and summed gradients, because a batch looks up few rows of a large table.
`mean_gradients` is the plain definition of the exchange's result.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.nn  # whose functions hold the group there is when they are imported, which an optimizer does
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from model.batch import Batch
from model.ranker import EmbeddingTables, Ranker
from weights.training.examples import Labels
from weights.training.losses import total_loss

T = TypeVar("T")


class ProcessesError(ValueError):
    """The processes cannot train together; the message says why."""


class Objective(nn.Module):
    """A batch's loss as one module: only from the loss can DistributedDataParallel see which parameters have no gradient on this
    process, for example the continuous head's if no dwell is known."""

    def __init__(self, ranker: Ranker, continuous_weight: float, dtype: torch.dtype, dwell_output: int = 0) -> None:
        super().__init__()
        self.ranker, self.continuous_weight, self.dtype = ranker, continuous_weight, dtype
        self.dwell_output = dwell_output

    def forward(self, batch: Batch, labels: Labels) -> Tensor:
        """The loss, a scalar."""
        logits, continuous = self.ranker(batch, self.dtype)
        return total_loss(logits, continuous, labels, self.continuous_weight, self.dwell_output)


class Processes:
    """The processes of a run; this one is `rank` of `size`. A single process exchanges nothing."""

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        self.rank, self.size = rank, size

    def part(self, requests: int) -> slice:
        """This process's share of a batch's requests. Raises ProcessesError if they cannot be divided evenly."""
        if requests % self.size:
            raise ProcessesError(
                f"{self.size} processes cannot share a batch of {requests} requests: batch_requests must be a multiple"
            )
        each = requests // self.size
        return slice(self.rank * each, (self.rank + 1) * each)

    def distributed(self, objective: Objective) -> nn.Module:
        """Wrap the objective so that a backward leaves the trunk's mean gradient over all processes. `exchange` does the tables."""
        if self.size == 1:
            return objective
        tables = [name for name, _ in objective.named_parameters() if name.startswith("ranker.tables.")]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(objective, tables)
        # looking for unused parameters also keeps the buckets as they are: a resumed run adds in the same order
        return DistributedDataParallel(objective, find_unused_parameters=True)

    def exchange(self, tables: EmbeddingTables, batch: Batch) -> None:
        """After a backward of this process's `batch`, leave the mean gradient over all processes on the tables.

        Gradients are added in the order of ranks, so every process has the same bits.
        """
        if self.size == 1:
            return
        for table, rows in looked_up(tables, batch):
            gradient = table.grad
            assert gradient is not None
            mine = torch.unique(rows)
            mine = mine[mine != 0]  # row 0 is padding and has no gradient
            parts = self.gather((mine.cpu(), (gradient[mine] / self.size).cpu()))
            gradient.zero_()
            for ids, values in parts:
                gradient.index_add_(0, ids.to(gradient.device), values.to(gradient.device))

    def mean(self, value: Tensor) -> float:
        """The mean of a scalar over all processes."""
        if self.size > 1:
            value = value.detach() / self.size
            dist.all_reduce(value)
        return value.item()

    def gather(self, value: T) -> list[T]:
        """Give every process the list of all processes' values, by rank."""
        if self.size == 1:
            return [value]
        everyone: list[Any] = [None] * self.size
        dist.all_gather_object(everyone, value)
        return everyone

    def agree(self, facts: dict[str, Any]) -> None:
        """Raises ProcessesError, on every process, if one has other facts than rank 0."""
        everyone = self.gather(facts)
        differing = [name for name in everyone[0] if any(other.get(name) != everyone[0][name] for other in everyone)]
        if differing:
            raise ProcessesError(
                f"the processes of this run differ in {', '.join(differing)}: all need the same arguments, log, state and build"
            )


@contextmanager
def joined(device: str) -> Iterator[Processes]:
    """Yield the processes that torchrun started, joined by NCCL on GPUs and by Gloo elsewhere; without torchrun, this one alone.

    Raises ProcessesError if `device` is not available.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise ProcessesError("device=cuda needs a card and a build of torch for it")
    size = int(os.environ.get("WORLD_SIZE", "1")) if "RANK" in os.environ else 1
    if size == 1:
        yield Processes()
        return
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    group = dist.group.WORLD
    try:
        yield Processes(dist.get_rank(), size)
    except BaseException as error:
        traceback.clear_frames(error.__traceback__)  # they hold modules that hold the group
        raise
    finally:
        dist.destroy_process_group()
        del group  # the last one: only from Python is it taken down without the interpreter's lock, which its threads may wait for


def looked_up(tables: EmbeddingTables, batch: Batch) -> list[tuple[Tensor, Tensor]]:
    """Each table and the rows of it that a batch reads, flat."""
    posts = (batch.history_post_rows, batch.candidate_post_rows)
    authors = (batch.history_author_rows, batch.candidate_author_rows)
    return [
        (tables.user, batch.user_rows.flatten()),
        (tables.post, torch.cat([rows.flatten() for rows in posts])),
        (tables.author, torch.cat([rows.flatten() for rows in authors])),
    ]


def mean_gradients(objective: Objective, parts: Sequence[tuple[Batch, Labels]]) -> None:
    """The plain definition: leave the gradients that a backward and an exchange leave when each part has its own process.

    With the parts' `labels.shown_weight` and `dwelt_weight` this is the gradient of the whole batch's loss.
    """
    objective.zero_grad()
    for batch, labels in parts:
        (objective(batch, labels) / len(parts)).backward()


def weight_sums(module: nn.Module) -> list[int]:
    """A checksum per parameter: the sum of its values' bits, which changes with any single bit."""
    return torch.stack([p.detach().view(torch.int32).sum() for p in module.parameters()]).tolist()
