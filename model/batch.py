"""Turns requests into one set of padded tensors, with ids hashed as in the published pipeline, for the plain ranker and training."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from model.config import CandidatePositions, HashSpec, ModelConfig
from model.inputs import Candidates, Context, counted, token_codes

Length = TypeVar("Length", int, NDArray[np.int64])


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows index the embedding tables, 0 is padding; `n` is the number of hashes of that entity.

    user_rows int64 `[B, n]`; history_post_rows, history_author_rows int64 `[B, H, n]`; history_actions float32 `[B, H, A]`;
    history_surfaces int64 `[B, H]`; history_dwell_seconds float32 `[B, H]`; candidate_post_rows, candidate_author_rows
    int64 `[B, C, n]`; candidate_surfaces, candidate_age_buckets int64 `[B, C]`; history_codes int64 `[B, H, L]`, candidate_codes int64
    `[B, C, L]`, the codes and counts of `token_codes`; positions int64 `[B, 1 + H + C]`.
    H and C are those of the longest request.
    """

    user_rows: Tensor
    history_post_rows: Tensor
    history_author_rows: Tensor
    history_actions: Tensor
    history_surfaces: Tensor
    history_dwell_seconds: Tensor
    history_codes: Tensor
    candidate_post_rows: Tensor
    candidate_author_rows: Tensor
    candidate_surfaces: Tensor
    candidate_age_buckets: Tensor
    candidate_codes: Tensor
    positions: Tensor

    def to(self, device: torch.device | str) -> Batch:
        """The same batch on another device."""
        return Batch(**{field.name: getattr(self, field.name).to(device) for field in fields(self)})


def collate(
    requests: Sequence[tuple[Context, Candidates]],
    config: ModelConfig,
    candidate_positions: CandidatePositions = "shared",
) -> Batch:
    """Hash requests, and pad each to the longest."""
    contexts = [context for context, _ in requests]
    lists = [counted(context, candidates, config) for context, candidates in requests]
    history = max(map(len, contexts))
    slots = max(map(len, lists))
    positions = [
        np.concatenate(
            (
                [0],
                pad(history_positions(len(context), config), history),
                pad(slot_positions(candidates, config, candidate_positions), slots),
            )
        )
        for context, candidates in requests
    ]

    def column(items: Sequence[Any], length: int, values: Callable[[Any], NDArray[np.generic]]) -> Tensor:
        return torch.from_numpy(np.stack([pad(values(item), length) for item in items]))

    return Batch(
        user_rows=torch.from_numpy(hash_rows(np.array([c.user_id for c in contexts], np.uint64), config.user_hashes)),
        history_post_rows=column(contexts, history, lambda c: hash_rows(c.post_ids, config.post_hashes)),
        history_author_rows=column(contexts, history, lambda c: hash_rows(c.author_ids, config.author_hashes)),
        history_actions=column(contexts, history, lambda c: c.actions),
        history_surfaces=column(contexts, history, lambda c: c.surfaces),
        history_dwell_seconds=column(contexts, history, lambda c: c.dwell_seconds),
        history_codes=column(contexts, history, lambda c: token_codes(c.codes, config)),
        candidate_post_rows=column(lists, slots, lambda c: hash_rows(c.post_ids, config.post_hashes)),
        candidate_author_rows=column(lists, slots, lambda c: hash_rows(c.author_ids, config.author_hashes)),
        candidate_surfaces=column(lists, slots, lambda c: c.surfaces),
        candidate_age_buckets=column(lists, slots, lambda c: c.age_buckets),
        candidate_codes=column(lists, slots, lambda c: token_codes(c.codes, config)),
        positions=torch.from_numpy(np.stack(positions).astype(np.int64)),
    )


def pad(values: NDArray[np.generic], length: int) -> NDArray[np.generic]:
    """Zeros after the values, up to `length` rows."""
    return np.concatenate((values, np.zeros((length - len(values), *values.shape[1:]), values.dtype)))


def history_positions(length: int, config: ModelConfig) -> NDArray[np.int64]:
    """RoPE positions of history items, oldest first: `1 …`, or ending at `history_length` when right-anchored."""
    first = history_start(length, config)
    return np.arange(first, first + length, dtype=np.int64)


def history_start(length: Length, config: ModelConfig) -> Length | int:
    """RoPE position of the oldest of `length` history items. An array of lengths gives an array of positions."""
    return config.history_length + 1 - length if config.right_anchored else 1


def slot_positions(candidates: Candidates, config: ModelConfig, mode: CandidatePositions) -> NDArray[np.int64]:
    """RoPE positions of candidates: one for all (`shared`), or the slot in a chunk of `candidate_length` (`sequential`).

    A right-anchored checkpoint was trained with one position for all, so both modes are the same there.
    """
    slots = np.arange(candidates.first_slot, candidates.first_slot + len(candidates), dtype=np.int64)
    return config.candidate_position + slots % slot_period(config, mode)


def slot_period(config: ModelConfig, mode: CandidatePositions) -> int:
    """Number of slots after which candidate positions repeat."""
    return 1 if mode == "shared" or config.right_anchored else config.candidate_length


def hash_rows(ids: NDArray[np.uint64], spec: HashSpec) -> NDArray[np.int64]:
    """Rows of the entity's own table, `[..., count]`; 0 for id 0, which is padding.

    `raw = (id * scale + bias) mod modulus` with the multiply-add wrapping in two's-complement int64 and a non-negative
    modulo; `row = raw mod (vocab_size - 1) + 1`. Ids above 2^63 are reinterpreted as negative int64.
    """
    signed = np.ascontiguousarray(ids).view(np.int64)[..., None]
    scales, biases = hash_functions(spec)
    with np.errstate(over="ignore"):
        raw = np.mod(signed * scales + biases, np.int64(spec.modulus))
    rows: NDArray[np.int64] = np.mod(raw, np.int64(spec.vocab_size - 1)) + 1
    rows[np.broadcast_to(signed == 0, rows.shape)] = 0
    return rows


@functools.cache
def hash_functions(spec: HashSpec) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Scales and biases, `[count]` each: the int64 with the same low 64 bits."""
    scales, biases = (np.array([value % 2**64 for value in values], np.uint64) for values in (spec.scales, spec.biases))
    return scales.view(np.int64), biases.view(np.int64)
