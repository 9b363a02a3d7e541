"""One step of the split engine as flat rows: what is in it, and the arrays that describe it. Layout only, no arithmetic.

A step's rows are its candidates, then history items, then users, tightly packed over all requests. Attention
works on tiles: at most `TILE_ROWS` neighbouring rows of one kind and one request. Padding tokens have no row at all.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from model.config import ModelConfig
from model.inputs import Candidates, Context

TILE_ROWS = 64
CANDIDATE, HISTORY, USER = range(3)  # kinds of rows, in their order

# What host and kernels read of a step, by name. Kernels take the places of fields from here, see `kernels.fields`.
COUNTS = np.dtype(
    [
        ("rows", "<i4"),
        ("candidates", "<i4"),
        ("first_user", "<i4"),  # row of the first user
        ("tiles", "<i4"),
        ("candidate_tiles", "<i4"),  # they come first
        ("unused", "<i4", 3),
    ]
)
TILE = np.dtype(
    [
        ("first_row", "<i4"),
        ("rows", "<i4"),
        ("request", "<i4"),
        ("place", "<i4"),  # of the first row in its context, -1 for candidates
    ]
)
STATE = np.dtype(
    [
        ("start", "<i8"),  # of the request's keys and values, in elements from an anchor tensor
        ("length", "<i4"),  # tokens
        ("capacity", "<i4"),  # tokens
    ]
)
ROW = np.dtype(
    [
        ("post", "<u8"),  # a user's id for a user
        ("author", "<u8"),
        ("position", "<i4"),
        ("surface", "<i4"),
        ("age", "<i4"),  # a candidate's bucket
        ("request", "<i4"),  # a context row's
        ("place", "<i4"),  # in its context, -1 for candidates
        ("unused", "<i4"),
    ]
)


@dataclass(frozen=True, slots=True, eq=False)
class ContextState:
    """Keys and values of one context, `[L, 2, capacity, G, K]` in the engine's dtype, the first `length` of them in use.

    `history` is how many history items it covers, padding included.
    """

    keys_values: Tensor
    length: int
    history: int

    @property
    def nbytes(self) -> int:
        """Device memory held."""
        return self.keys_values.numel() * self.keys_values.element_size()


@dataclass(frozen=True, slots=True, eq=False)
class ContextWork:
    """Context tokens to compute into `state`: history items from `first_history` on, and the user if nothing is known yet."""

    context: Context
    state: ContextState
    first_history: int = 0
    first_index: int = 0

    @property
    def has_user(self) -> bool:
        """Whether the user's own token is to be computed here."""
        return self.first_history == 0 and self.first_index == 0 and self.context.user_id != 0


@dataclass(frozen=True, slots=True, eq=False)
class CandidateWork:
    """Candidates `start …` of item number `item`, scored against `state`."""

    item: int
    start: int
    candidates: Candidates
    state: ContextState


@dataclass(slots=True)
class StepPlan:
    """What one step computes. `rows` and `tiles` count what `contexts` and `candidates` need."""

    contexts: list[ContextWork] = field(default_factory=list)
    candidates: list[CandidateWork] = field(default_factory=list)
    rows: int = 0
    tiles: int = 0

    def add_context(self, work: ContextWork, rows: int) -> None:
        """Add a context of `rows` tokens."""
        self.contexts.append(work)
        self.rows += rows
        self.tiles += context_tiles(rows)

    def add_candidates(self, work: CandidateWork) -> None:
        """Add some candidates."""
        self.candidates.append(work)
        self.rows += len(work.candidates)
        self.tiles += -(-len(work.candidates) // TILE_ROWS)

    def states(self) -> list[ContextState]:
        """The distinct states; their places here are the request numbers in the arrays."""
        states = [work.state for work in self.contexts] + [work.state for work in self.candidates]
        return list({id(state): state for state in states}.values())


def tile_slots(rows: int) -> int:
    """How many tiles, hence requests, a step of up to `rows` rows has room for: at least 64 from 384 rows on, for many requests of
    few candidates. Attention starts a program per head for each slot, used or not."""
    return max(rows // 32 + 16, 64 if rows >= 384 else 0)


def context_tiles(rows: int) -> int:
    """Tiles that a context of `rows` new tokens needs: one for the user, and separate ones for the history."""
    return 1 + -(-rows // TILE_ROWS)


def plan_steps(
    works: Sequence[tuple[ContextWork | None, int, Candidates, ContextState]], capacity: int
) -> list[StepPlan]:
    """Spread work over steps of at most `capacity` rows, in order; lists of candidates are cut, contexts are not.

    Each entry is the context to compute first (or None), the item's number, its candidates, and the state they see.
    """
    plans = [StepPlan()]
    slots = tile_slots(capacity)
    for context, item, candidates, state in works:
        if context is not None:
            rows = context.state.length - context.first_index
            if plans[-1].rows + rows > capacity or plans[-1].tiles + context_tiles(rows) > slots:
                plans.append(StepPlan())
            plans[-1].add_context(context, rows)
        start = 0
        while start < len(candidates):
            room = min(capacity - plans[-1].rows, (slots - plans[-1].tiles) * TILE_ROWS)
            take = min(room, len(candidates) - start)
            if start + take < len(candidates) and take < TILE_ROWS:
                plans.append(StepPlan())
                continue
            if start + take < len(candidates):
                take -= take % TILE_ROWS
            chunk = candidates if take == len(candidates) else candidates.chunk(start, start + take)
            plans[-1].add_candidates(CandidateWork(item, start, chunk, state))
            start += take
    return [plan for plan in plans if plan.rows]


@dataclass(frozen=True, slots=True, eq=False)
class HostArrays:
    """What describes a step, in numpy, by the names of `COUNTS`, `TILE`, `STATE` and `ROW`.

    counts `[1]`; tiles and states `[X]`, X = `tile_slots`; rows `[R]`; codes int32 `[R, L]` of candidates and history items; history
    float32 `[R, A + 1]`: the actions and the dwell seconds of history items.
    """

    counts: NDArray[Any]
    tiles: NDArray[Any]
    states: NDArray[Any]
    rows: NDArray[Any]
    codes: NDArray[np.int32]
    history: NDArray[np.float32]

    def count(self, name: str) -> int:
        """One of the counts."""
        return int(self.counts[name][0])

    def kinds(self) -> Iterator[tuple[int, int, int]]:
        """Kind, first row and row after the last of the three kinds of rows."""
        ends = [0, self.count("candidates"), self.count("first_user"), self.count("rows")]
        return zip((CANDIDATE, HISTORY, USER), ends[:-1], ends[1:], strict=True)


@dataclass(frozen=True, slots=True, eq=False)
class DeviceArrays:
    """The same as `HostArrays` on the device: counts int32 `[8]`, tiles and states int32 `[X, 4]`, rows int32 `[R, 10]`, codes, history."""

    counts: Tensor
    tiles: Tensor
    states: Tensor
    rows: Tensor
    codes: Tensor
    history: Tensor

    def row(self, name: str) -> Tensor:
        """One int32 field of all rows, `[R]`."""
        return self.rows[:, word(ROW, name)]


def word(record: np.dtype[Any], name: str) -> int:
    """Where a field of a record begins, in int32."""
    fields = record.fields
    assert fields is not None
    return int(fields[name][1]) // 4


def words(record: np.dtype[Any]) -> int:
    """How many int32 a record has."""
    return record.itemsize // 4


def step_bytes(config: ModelConfig, capacity: int) -> int:
    """Bytes of everything that describes a step of up to `capacity` rows."""
    return sum(_sizes(config, capacity))


def _sizes(config: ModelConfig, capacity: int) -> list[int]:
    slots = tile_slots(capacity)
    records = [COUNTS.itemsize, slots * TILE.itemsize, slots * STATE.itemsize, capacity * ROW.itemsize]
    return [*records, 4 * capacity * config.token_levels, 4 * capacity * (config.actions + 1)]


def device_arrays(buffer: Tensor, config: ModelConfig, capacity: int) -> DeviceArrays:
    """Views into a uint8 buffer of `step_bytes`."""
    *records, codes, history = buffer.split(_sizes(config, capacity))
    counts, tiles, states, rows = (part.view(torch.int32) for part in records)
    return DeviceArrays(
        counts,
        tiles.view(-1, words(TILE)),
        states.view(-1, words(STATE)),
        rows.view(-1, words(ROW)),
        codes.view(torch.int32).view(capacity, config.token_levels),
        history.view(torch.float32).view(capacity, config.actions + 1),
    )


def host_arrays(buffer: Tensor, config: ModelConfig, capacity: int) -> HostArrays:
    """The same of a buffer on the CPU, in numpy."""
    *records, codes, history = (part.numpy() for part in buffer.split(_sizes(config, capacity)))
    counts, tiles, states, rows = (
        part.view(record) for part, record in zip(records, (COUNTS, TILE, STATE, ROW), strict=True)
    )
    return HostArrays(
        counts,
        tiles,
        states,
        rows,
        codes.view(np.int32).reshape(capacity, config.token_levels),
        history.view(np.float32).reshape(capacity, config.actions + 1),
    )


def used_bytes(host: HostArrays, config: ModelConfig, capacity: int) -> list[slice]:
    """The parts of the buffer that a written step uses: all up to its last row and, where there are any, its codes and history items."""
    sizes = _sizes(config, capacity)
    first_row, codes, history = sum(sizes[:3]), sum(sizes[:4]), sum(sizes[:5])
    used = [slice(0, first_row + ROW.itemsize * host.count("rows"))]
    if config.token_levels and (posts := host.count("first_user")):
        used.append(slice(codes, codes + 4 * config.token_levels * posts))
    if items := host.count("first_user") - host.count("candidates"):
        used.append(slice(history, history + 4 * (config.actions + 1) * items))
    return used
