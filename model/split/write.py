"""Fills a step's arrays from its plan: ids, features, positions, tiles; one numpy call for all requests. Numpy only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from model.batch import history_start, slot_period, slot_positions
from model.config import CandidatePositions, ModelConfig
from model.inputs import token_codes
from model.split.step import TILE, TILE_ROWS, CandidateWork, ContextState, ContextWork, HostArrays, StepPlan

Integers = NDArray[np.int64]


class StepWriter:
    """Fills `HostArrays` from a plan. `anchor` is the tensor from which the starts of states are counted."""

    def __init__(self, config: ModelConfig, mode: CandidatePositions, anchor: Tensor) -> None:
        self.config = config
        self.mode = mode
        self.anchor = anchor

    def write(self, plan: StepPlan, arrays: HostArrays) -> None:
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
        counts = arrays.counts
        counts["rows"] = first_user + users.shape[1]
        counts["candidates"], counts["first_user"] = first_history, first_user
        counts["tiles"], counts["candidate_tiles"] = len(tiles), pieces[: candidates.shape[1]].sum()

    def _write_states(self, states: Sequence[ContextState], arrays: HostArrays) -> None:
        """Where each state lies, its length and its capacity."""
        base, size = self.anchor.data_ptr(), self.anchor.element_size()
        lengths = np.array([state.length for state in states])
        places = np.array([state.keys_values.data_ptr() for state in states])
        written = arrays.states[: len(states)]
        written["start"] = np.where(lengths > 0, (places - base) // size, 0)
        written["length"] = lengths
        written["capacity"] = [state.keys_values.size(2) for state in states]

    def _write_candidates(
        self, works: Sequence[CandidateWork], arrays: HostArrays, requests: dict[int, int]
    ) -> Integers:
        """Returns the spans of rows, see `_cut`."""
        if not works:
            return _NO_SPANS
        config = self.config
        lists = [work.candidates for work in works]
        counts = np.array([len(candidates) for candidates in lists])
        rows = arrays.rows[: int(counts.sum())]
        _join([candidates.post_ids for candidates in lists], rows["post"])
        _join([candidates.author_ids for candidates in lists], rows["author"])
        if slot_period(config, self.mode) == 1:
            rows["position"] = config.candidate_position
        else:
            _join([slot_positions(candidates, config, self.mode) for candidates in lists], rows["position"])
        _join([candidates.surfaces for candidates in lists], rows["surface"])
        if config.has_post_age:
            _join([candidates.age_buckets for candidates in lists], rows["age"])
        if config.token_levels:
            _join([token_codes(candidates.codes, config) for candidates in lists], arrays.codes[: len(rows)])
        rows["place"] = -1
        return np.stack((counts, [requests[id(work.state)] for work in works], np.full_like(counts, -1)))

    def _write_history(
        self, works: Sequence[ContextWork], arrays: HostArrays, requests: dict[int, int], row: int
    ) -> Integers:
        """Returns the spans of rows, see `_cut`. Items with post id 0 are padding and get no row."""
        if not works:
            return _NO_SPANS
        contexts, firsts = [work.context for work in works], [work.first_history for work in works]
        new = [slice(first, None) for first in firsts] if any(firsts) else None

        def columns(whole: list[NDArray[Any]]) -> list[NDArray[Any]]:
            return whole if new is None else [context[part] for context, part in zip(whole, new, strict=True)]

        posts = [context.post_ids for context in contexts]
        lengths, cached_lengths = np.array([len(context) for context in posts]), np.array(firsts, np.int64)
        indices = np.array([work.first_index + work.has_user for work in works])
        counts = np.array([work.state.length for work in works]) - indices
        owners = np.array([requests[id(work.state)] for work in works])
        total = int(counts.sum())
        rows, history = arrays.rows[row : row + total], arrays.history[:total]
        posts = columns(posts)
        pick = np.concatenate(posts) != 0 if total < int((lengths - cached_lengths).sum()) else None
        _join(posts, rows["post"], pick)
        _join(columns([context.author_ids for context in contexts]), rows["author"], pick)
        places = _counting(lengths - cached_lengths, history_start(lengths, self.config) + cached_lengths)
        rows["position"] = places if pick is None else places[pick]
        _join(columns([context.surfaces for context in contexts]), rows["surface"], pick)
        if self.config.token_levels:
            codes = [token_codes(context.codes, self.config) for context in contexts]
            _join(columns(codes), arrays.codes[row : row + total], pick)
        _join(columns([context.actions for context in contexts]), history[:, :-1], pick)
        _join(columns([context.dwell_seconds for context in contexts]), history[:, -1], pick)
        rows["request"] = np.repeat(owners, counts)
        rows["place"] = _counting(counts, indices)
        return np.stack((counts, owners, indices))

    def _write_users(
        self, works: Sequence[ContextWork], arrays: HostArrays, requests: dict[int, int], row: int
    ) -> Integers:
        """Returns the spans, one row each."""
        works = [work for work in works if work.has_user]
        rows = arrays.rows[row : row + len(works)]
        owners = np.array([requests[id(work.state)] for work in works], np.int64)
        rows["post"] = np.array([work.context.user_id for work in works], np.uint64)
        rows["position"], rows["request"], rows["place"] = 0, owners, 0
        return np.stack((np.ones_like(owners), owners, np.zeros_like(owners)))


_NO_SPANS = np.zeros((3, 0), np.int64)


def _join(parts: Sequence[NDArray[Any]], target: NDArray[Any], pick: NDArray[np.bool_] | None = None) -> None:
    """Write the parts one after another into the target, or only their elements in `pick`."""
    if pick is None:
        np.concatenate(parts, out=target, casting="same_kind")
    else:
        target[...] = np.concatenate(parts)[pick]


def _counting(counts: Integers, starts: Integers) -> NDArray[np.int32]:
    """For each count, that many successive integers from its start on, all concatenated."""
    ends = np.cumsum(counts)
    shift = (starts - (ends - counts)).astype(np.int32)
    numbers: NDArray[np.int32] = np.repeat(shift, counts)
    numbers += np.arange(len(numbers))
    return numbers


def _cut(spans: Integers) -> tuple[NDArray[Any], Integers]:
    """Tiles over spans of rows `[3, m]` that lie one after another, given by count, request and place (or −1). Also returns how many
    tiles each span has."""
    counts, _, _ = spans
    pieces = -(-counts // TILE_ROWS)
    within = TILE_ROWS * _counting(pieces, np.zeros_like(pieces))
    counts, requests, places, first = np.concatenate((spans, [np.cumsum(counts) - counts])).repeat(pieces, 1)
    tiles = np.empty(len(within), TILE)
    tiles["first_row"] = first + within
    tiles["rows"] = np.minimum(TILE_ROWS, counts - within)
    tiles["request"] = requests
    tiles["place"] = np.where(places < 0, places, places + within)
    return tiles, pieces
