"""Embedding tables for the split engine: on the device where they fit, else left where they are and gathered from per step."""

from __future__ import annotations

from typing import Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from model.batch import hash_rows
from model.config import ModelConfig
from model.engine import EngineError
from model.ranker import Ranker
from model.split.kernels.contract import Tables
from model.split.step import FIRST_USER, ROWS, StepArrays, embeddings_per_token

Placement = Literal["device", "host"]


class TableSource(Protocol):
    """Where the kernels find embedding rows. `slot` alternates between 0 and 1, so that one step can be prepared while the
    one before it still runs.
    """

    placement: Placement
    tables: Tables

    def prepare(self, host: StepArrays, slot: int) -> None:
        """Make every embedding that the step names readable through `tables`."""


def table_source(
    ranker: Ranker, device: torch.device, capacity: int, placement: Placement | None = None
) -> TableSource:
    """The tables in this `placement`, None for `default_placement`. Raises EngineError unless all are float32 or all bfloat16."""
    tables = ranker.tables
    three = [parameter.detach() for parameter in (tables.user, tables.post, tables.author)]
    if len({table.dtype for table in three}) > 1 or three[0].dtype not in (torch.float32, torch.bfloat16):
        raise EngineError(
            f"embedding tables must all be float32 or all bfloat16, got {[table.dtype for table in three]}"
        )
    placement = placement or default_placement(sum(table.nbytes for table in three), device)
    if placement == "device":
        return DeviceTables(Tables(*(table.to(device) for table in three)))
    return HostTables(ranker.config, Tables(*three), device, capacity)


def default_placement(table_bytes: int, device: torch.device) -> Placement:
    """`host` if a CUDA device's memory, free or not, cannot hold them three times, else `device`. A reload decides as the start did."""
    if device.type == "cuda" and 3 * table_bytes > torch.cuda.mem_get_info(device)[1]:
        return "host"
    return "device"


class DeviceTables:
    """Tables that the kernels read directly."""

    placement: Placement = "device"

    def __init__(self, tables: Tables) -> None:
        self.tables = tables

    def prepare(self, host: StepArrays, slot: int) -> None:
        """Nothing to do: every row is there."""


class HostTables:
    """Tables that stay in host memory. Each step's distinct rows are gathered into pinned memory and copied to the device with
    new row numbers, which the step then uses; row 0 stays 0.
    """

    placement: Placement = "host"

    def __init__(self, config: ModelConfig, tables: Tables, device: torch.device, capacity: int) -> None:
        self._config = config
        self._host = tables
        shape = (capacity * embeddings_per_token(config) + 1, config.width)
        numbers = (capacity, embeddings_per_token(config))
        dtype, pinned = tables.post.dtype, device.type == "cuda"
        self._staging = [torch.zeros(shape, dtype=dtype, pin_memory=pinned) for _ in range(2)]
        self._numbers = [torch.zeros(numbers, dtype=torch.int32, pin_memory=pinned) for _ in range(2)]
        rows = torch.zeros(shape, dtype=dtype, device=device)
        # one renumbered space for the three entities
        self.tables = Tables(rows, rows, rows, torch.zeros(numbers, dtype=torch.int32, device=device))

    def prepare(self, host: StepArrays, slot: int) -> None:
        """Hash, gather, number, start the copies on the current stream."""
        rows, first_user = int(host.counts[ROWS]), int(host.counts[FIRST_USER])
        numbers = self._numbers[slot].numpy()
        posts = self._config.post_hashes.count
        entities = (
            (self._host.user, self._config.user_hashes, host.ids[first_user:rows, 0], numbers[first_user:rows]),
            (self._host.post, self._config.post_hashes, host.ids[:first_user, 0], numbers[:first_user]),
            (self._host.author, self._config.author_hashes, host.ids[:first_user, 1], numbers[:first_user, posts:]),
        )
        filled = 1
        for table, hashes, ids, place in entities:
            filled = self._gather(table, hash_rows(ids, hashes), place, self._staging[slot], filled)
        assert self.tables.numbers is not None
        self.tables.post[:filled].copy_(self._staging[slot][:filled], non_blocking=True)
        self.tables.numbers[:rows].copy_(self._numbers[slot][:rows], non_blocking=True)

    @staticmethod
    def _gather(
        table: Tensor, wanted: NDArray[np.int64], place: NDArray[np.int32], staging: Tensor, filled: int
    ) -> int:
        """Copies the distinct rows to `staging[filled:]` and writes their numbers to `place`; returns the new fill."""
        distinct, inverse = np.unique(wanted, return_inverse=True)
        numbers = np.arange(filled, filled + len(distinct), dtype=np.int32)
        numbers[distinct == 0] = 0
        torch.index_select(table, 0, torch.from_numpy(distinct), out=staging.narrow(0, filled, len(distinct)))
        place[:, : wanted.shape[1]] = numbers[inverse.reshape(wanted.shape)]
        return filled + len(distinct)
