"""Fills a step's arrays from its plan: ids, features, positions, tiles; one numpy call for all requests. Numpy only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from model.batch import history_start, slot_period, slot_positions
from model.config import CandidatePositions, ModelConfig
from model.split.step import TILE_ROWS, CandidateWork, ContextState, ContextWork, StepArrays, StepPlan

Integers = NDArray[np.int64]


class StepWriter:
    """Fills `StepArrays` (numpy) from a plan. `anchor` is the tensor from which state offsets are counted."""

    def __init__(self, config: ModelConfig, mode: CandidatePositions, anchor: Tensor) -> None:
        self.config = config
        self.mode = mode
        self.anchor = anchor

    def write(self, plan: StepPlan, arrays: StepArrays) -> None:
        """Fill every array up to the plan's counts. What lies beyond stays as it was and is not read."""
        states = plan.states()
        requests = {id(state): number for number, state in enumerate(states)}
        self._write_states(states, arrays)
        candidates = self._write_candidates(plan.candidates, arrays, requests)
        first_history = int(candidates[0].sum())
        history = self._write_history(plan.contexts, arrays, requests, first_history)
        first_user = first_history + int(history[0].sum())
        users = self._write_users(plan.contexts, arrays, requests, first_user)
        tiles, pieces = _cut(np.concatenate((candidates, history, users), 1))
        arrays.tiles[: len(tiles)] = tiles
        candidate_tiles, slots = pieces[: candidates.shape[1]].sum(), max(len(tiles), len(states))
        arrays.counts[:6] = (
            first_user + users.shape[1], first_history, len(tiles), candidate_tiles, first_user, slots
        )  # fmt: skip

    def _write_states(self, states: Sequence[ContextState], arrays: StepArrays) -> None:
        """Where each state lies, its length and its capacity."""
        base, size = self.anchor.data_ptr(), self.anchor.element_size()
        lengths = np.array([state.length for state in states])
        places = np.array([state.keys_values.data_ptr() for state in states])
        arrays.offsets[: len(states)] = np.where(lengths > 0, (places - base) // size, 0)
        arrays.states[: len(states), 0] = lengths
        arrays.states[: len(states), 1] = [state.keys_values.size(2) for state in states]

    def _write_candidates(
        self, works: Sequence[CandidateWork], arrays: StepArrays, requests: dict[int, int]
    ) -> Integers:
        """Returns the spans of rows, see `_cut`."""
        if not works:
            return _NO_SPANS
        config = self.config
        lists = [work.candidates for work in works]
        posts = [each.post_ids for each in lists]
        counts = np.array([len(each) for each in posts])
        stop = int(counts.sum())
        _join(posts, arrays.ids[:stop, 0])
        _join([each.author_ids for each in lists], arrays.ids[:stop, 1])
        if slot_period(config, self.mode) == 1:
            arrays.positions[:stop] = config.candidate_position
        else:
            _join([slot_positions(each, config, self.mode) for each in lists], arrays.positions[:stop])
        _join([each.surfaces for each in lists], arrays.surfaces[:stop])
        if config.has_post_age:
            _join([each.age_buckets for each in lists], arrays.owners[:stop, 0])
        arrays.owners[:stop, 1] = -1
        return np.stack((counts, [requests[id(work.state)] for work in works], np.full_like(counts, -1)))

    def _write_history(
        self, works: Sequence[ContextWork], arrays: StepArrays, requests: dict[int, int], row: int
    ) -> Integers:
        """Returns the spans of rows, see `_cut`. Items with post id 0 are padding and get no row."""
        if not works:
            return _NO_SPANS
        contexts, firsts = [work.context for work in works], [work.first_history for work in works]
        new = [slice(first, None) for first in firsts] if any(firsts) else None

        def columns(whole: list[NDArray[Any]]) -> list[NDArray[Any]]:
            return whole if new is None else [each[part] for each, part in zip(whole, new, strict=True)]

        posts = [each.post_ids for each in contexts]
        lengths, known = np.array([len(each) for each in posts]), np.array(firsts, np.int64)
        indices = np.array([work.first_index + work.has_user for work in works])
        counts = np.array([work.state.length for work in works]) - indices
        owners = np.array([requests[id(work.state)] for work in works])
        total = int(counts.sum())
        rows, items = slice(row, row + total), slice(0, total)
        posts = columns(posts)
        pick = np.concatenate(posts) != 0 if total < int((lengths - known).sum()) else None
        _join(posts, arrays.ids[rows, 0], pick)
        _join(columns([each.author_ids for each in contexts]), arrays.ids[rows, 1], pick)
        places = _counting(lengths - known, history_start(lengths, self.config) + known)
        arrays.positions[rows] = places if pick is None else places[pick]
        _join(columns([each.surfaces for each in contexts]), arrays.surfaces[rows], pick)
        _join(columns([each.actions for each in contexts]), arrays.actions[items], pick)
        _join(columns([each.dwell_seconds for each in contexts]), arrays.dwell[items], pick)
        arrays.owners[rows, 0] = np.repeat(owners, counts)
        arrays.owners[rows, 1] = _counting(counts, indices)
        return np.stack((counts, owners, indices))

    def _write_users(
        self, works: Sequence[ContextWork], arrays: StepArrays, requests: dict[int, int], row: int
    ) -> Integers:
        """Returns the spans, one row each."""
        works = [work for work in works if work.has_user]
        rows = slice(row, row + len(works))
        owners = np.array([requests[id(work.state)] for work in works], np.int64)
        arrays.ids[rows, 0] = np.array([work.context.user_id for work in works], np.uint64)
        arrays.positions[rows] = 0
        arrays.owners[rows, 0] = owners
        arrays.owners[rows, 1] = 0
        return np.stack((np.ones_like(owners), owners, np.zeros_like(owners)))


_NO_SPANS = np.zeros((3, 0), np.int64)


def _join(parts: Sequence[NDArray[Any]], target: NDArray[Any], pick: NDArray[np.bool_] | None = None) -> None:
    """Write the parts one after another into the target, or only their elements in `pick`."""
    if pick is None:
        np.concatenate(parts, out=target)
    else:
        target[...] = np.concatenate(parts)[pick]


def _counting(counts: Integers, starts: Integers) -> NDArray[np.int32]:
    """For each count, that many successive integers from its start on, all concatenated."""
    ends = np.cumsum(counts)
    shift = (starts - (ends - counts)).astype(np.int32)
    numbers: NDArray[np.int32] = np.repeat(shift, counts)
    numbers += np.arange(len(numbers))
    return numbers


def _cut(spans: Integers) -> tuple[NDArray[np.int32], Integers]:
    """Tiles `[n, 4]` over spans of rows `[3, m]` that lie one after another, given by count, owner and index (or −1): first row,
    rows, owner, index. Also returns how many tiles each span has."""
    counts, _, indices = spans
    pieces = -(-counts // TILE_ROWS)
    within = TILE_ROWS * _counting(pieces, np.zeros_like(pieces))
    whole = np.concatenate((spans, [np.cumsum(counts) - counts])).repeat(pieces, 1)
    counts, owners, indices, first = whole
    tiles = np.empty((len(within), 4), np.int32)
    tiles[:, 0] = first + within
    tiles[:, 1] = np.minimum(TILE_ROWS, counts - within)
    tiles[:, 2] = owners
    tiles[:, 3] = np.where(indices < 0, indices, indices + within)
    return tiles, pieces
