"""`NativeEngine`: contexts from the cache or the kernel, candidates against them, one kernel call a forward."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from model.batch import history_positions, slot_positions
from model.cache import ContextCache, ContextKey
from model.config import CandidatePositions
from model.engine import CacheResult, CacheStats, EngineError, EngineInfo, Item, Outcome
from model.hashing import hash_rows
from model.inputs import Candidates, Context, Scores
from model.native.build import KernelUnavailable
from model.native.kernel import Kernel, load_kernel
from model.native.packing import LANES, PANEL, CandidateJob, ContextJob, pack, round_up
from model.ranker import Ranker
from model.selftest import check_isolation


@dataclass(frozen=True, slots=True, eq=False)
class Keys:
    """Packed keys and values of every layer for `rows` context tokens, room for `blocks` blocks of 64."""

    buffer: NDArray[np.uint8]
    rows: int
    blocks: int


class NativeEngine:
    """The engine contract on a CPU. The bits of a candidate's scores depend on nothing but its request's own features.

    `dtype` None takes what a short measured probe finds faster; `threads` 0 takes torch's number, and where the system
    refuses so many, those that it gives. Raises KernelUnavailable where the kernel cannot be built or, with `only_if_fast`,
    where the processor lacks the vectors it is written for; EngineError where memory ends. `ranker` must live on the CPU;
    its tables are read in place. `kernel` is a build of one's own, for profiles and tests.
    """

    def __init__(
        self,
        ranker: Ranker,
        dtype: torch.dtype | None = None,
        candidate_positions: CandidatePositions = "shared",
        *,
        cache_bytes: int = 0,
        threads: int = 0,
        kernel_directory: Path | None = None,
        only_if_fast: bool = False,
        kernel: Kernel | None = None,
    ) -> None:
        self.config = ranker.config
        self._positions = candidate_positions
        self._kernel = kernel or load_kernel(kernel_directory)
        if only_if_fast and self._kernel.vector_bits() < 512:
            raise KernelUnavailable("this processor lacks AVX-512, without which torch's own products are faster")
        tiles = self._kernel.enable_tiles()
        measured = self._kernel.probe()
        if dtype is None:
            dtype = torch.bfloat16 if measured["bfloat16"] < measured["float32"] else torch.float32
        self._packed = pack(ranker, dtype)
        wanted = threads or torch.get_num_threads()
        self._handle: ctypes.c_void_p | None
        self._handle, threads = self._kernel.create(self._packed.model, wanted, bf16=dtype is torch.bfloat16)
        config = self.config
        extendable = config.context_attention == "causal" and not config.right_anchored
        self._cache: ContextCache[Keys] = ContextCache(cache_bytes, prefixes=extendable)
        self._element_bytes = dtype.itemsize
        self._key_elements = PANEL * config.head_width
        self._value_elements = PANEL * round_up(config.head_width, LANES)
        name = str(dtype).removeprefix("torch.")
        notes: dict[str, Any] = {
            "threads": threads,
            "tile_registers": tiles,
            "probe_milliseconds": {key: round(value, 4) for key, value in measured.items()},
        }
        if threads < wanted:
            notes["threads_refused"] = f"{wanted} threads were wanted, the system gave {threads}"
        if self._kernel.note:
            notes["kernel_file"] = self._kernel.note
        self.info = EngineInfo("cpu", name, "native", candidate_positions, notes)

    def warm_up(self) -> None:
        """Nothing is left to compile: touch what a forward touches, and check that bits do not depend on the batch."""
        self.info.notes["self_test"] = check_isolation(self)
        self._cache.clear()

    def forward(self, items: Sequence[Item]) -> list[Outcome]:
        """Outcomes in the order of the items; contexts that several items share are computed once."""
        plan = _Plan(self, items)
        plan.run()
        return plan.outcomes()

    def cache_stats(self) -> CacheStats:
        """Safe to call from any thread."""
        return self._cache.stats()

    def close(self) -> None:
        """Free the kernel's memory and the cache. The engine must not be used afterwards."""
        self._cache.clear()
        if self._handle is not None:
            self._kernel.destroy(self._handle)
            self._handle = None

    def _allocate(self, rows: int, older: Keys | None) -> Keys:
        """Zeroed room for `rows` keys, the older ones copied to the front."""
        blocks = -(-rows // PANEL)
        heads = self.config.layers * self.config.kv_heads
        key_bytes, value_bytes = (n * self._element_bytes for n in (self._key_elements, self._value_elements))
        buffer = np.zeros((heads, blocks * (key_bytes + value_bytes)), np.uint8)
        if older is not None:
            for start, old_start, size in (
                (0, 0, key_bytes * older.blocks),
                (key_bytes * blocks, key_bytes * older.blocks, value_bytes * older.blocks),
            ):
                buffer[:, start : start + size] = older.buffer[:, old_start : old_start + size]
        return Keys(buffer, rows, blocks)


class _Plan:
    """One forward: which contexts must be made, and the C jobs with the arrays they point into."""

    def __init__(self, engine: NativeEngine, items: Sequence[Item]) -> None:
        self._engine = engine
        self._arrays: list[NDArray[Any]] = []
        self._contexts: list[ctypes.Structure] = []
        self._candidates: list[ctypes.Structure] = []
        self._made: dict[ContextKey, tuple[int, Keys]] = {}
        self._results: list[tuple[Scores, Keys, CacheResult]] = []
        for item in items:
            keys, job, result = self._keys_of(item)
            scores = self._add_candidates(item.candidates, keys, job)
            self._results.append((scores, keys, result))

    def run(self) -> None:
        """Compute, then keep the new contexts."""
        engine = self._engine
        if engine._handle is None:
            raise EngineError("the engine is closed")
        engine._kernel.forward(engine._handle, self._contexts, self._candidates)
        for key, (_, keys) in self._made.items():
            engine._cache.insert(key, keys, keys.buffer.nbytes)

    def outcomes(self) -> list[Outcome]:
        """What `run` has filled in."""
        return [Outcome(scores, keys, result) for scores, keys, result in self._results]

    def _keys_of(self, item: Item) -> tuple[Keys, int, CacheResult]:
        """The keys of an item's context, the index of the job that will make them (or -1), and what the cache said."""
        if item.state is not None:
            return item.state, -1, "hit"
        engine = self._engine
        key = ContextKey.of(item.context, engine.config)
        if key in self._made:
            job, keys = self._made[key]
            return keys, job, "hit"
        found = engine._cache.find(key)
        if found is not None:
            return found, -1, "hit"
        older = engine._cache.find_prefix(key)
        keys, job = self._add_context(item.context, older)
        self._made[key] = (job, keys)
        return keys, job, "miss" if older is None else "prefix"

    def _add_context(self, context: Context, older: Keys | None) -> tuple[Keys, int]:
        config = self._engine.config
        present = np.flatnonzero(context.post_ids)
        has_user = int(context.user_id != 0)
        start = older.rows if older else 0
        keys = self._engine._allocate(has_user + len(present), older)
        # Padding is left out and positions are carried along; slot 0 of each array stands for the user's row.
        fresh = present[max(start - has_user, 0) :]
        with_user = has_user and start == 0
        rows = np.concatenate(([0], fresh))[0 if with_user else 1 :]
        positions = np.concatenate(([0], history_positions(len(context), config)[fresh]))[0 if with_user else 1 :]
        if len(rows) == 0:
            return keys, -1
        size = len(context)

        def column(values: NDArray[Any], *shape: int) -> NDArray[Any]:
            return values[rows] if size else np.zeros((len(rows), *shape), values.dtype)

        posts, authors = column(context.post_ids), column(context.author_ids)
        self._contexts.append(
            ContextJob(
                rows=len(rows),
                start=start,
                blocks=keys.blocks,
                has_user=with_user,
                keys=keys.buffer.ctypes.data,
                user_rows=self._keep(hash_rows(np.array([context.user_id], np.uint64), config.user_hashes)),
                post_rows=self._keep(hash_rows(posts, config.post_hashes)),
                author_rows=self._keep(hash_rows(authors, config.author_hashes)),
                surfaces=self._keep(column(context.surfaces)),
                positions=self._keep(positions),
                actions=self._keep(column(context.actions, config.actions)),
                dwell_seconds=self._keep(column(context.dwell_seconds)),
            )
        )
        return keys, len(self._contexts) - 1

    def _add_candidates(self, candidates: Candidates, keys: Keys, job: int) -> Scores:
        config, count = self._engine.config, len(candidates)
        widths = (config.actions, config.actions, config.continuous_actions)
        scores = Scores(*(np.empty((count, width), np.float32) for width in widths))
        self._candidates.append(
            CandidateJob(
                rows=count,
                keys_count=keys.rows,
                blocks=keys.blocks,
                context=job,
                keys=keys.buffer.ctypes.data,
                post_rows=self._keep(hash_rows(candidates.post_ids, config.post_hashes)),
                author_rows=self._keep(hash_rows(candidates.author_ids, config.author_hashes)),
                surfaces=self._keep(candidates.surfaces),
                ages=self._keep(candidates.age_buckets),
                positions=self._keep(slot_positions(candidates, config, self._engine._positions)),
                logits=scores.logits.ctypes.data,
                probabilities=scores.probabilities.ctypes.data,
                continuous=scores.continuous.ctypes.data,
            )
        )
        return scores

    def _keep(self, array: NDArray[Any]) -> int:
        array = np.ascontiguousarray(array)
        self._arrays.append(array)
        return int(array.ctypes.data)
