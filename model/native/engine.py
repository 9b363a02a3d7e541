"""`NativeEngine`: takes contexts from the cache or computes them, and scores candidates against them, in one kernel call per forward."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from model.batch import history_start
from model.cache import ContextCache, ContextKey, Entry
from model.config import CandidatePositions, ModelConfig
from model.engine import CacheResult, CacheStats, EngineError, EngineInfo, Item, Outcome
from model.inputs import Context, Scores, counted, token_codes
from model.layers import dtype_name
from model.memory import usable_threads
from model.native.build import KernelUnavailable, Vectors
from model.native.kernel import Kernel, arguments_of, load_kernel
from model.native.packing import CANDIDATE_JOB, CONTEXT_JOB, GRAIN, PANEL, pack, refusal, round_up
from model.ranker import Ranker
from model.selftest import check_isolation


@dataclass(frozen=True, slots=True, eq=False)
class Keys:
    """Packed keys and values of every layer for `rows` context tokens, with room for `blocks` blocks of 64."""

    buffer: NDArray[np.uint8]
    address: int
    rows: int
    blocks: int


class NativeEngine:
    """The engine contract on a CPU. The bits of a candidate's scores depend on nothing but its request's own features.

    `dtype` None is bfloat16 where the processor multiplies it, else float32: never what a stopwatch says, as every engine of a machine must
    give the same bits. `threads` 0 takes `usable_threads`; the system may give
    fewer threads than asked for. `vectors`, `only_if_fast` and KernelUnavailable are as in `load_kernel`. Raises EngineError
    if memory runs out. `ranker` must be on the CPU; its tables are read in place. `kernel` is a custom build, for profiles and tests.
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
        vectors: Vectors = "auto",
        kernel: Kernel | None = None,
    ) -> None:
        self.config = ranker.config
        if reason := refusal(self.config):
            raise KernelUnavailable(reason)
        self._kernel = kernel or load_kernel(kernel_directory, vectors=vectors, only_if_fast=only_if_fast)
        tiles = self._kernel.enable_tiles()
        if dtype is None:
            dtype = torch.bfloat16 if self._kernel.multiplies_bf16() else torch.float32
        self._packed = pack(ranker, dtype, self._kernel.strip(), candidate_positions)
        requested_threads = threads or usable_threads()
        self._pointer: ctypes.c_void_p | None
        self._pointer, threads = self._kernel.create(
            self._packed.model, requested_threads, bf16=dtype is torch.bfloat16
        )
        config = self.config
        self._begun: _Plan | None = None
        self._cache: ContextCache[Keys] = ContextCache(cache_bytes, prefixes=config.has_extendable_contexts)
        self._element_bytes = dtype.itemsize
        self._key_elements = PANEL * config.head_width
        self._value_elements = PANEL * round_up(config.head_width, GRAIN)
        name = dtype_name(dtype)
        notes: dict[str, Any] = {
            "vectors": self._kernel.vectors(),
            "threads": threads,
            "tile_registers": tiles,
            "multiplies_bf16": self._kernel.multiplies_bf16(),
        }
        if threads < requested_threads:
            notes["threads_refused"] = f"{requested_threads} threads were wanted, the system gave {threads}"
        if self._kernel.note:
            notes["kernel_file"] = self._kernel.note
        self.info = EngineInfo("cpu", name, "native", candidate_positions, notes)

    def warm_up(self) -> None:
        """Nothing is left to compile: touch what a forward touches, and check that bits do not depend on the batch."""
        self.info.notes["self_test"] = check_isolation(self)
        self._cache.clear()

    def forward(self, items: Sequence[Item]) -> list[Outcome]:
        """Outcomes in the order of the items; contexts that several items share are computed once."""
        begun = self._plan(items)
        return self._outcomes(begun, self._kernel.forward(self._pointer, begun.arguments))

    def open(self) -> int | None:
        """See `OverlappingEngine`."""
        return self._kernel.open(self._pointer)

    def begin(self, items: Sequence[Item]) -> None:
        """See `OverlappingEngine`."""
        begun = self._plan(items)
        self._kernel.begin(self._pointer, begun.arguments)
        self._begun = begun  # kept alive: the kernel reads its arrays

    def finish(self) -> list[Outcome]:
        """See `OverlappingEngine`."""
        begun, self._begun = self._begun, None
        finite = self._kernel.finish(self._pointer)
        return [] if begun is None else self._outcomes(begun, finite)

    def _plan(self, items: Sequence[Item]) -> _Plan:
        if self._pointer is None:
            raise EngineError("the engine is closed")
        return _Plan(self, items)

    def _outcomes(self, plan: _Plan, finite: bool) -> list[Outcome]:
        entries: dict[ContextKey, Entry[Keys]] = {}
        for key, (_, keys, is_kept) in plan.computed.items():
            if is_kept and (entry := self._cache.insert(key, keys, keys.buffer.nbytes)):
                entries[key] = entry
        outcomes, stop = [], 0
        logits, probabilities, continuous = plan.scores
        for item, (keys, result, handle, context_key) in zip(plan.items, plan.results, strict=True):
            start, stop = stop, stop + len(item.candidates.post_ids)
            scores = Scores(logits[start:stop], probabilities[start:stop], continuous[start:stop], finite=finite)
            if context_key in entries:
                handle = self._cache.handle(entries[context_key], item)
            outcomes.append(Outcome(scores, keys, result, handle))
        return outcomes

    def context_of(self, handle: str, caller: str) -> Context | None:
        """The context of a handle given to this caller, None if it is no longer kept. Safe to call from any thread."""
        return self._cache.context_of(handle, caller, self.config)

    def cache_stats(self) -> CacheStats:
        """Safe to call from any thread."""
        return self._cache.stats()

    def close(self) -> None:
        """Free the kernel's memory and the cache. The engine must not be used afterwards."""
        self._cache.clear()
        if self._pointer is not None:
            self._kernel.destroy(self._pointer)
            self._pointer = None

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
        return Keys(buffer, buffer.ctypes.data, rows, blocks)


_Lookup = tuple[Keys, CacheResult, str, ContextKey | None]
"""Of an item: its keys, the cache result, the handle if its context was cached, and the key if this forward makes the context."""


class _Plan:
    """One forward: which contexts to make, the kernel's arguments, and the arrays for its results."""

    def __init__(self, engine: NativeEngine, items: Sequence[Item]) -> None:
        self.items = items
        self.computed: dict[ContextKey, tuple[int, Keys, bool]] = {}
        self.results: list[_Lookup] = []
        self._engine = engine
        self._arrays: list[ContextRows] = []  # what the contexts' jobs point into
        self._contexts: list[bytes] = []
        jobs, rows = [], 0
        for item in items:
            context, lookup = self._keys_of(item)
            keys = lookup[0]
            count, slot = len(item.candidates.post_ids), item.candidates.first_slot
            jobs.append(CANDIDATE_JOB(count, rows, slot, keys.rows, keys.blocks, context, keys.address))
            self.results.append(lookup)
            rows += count
        lists = [counted(item.context, item.candidates, engine.config) for item in items]
        actions, continuous = engine.config.actions, engine.config.continuous_actions
        size = rows * actions
        whole = np.empty(2 * size + rows * continuous, np.float32)
        address = whole.ctypes.data
        self.scores = (
            whole[:size].reshape(rows, actions),
            whole[size : 2 * size].reshape(rows, actions),
            whole[2 * size :].reshape(rows, continuous),
        )
        columns = (
            b"".join([candidates.post_ids.tobytes() for candidates in lists]),
            b"".join([candidates.author_ids.tobytes() for candidates in lists]),
            b"".join([candidates.surfaces.tobytes() for candidates in lists]),
            b"".join([candidates.age_buckets.tobytes() for candidates in lists]),
            b"".join([token_codes(candidates.codes, engine.config).tobytes() for candidates in lists]),
        )
        self.arguments = arguments_of(self._contexts, jobs, columns, (address, address + 4 * size, address + 8 * size))

    def _keys_of(self, item: Item) -> tuple[int, _Lookup]:
        """The index of the job that makes the keys of an item's context, -1 if there is nothing to compute, and what was found."""
        if item.state is not None:
            return -1, (item.state, "hit", "", None)
        engine = self._engine
        key = ContextKey.of(item.context, engine.config)
        if key in self.computed:
            job, keys, _ = self.computed[key]
            return job, (keys, "hit", "", key)
        entry = engine._cache.find(key)
        if entry is not None:
            return -1, (entry.state, "hit", engine._cache.handle(entry, item), None)
        older = engine._cache.find_prefix(key)
        keys, job = self._add_context(item.context, older)
        self.computed[key] = (job, keys, item.context.is_kept)
        return job, (keys, "miss" if older is None else "prefix", "", key)

    def _add_context(self, context: Context, older: Keys | None) -> tuple[Keys, int]:
        job = ContextRows(context, self._engine.config, older.rows if older else 0)
        keys = self._engine._allocate(job.rows, older)
        if job.is_empty:
            return keys, -1
        self._arrays.append(job)
        self._contexts.append(job.packed(keys.blocks, keys.address))
        return keys, len(self._contexts) - 1


class ContextRows:
    """The rows of a context that are not computed yet, from row `start` on, and the arrays that the kernel reads them from.

    Padding is left out; the other rows keep their positions. `rows` counts the whole context. Raises EngineError if the shape of
    the actions does not fit the checkpoint.
    """

    def __init__(self, context: Context, config: ModelConfig, start: int = 0) -> None:
        if context.actions.shape != (len(context), config.actions):
            raise EngineError("the actions of a context do not have the checkpoint's shape")
        present = np.flatnonzero(context.post_ids)
        has_user = int(context.user_id != 0)
        self.rows = has_user + len(present)
        self._start, self._user_id = start, context.user_id
        self._first_position = history_start(len(context), config)
        self._with_user = has_user and start == 0
        items = present[max(start - has_user, 0) :] + self._first_position
        positions = np.concatenate(([0] * self._with_user, items)).astype(np.int64)
        columns = (context.post_ids, context.author_ids, context.surfaces, context.actions, context.dwell_seconds,
                   token_codes(context.codes, config))  # fmt: skip
        self.arrays = [positions, *(np.ascontiguousarray(column) for column in columns)]

    @property
    def is_empty(self) -> bool:
        """Whether nothing is left to compute."""
        return len(self.arrays[0]) == 0

    def packed(self, blocks: int, keys: int, outputs: int = 0) -> bytes:
        """The packed job. `keys`: their address, with room for `blocks` blocks; `outputs`: the address for the rows' outputs, or 0."""
        pointers = (array.ctypes.data for array in self.arrays)
        sizes = (len(self.arrays[0]), self._start, blocks, self._with_user, self._first_position)
        return CONTEXT_JOB(*sizes, self._user_id, keys, *pointers, outputs)
