"""Fills a step's arrays from its plan: hashes, positions, tiles. Numpy only."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from model.batch import history_positions, slot_period, slot_positions
from model.config import CandidatePositions, ModelConfig
from model.hashing import hash_rows
from model.split.step import CANDIDATE, HISTORY, TILE_ROWS, USER, StepArrays, StepPlan

Tile = tuple[int, int, int, int]  # first row, rows, request or kind, index in its context


class StepWriter:
    """Fills `StepArrays` (numpy) from a plan. `anchor` is the tensor from which state offsets are counted."""

    def __init__(self, config: ModelConfig, mode: CandidatePositions, anchor: Tensor) -> None:
        self.config = config
        self.mode = mode
        self.anchor = anchor

    def write(self, plan: StepPlan, arrays: StepArrays) -> None:
        """Every array up to the plan's counts; what lies beyond stays as it was, valid and unread."""
        requests = self._write_states(plan, arrays)
        tiles: list[Tile] = []
        row = self._write_candidates(plan, arrays, requests, tiles)
        candidate_tiles = len(tiles)
        history_end = self._write_history(plan, arrays, requests, tiles, row)
        end = self._write_users(plan, arrays, requests, tiles, history_end)
        token_tiles = [
            *_cut(0, row, CANDIDATE, 0),
            *_cut(row, history_end, HISTORY, 0),
            *_cut(history_end, end, USER, 0),
        ]
        arrays.tiles[: len(tiles)] = np.array(tiles, np.int32).reshape(-1, 4)
        arrays.token_tiles[: len(token_tiles)] = np.array(token_tiles, np.int32).reshape(-1, 4)
        arrays.counts[:5] = (end, row, len(tiles), candidate_tiles, len(token_tiles))

    def _write_states(self, plan: StepPlan, arrays: StepArrays) -> dict[int, int]:
        """A number for each distinct state; returns them by the state's identity."""
        states = plan.states()
        base, size = self.anchor.data_ptr(), self.anchor.element_size()
        tensors = [state.keys_values for state in states]
        arrays.offsets[: len(states)] = [(each.data_ptr() - base) // size if each.numel() else 0 for each in tensors]
        lengths = [(state.length, each.shape[2]) for state, each in zip(states, tensors, strict=True)]
        arrays.lengths[: len(states)] = np.array(lengths, np.int32).reshape(-1, 2)
        return {id(state): number for number, state in enumerate(states)}

    def _write_candidates(self, plan: StepPlan, arrays: StepArrays, requests: dict[int, int], tiles: list[Tile]) -> int:
        works = plan.candidates
        if not works:
            return 0
        config, row = self.config, 0
        counts, numbers = [len(work.candidates) for work in works], [requests[id(work.state)] for work in works]
        for count, request in zip(counts, numbers, strict=True):
            tiles.extend(_cut(row, row + count, request, -1))
            row += count
        arrays.owners[:row, 0] = np.repeat(numbers, counts)
        arrays.owners[:row, 1] = -1
        if slot_period(config, self.mode) == 1:
            arrays.positions[:row] = config.candidate_position
        else:
            positions = [slot_positions(work.candidates, config, self.mode) for work in works]
            arrays.positions[:row] = np.concatenate(positions)
        self._write_posts(arrays, 0, [w.candidates.post_ids for w in works], [w.candidates.author_ids for w in works])
        arrays.features[:row, 0] = np.concatenate([work.candidates.surfaces for work in works])
        if config.has_post_age:
            arrays.features[:row, 1] = np.concatenate([work.candidates.age_buckets for work in works])
        return row

    def _write_history(
        self, plan: StepPlan, arrays: StepArrays, requests: dict[int, int], tiles: list[Tile], row: int
    ) -> int:
        first = row
        posts, authors = [], []
        for work in plan.contexts:
            context, items = work.context, work.items()
            stop, request = row + len(items), requests[id(work.state)]
            index = work.first_index + work.has_user
            arrays.positions[row:stop] = history_positions(len(context), self.config)[items]
            arrays.owners[row:stop, 0] = request
            arrays.owners[row:stop, 1] = np.arange(index, index + len(items))
            arrays.features[row:stop, 0] = context.surfaces[items]
            arrays.actions[row:stop] = context.actions[items]
            arrays.dwell[row:stop] = context.dwell_seconds[items]
            tiles.extend(
                (start, rows, request, index + start - row) for start, rows, _, _ in _cut(row, stop, request, 0)
            )
            posts.append(context.post_ids[items])
            authors.append(context.author_ids[items])
            row = stop
        if row > first:
            self._write_posts(arrays, first, posts, authors)
        return row

    def _write_posts(
        self, arrays: StepArrays, first: int, posts: list[NDArray[np.uint64]], authors: list[NDArray[np.uint64]]
    ) -> None:
        config = self.config
        rows = np.concatenate(
            (
                hash_rows(np.concatenate(posts), config.post_hashes),
                hash_rows(np.concatenate(authors), config.author_hashes),
            ),
            1,
        )
        arrays.embedding_rows[first : first + len(rows), : rows.shape[1]] = rows

    def _write_users(
        self, plan: StepPlan, arrays: StepArrays, requests: dict[int, int], tiles: list[Tile], row: int
    ) -> int:
        works = [work for work in plan.contexts if work.has_user]
        if works:
            stop = row + len(works)
            rows = hash_rows(np.array([work.context.user_id for work in works], np.uint64), self.config.user_hashes)
            arrays.embedding_rows[row:stop, : rows.shape[1]] = rows
            arrays.positions[row:stop] = 0
            for work in works:
                request = requests[id(work.state)]
                arrays.owners[row] = (request, 0)
                tiles.append((row, 1, request, 0))
                row += 1
        return row


def _cut(start: int, stop: int, owner: int, index: int) -> Iterator[Tile]:
    """Tiles over rows `start … stop - 1`."""
    for first in range(start, stop, TILE_ROWS):
        yield first, min(TILE_ROWS, stop - first), owner, index
