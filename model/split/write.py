"""Fills a step's arrays from its plan: ids, features, positions, tiles; one numpy call for all requests. Numpy only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from model.batch import history_start, slot_period, slot_positions
from model.config import CandidatePositions, ModelConfig
from model.split.step import TILE_ROWS, StepArrays, StepPlan

Integers = NDArray[np.int64]


class StepWriter:
    """Fills `StepArrays` (numpy) from a plan. `anchor` is the tensor from which state offsets are counted."""

    def __init__(self, config: ModelConfig, mode: CandidatePositions, anchor: Tensor) -> None:
        self.config = config
        self.mode = mode
        self.anchor = anchor

    def write(self, plan: StepPlan, arrays: StepArrays) -> None:
        """Every array up to the plan's counts; what lies beyond stays as it was, and is not read."""
        requests = self._write_states(plan, arrays)
        candidate_tiles, candidates = self._write_candidates(plan, arrays, requests)
        history_tiles, first_user = self._write_history(plan, arrays, requests, candidates)
        user_tiles, rows = self._write_users(plan, arrays, requests, first_user)
        tiles = np.concatenate((candidate_tiles, history_tiles, user_tiles))
        arrays.tiles[: len(tiles)] = tiles
        slots = max(len(tiles), len(requests))
        arrays.counts[:6] = (rows, candidates, len(tiles), len(candidate_tiles), first_user, slots)

    def _write_states(self, plan: StepPlan, arrays: StepArrays) -> dict[int, int]:
        """A number for each distinct state; returns them by the state's identity."""
        states = plan.states()
        base, size = self.anchor.data_ptr(), self.anchor.element_size()
        arrays.offsets[: len(states)] = [
            (state.keys_values.data_ptr() - base) // size if state.length else 0 for state in states
        ]
        arrays.states[: len(states), 0] = [state.length for state in states]
        arrays.states[: len(states), 1] = [state.keys_values.size(2) for state in states]
        return {id(state): number for number, state in enumerate(states)}

    def _write_candidates(
        self, plan: StepPlan, arrays: StepArrays, requests: dict[int, int]
    ) -> tuple[NDArray[np.int32], int]:
        """Returns the tiles and the row after the last."""
        if not plan.candidates:
            return _NO_TILES, 0
        config = self.config
        lists = [work.candidates for work in plan.candidates]
        counts = np.array([len(each) for each in lists])
        stop = int(counts.sum())
        _join([each.post_ids for each in lists], arrays.ids[:stop, 0])
        _join([each.author_ids for each in lists], arrays.ids[:stop, 1])
        if slot_period(config, self.mode) == 1:
            arrays.positions[:stop] = config.candidate_position
        else:
            _join([slot_positions(each, config, self.mode) for each in lists], arrays.positions[:stop])
        _join([each.surfaces for each in lists], arrays.surfaces[:stop])
        if config.has_post_age:
            _join([each.age_buckets for each in lists], arrays.owners[:stop, 0])
        arrays.owners[:stop, 1] = -1
        owners = np.array([requests[id(work.state)] for work in plan.candidates])
        return _cut(0, counts, owners, np.full_like(counts, -1)), stop

    def _write_history(
        self, plan: StepPlan, arrays: StepArrays, requests: dict[int, int], row: int
    ) -> tuple[NDArray[np.int32], int]:
        """Returns the tiles and the row after the last. Items with post id 0 are padding and get no row."""
        works = plan.contexts
        if not works:
            return _NO_TILES, row
        firsts = [work.first_history for work in works]
        anything_known = any(firsts)

        def columns(name: str) -> list[NDArray[Any]]:
            whole = [getattr(work.context, name) for work in works]
            return [each[first:] for each, first in zip(whole, firsts, strict=True)] if anything_known else whole

        posts = columns("post_ids")
        spans, counts = (np.array([count(each) for each in posts]) for count in (len, np.count_nonzero))
        stop = row + int(counts.sum())
        rows, items = slice(row, stop), slice(0, stop - row)
        pick = np.concatenate(posts) != 0 if stop - row < spans.sum() else None
        starts = np.array(firsts) + [history_start(len(work.context), self.config) for work in works]
        owners = np.array([requests[id(work.state)] for work in works])
        indices = np.array([work.first_index + work.has_user for work in works])
        _join(posts, arrays.ids[rows, 0], pick)
        _join(columns("author_ids"), arrays.ids[rows, 1], pick)
        _join([_counting(spans, starts)], arrays.positions[rows], pick)
        _join(columns("surfaces"), arrays.surfaces[rows], pick)
        _join(columns("actions"), arrays.history[items, :-1], pick)
        _join(columns("dwell_seconds"), arrays.history[items, -1], pick)
        arrays.owners[rows, 0] = np.repeat(owners, counts)
        arrays.owners[rows, 1] = _counting(counts, indices)
        return _cut(row, counts, owners, indices), stop

    def _write_users(
        self, plan: StepPlan, arrays: StepArrays, requests: dict[int, int], row: int
    ) -> tuple[NDArray[np.int32], int]:
        """Returns the tiles, one a user, and the row after the last."""
        works = [work for work in plan.contexts if work.has_user]
        rows = slice(row, row + len(works))
        owners = np.array([requests[id(work.state)] for work in works], np.int64)
        arrays.ids[rows, 0] = np.array([work.context.user_id for work in works], np.uint64)
        arrays.ids[rows, 1] = 0
        arrays.rows[rows, 4:6] = 0
        arrays.owners[rows, 0] = owners
        arrays.owners[rows, 1] = 0
        ones = np.ones_like(owners)
        return _cut(row, ones, owners, 0 * ones), rows.stop


_NO_TILES = np.zeros((0, 4), np.int32)


def _join(parts: Sequence[NDArray[Any]], target: NDArray[Any], pick: NDArray[np.bool_] | None = None) -> None:
    """The parts one after another, or those of their elements that are picked, into the target."""
    if pick is None:
        np.concatenate(parts, out=target, casting="same_kind")
    else:
        target[...] = np.concatenate(parts)[pick]


def _counting(counts: Integers, starts: Integers | Sequence[int]) -> Integers:
    """For each count so many successive integers from its start on, one after another."""
    shift = np.asarray(starts) - (np.cumsum(counts) - counts)
    numbers: Integers = np.arange(int(counts.sum())) + np.repeat(shift, counts)
    return numbers


def _cut(row: int, counts: Integers, owners: Integers, indices: Integers) -> NDArray[np.int32]:
    """Tiles `[n, 4]` over spans of so many rows that lie one after another from `row` on: first row, rows, owner, index (or −1)."""
    pieces = -(-counts // TILE_ROWS)
    within = TILE_ROWS * _counting(pieces, np.zeros_like(pieces))
    first, counts, owners, indices = (
        np.repeat(each, pieces) for each in (row + np.cumsum(counts) - counts, counts, owners, indices)
    )
    tiles = np.empty((len(within), 4), np.int32)
    tiles[:, 0] = first + within
    tiles[:, 1] = np.minimum(TILE_ROWS, counts - within)
    tiles[:, 2] = owners
    tiles[:, 3] = np.where(indices < 0, -1, indices + within)
    return tiles
