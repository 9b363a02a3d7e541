"""One step of the split engine as flat rows: who is in it, and the arrays that describe it. Numpy and layout only, no arithmetic.

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
KINDS = CANDIDATE, HISTORY, USER = 0, 1, 2
# places in `StepArrays.counts`
ROWS, CANDIDATES, TILES, CANDIDATE_TILES, TOKEN_TILES = range(5)


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

    def items(self) -> NDArray[np.int64]:
        """Places in the history of the items that are not padding."""
        return np.flatnonzero(self.context.post_ids[self.first_history :]) + self.first_history


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
        """Take a context of `rows` tokens."""
        self.contexts.append(work)
        self.rows += rows
        self.tiles += context_tiles(rows)

    def add_candidates(self, work: CandidateWork) -> None:
        """Take some candidates."""
        self.candidates.append(work)
        self.rows += len(work.candidates)
        self.tiles += -(-len(work.candidates) // TILE_ROWS)

    def states(self) -> list[ContextState]:
        """The distinct states; their places here are the request numbers in the arrays."""
        states = [work.state for work in self.contexts] + [work.state for work in self.candidates]
        return list({id(state): state for state in states}.values())


def tile_slots(rows: int) -> int:
    """How many tiles, hence requests, a step of up to `rows` rows has room for."""
    return rows // 8 + 16


def context_tiles(rows: int) -> int:
    """Tiles that a context of `rows` new tokens needs: one for the user, the history in tiles of its own."""
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
            if take <= 0 or (start + take < len(candidates) and take < TILE_ROWS):
                plans.append(StepPlan())
                continue
            if start + take < len(candidates):
                take -= take % TILE_ROWS
            plans[-1].add_candidates(CandidateWork(item, start, candidates.chunk(start, start + take), state))
            start += take
    return plans


@dataclass(frozen=True, slots=True, eq=False)
class StepArrays:
    """The arrays of one step, as tensors or as numpy views of the same bytes; `R` rows, `X` tiles, `E` embeddings a token.

    counts int32 `[8]`; offsets int64 `[X]`: where a request's state starts, in elements from an anchor tensor;
    lengths int32 `[X, 2]`: length and capacity of that state; tiles int32 `[X, 4]`: first row, rows, request, index in the
    context of the first row (−1 for candidates), candidates' tiles first; positions int32 `[R]`;
    token_tiles int32 `[R/64 + 3, 4]`: first row, rows, kind; embedding_rows int32 `[R, E]`; features int32 `[R, 2]`:
    surface, age bucket; owners int32 `[R, 2]`: request, index in the context (−1 for candidates);
    actions float32 `[R, A]`; dwell float32 `[R]`, seconds.
    """

    counts: Any
    offsets: Any
    lengths: Any
    tiles: Any
    positions: Any
    token_tiles: Any
    embedding_rows: Any
    features: Any
    owners: Any
    actions: Any
    dwell: Any

    def numpy(self) -> StepArrays:
        """The same memory as numpy arrays; only for tensors on the CPU."""
        return StepArrays(*(getattr(self, name).numpy() for name in self.__slots__))


def step_fields(
    config: ModelConfig, capacity: int, rows: int
) -> Iterator[tuple[str, torch.dtype, tuple[int, ...], int]]:
    """Name, dtype, shape and byte offset of each array; those that a tail of any size reads come first, sized by `capacity`."""
    embeddings = embeddings_per_token(config)
    slots = tile_slots(capacity)
    ints, floats = torch.int32, torch.float32
    shapes: list[tuple[str, torch.dtype, tuple[int, ...]]] = [
        ("counts", ints, (8,)),
        ("offsets", torch.int64, (slots,)),
        ("lengths", ints, (slots, 2)),
        ("tiles", ints, (slots, 4)),
        ("positions", ints, (capacity,)),
        ("token_tiles", ints, (rows // TILE_ROWS + 3, 4)),
        ("embedding_rows", ints, (rows, embeddings)),
        ("features", ints, (rows, 2)),
        ("owners", ints, (rows, 2)),
        ("actions", floats, (rows, config.actions)),
        ("dwell", floats, (rows,)),
    ]
    offset = 0
    for name, dtype, shape in shapes:
        yield name, dtype, shape, offset
        size = int(np.prod(shape)) * dtype.itemsize
        offset += -(-size // 256) * 256


def step_bytes(config: ModelConfig, capacity: int, rows: int) -> int:
    """Bytes of all arrays together: one copy moves them to the device."""
    *_, (_, dtype, shape, offset) = step_fields(config, capacity, rows)
    return offset + -(-int(np.prod(shape)) * dtype.itemsize // 256) * 256


def step_arrays(buffer: Tensor, config: ModelConfig, capacity: int, rows: int) -> StepArrays:
    """Views into a uint8 buffer of at least `step_bytes`."""
    views = {}
    for name, dtype, shape, offset in step_fields(config, capacity, rows):
        size = int(np.prod(shape)) * dtype.itemsize
        views[name] = buffer[offset : offset + size].view(dtype).view(shape)
    return StepArrays(**views)


def embeddings_per_token(config: ModelConfig) -> int:
    """Room for the hash embeddings of any kind of token."""
    return max(config.post_hashes.count + config.author_hashes.count, config.user_hashes.count)
