"""One step of the split engine as flat rows: what is in it, and the arrays that describe it. Numpy and layout only, no arithmetic.

A step's rows are its candidates, then history items, then users, tightly packed over all requests. Attention
works on tiles: at most `TILE_ROWS` neighbouring rows of one kind and one request. Padding tokens have no row at all.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from model.config import ModelConfig
from model.inputs import Candidates, Context

TILE_ROWS = 64
CANDIDATE, HISTORY, USER = 0, 1, 2  # kinds of rows, in their order
# places in `StepArrays.counts`
ROWS, CANDIDATES, TILES, CANDIDATE_TILES, FIRST_USER, SLOTS = range(6)
COUNTS = RECORD = 8  # int32 of the counts, of a slot and of a row


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
    few candidates; below that little more than one request needs, since attention starts a program per head for each slot, used
    or not."""
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
class StepArrays:
    """The arrays that describe one step, for up to `R` rows and `X` slots, in one buffer: tensors, or from `host_arrays` numpy views.

        slot X−1 … slot 1, slot 0 | counts | row 0, row 1 …      and, apart     dwell 1, dwell 0 | actions 0, actions 1 …

    Slots and dwell seconds grow downwards, so that what a step uses is contiguous and copied at once. Slot t, int32 `[8]`:
    tile t (first row, rows, request, index in the context of the first row, −1 for candidates, whose tiles come first); then of
    request t: where its state starts (int64, in elements from an anchor tensor), the state's length and capacity. A row, int32
    `[8]`: ids of post and author (int64; a user has one), position, surface, owner (its request, or a candidate's age bucket),
    index in the context (−1 for candidates). History items, float32: dwell seconds and actions `[A]`.
    """

    counts: Any
    rows: Any
    actions: Any
    dwell: Any
    tiles: Any = None
    offsets: Any = None
    states: Any = None
    ids: Any = None

    @property
    def positions(self) -> Any:
        """int32 `[R]`."""
        return self.rows[:, 4]

    @property
    def surfaces(self) -> Any:
        """int32 `[R]`."""
        return self.rows[:, 5]

    @property
    def owners(self) -> Any:
        """int32 `[R, 2]`: request or age bucket, index in the context."""
        return self.rows[:, 6:]

    def kinds(self) -> Iterator[tuple[int, int, int]]:
        """Kind, first row and row after the last of the three kinds of rows; on the host only."""
        ends = [0, *self.counts[[CANDIDATES, FIRST_USER, ROWS]].tolist()]
        return zip((CANDIDATE, HISTORY, USER), ends[:-1], ends[1:], strict=True)


def step_bytes(config: ModelConfig, capacity: int) -> int:
    """Bytes of everything that describes a step of up to `capacity` rows."""
    return _history_start(capacity) + 4 * capacity * (config.actions + 1)


def step_arrays(buffer: Tensor, config: ModelConfig, capacity: int) -> StepArrays:
    """Views into a uint8 buffer of `step_bytes`; `dwell` has the last item first."""
    counts = 4 * RECORD * tile_slots(capacity)
    integers, history = buffer[counts:].view(torch.int32), buffer[_history_start(capacity) :].view(torch.float32)
    return StepArrays(
        integers[:COUNTS],
        integers[COUNTS:][: capacity * RECORD].view(capacity, RECORD),
        history[capacity:].view(capacity, config.actions),
        history[:capacity],
    )


def host_arrays(buffer: Tensor, config: ModelConfig, capacity: int) -> StepArrays:
    """`step_arrays` as numpy arrays, slots, ids and dwell seconds in their order; for a buffer on the CPU."""
    arrays = step_arrays(buffer, config, capacity)
    slots = buffer[: 4 * RECORD * tile_slots(capacity)].numpy().reshape(tile_slots(capacity), 4 * RECORD)[::-1]
    narrow, wide = slots.view(np.int32), slots.view(np.int64)
    rows = arrays.rows.numpy()
    return StepArrays(
        arrays.counts.numpy(),
        rows,
        arrays.actions.numpy(),
        arrays.dwell.numpy()[::-1],
        tiles=narrow[:, :4],
        offsets=wide[:, 2],
        states=narrow[:, 6:],
        ids=rows.view(np.uint64)[:, :2],
    )


def used_bytes(host: StepArrays, config: ModelConfig, capacity: int) -> list[slice]:
    """The parts of the buffer that a written step uses: slots, counts and rows; where there are any, history rows."""
    rows, candidates, _, _, first_user, slots = host.counts[:6].tolist()
    counts, history = 4 * RECORD * tile_slots(capacity), _history_start(capacity)
    used = [slice(counts - 4 * RECORD * slots, counts + 4 * COUNTS + 4 * RECORD * rows)]
    if items := first_user - candidates:
        actions = history + 4 * capacity
        used.append(slice(actions - 4 * items, actions + 4 * config.actions * items))
    return used


def _history_start(capacity: int) -> int:
    return 4 * RECORD * (tile_slots(capacity) + capacity) + 4 * COUNTS


def embeddings_per_token(config: ModelConfig) -> int:
    """The most hash embeddings that any kind of token has."""
    return max(config.post_hashes.count + config.author_hashes.count, config.user_hashes.count)
