"""Embedding tables for the split engine: on the device where they fit, else left where they are and gathered from per step."""

from __future__ import annotations

from typing import Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from model.config import ModelConfig
from model.engine import EngineError
from model.ranker import Ranker
from model.split.kernels.contract import Tables
from model.split.step import CANDIDATES, ROWS, TOKEN_TILES, USER, StepArrays, embeddings_per_token

Placement = Literal["device", "host"]


class TableSource(Protocol):
    """Where the kernels find embedding rows. `slot` alternates between 0 and 1, so that one step can be prepared while the
    one before it still runs.
    """

    placement: Placement
    tables: Tables

    def prepare(self, host: StepArrays, slot: int) -> None:
        """Make every row that the step names readable through `tables`; may rewrite the step's embedding rows."""


def table_source(
    ranker: Ranker, device: torch.device, capacity: int, placement: Placement | None = None
) -> TableSource:
    """The tables where `placement` says, None leaves it to `default_placement`. Raises EngineError where they differ in dtype."""
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
    """On a CUDA device whose memory, free or not, could hold them three times: a reload decides as the start did. CPUs read in place."""
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
    """Tables that stay in host memory. Each step's distinct rows are gathered into pinned memory, copied to the device in
    one go, and the step's embedding rows are renumbered; row 0 stays 0.
    """

    placement: Placement = "host"

    def __init__(self, config: ModelConfig, tables: Tables, device: torch.device, capacity: int) -> None:
        self._config = config
        self._host = tables
        self._posts = config.post_hashes.count
        self._used = self._posts + config.author_hashes.count
        room = capacity * embeddings_per_token(config) + 1
        pinned = device.type == "cuda"
        shape = (room, config.width)
        dtype = tables.post.dtype
        self._staging = [torch.zeros(shape, dtype=dtype, pin_memory=pinned) for _ in range(2)]
        device_rows = torch.zeros(shape, dtype=dtype, device=device)
        self._device_rows = device_rows
        self.tables = Tables(device_rows, device_rows, device_rows)  # one renumbered space for the three entities

    def prepare(self, host: StepArrays, slot: int) -> None:
        """Gather, renumber, start the copy on the current stream."""
        rows, candidates = int(host.counts[ROWS]), int(host.counts[CANDIDATES])
        tiles = host.token_tiles[: host.counts[TOKEN_TILES]]
        users = int(tiles[tiles[:, 2] == USER, 0].min(initial=rows))
        assert candidates <= users <= rows
        embedded = host.embedding_rows
        filled = 1
        places = (
            (self._host.user, embedded[users:rows, : self._config.user_hashes.count]),
            (self._host.post, embedded[:users, : self._posts]),
            (self._host.author, embedded[:users, self._posts : self._used]),
        )
        for table, place in places:
            filled = self._gather(table, place, self._staging[slot], filled)
        self._device_rows[:filled].copy_(self._staging[slot][:filled], non_blocking=True)

    @staticmethod
    def _gather(table: Tensor, place: NDArray[np.int32], staging: Tensor, filled: int) -> int:
        """Copies the distinct rows behind `place` to `staging[filled:]` and renumbers it; returns the new fill."""
        distinct, inverse = np.unique(place, return_inverse=True)
        numbers = np.arange(filled, filled + len(distinct), dtype=np.int32)
        numbers[distinct == 0] = 0
        index = torch.from_numpy(distinct.astype(np.int64))
        torch.index_select(table, 0, index, out=staging[filled : filled + len(distinct)])
        place[...] = numbers[inverse.reshape(place.shape)]
        return filled + len(distinct)
