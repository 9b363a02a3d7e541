"""`SplitEngine`: context once, candidates alone, context cache. Written for CUDA; it also runs on a CPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from model.cache import ContextCache, ContextKey
from model.config import CandidatePositions, ModelConfig
from model.device import free_memory, losses_of
from model.engine import CacheResult, CacheStats, EngineError, EngineInfo, Item, Outcome
from model.inputs import Candidates, Context, Scores, counted
from model.layers import dtype_name
from model.ranker import Ranker
from model.selftest import check_isolation
from model.split.graphs import CudaRecorder, PlainRecorder, Recorder
from model.split.kernels.contract import Kernels, Tables, softmax_shift
from model.split.kernels.portable import PortableKernels
from model.split.sizes import PROBE_CANDIDATES, RowCounts, StepRunner
from model.split.step import TILE_ROWS, CandidateWork, ContextState, ContextWork, StepPlan, plan_steps
from model.split.trunk import SplitTrunk
from model.split.weights import SplitWeights, split_weights
from model.synthetic import random_candidates, random_context

KernelSet = Literal["auto", "torch", "triton"]
MakeKernels = Callable[[ModelConfig, SplitWeights, torch.dtype], Kernels]
Work = tuple[ContextWork | None, int, Candidates, ContextState]
Lookup = tuple[ContextState, CacheResult, str]
"""The state that an item's candidates see, the cache result, and the handle if the context was cached."""


class SplitEngine:
    """The engine contract over flat rows: every request's context and candidates share the matrix products of a step.

    A candidate's bits depend on nothing but its own request's features. `capacity` bounds the rows of a step; more work
    takes several. `kernels` `auto` means Triton on CUDA and plain torch on a CPU; a function makes others, for tests. Triton's are
    recorded on CUDA, torch's never; `recorder` decides otherwise. Raises EngineError if the device or the checkpoint is not supported.
    """

    def __init__(
        self,
        ranker: Ranker,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        candidate_positions: CandidatePositions = "shared",
        cache_bytes: int = 0,
        *,
        kernels: KernelSet | MakeKernels = "auto",
        capacity: int | None = None,
        recorder: Recorder | None = None,
    ) -> None:
        config = ranker.config
        softmax_shift(config.attention_cap)  # refuses a cap that the kernels cannot hold
        self.config = config
        self._device = torch.device(device)
        if self._device.type == "cuda" and self._device.index is None:
            self._device = torch.device("cuda", torch.cuda.current_device())
        # a stream of its own, so that the warm-up of the next version does not queue before requests of this one
        self._stream = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None
        self._dtype = dtype
        capacity = capacity or default_capacity(config)
        if capacity % TILE_ROWS or capacity < 1 + config.history_length:
            raise EngineError(f"capacity must be a multiple of {TILE_ROWS} and hold a whole context, got {capacity}")
        if kernels == "auto":
            kernels = "triton" if self._stream is not None else "torch"
        with losses_of(self._device), self._on_device():
            is_triton = kernels == "triton" or (self._stream is not None and kernels != "torch")
            weights = split_weights(ranker, self._device, dtype, dtype if is_triton else torch.float32)
            make = MAKERS[kernels] if isinstance(kernels, str) else kernels
            self._kernels = make(config, weights, dtype)
            tables = device_tables(ranker, self._device)
            self._trunk = SplitTrunk(config, weights, tables, self._kernels, capacity, dtype)
            if recorder is None and self._stream is not None:
                # torch's kernels loop on the host, which no graph can record
                recorder = CudaRecorder(self._stream, records=kernels == "triton")
            recorder = recorder or PlainRecorder(records=False)
            self._runner = StepRunner(config, candidate_positions, self._trunk, capacity, recorder)
        self._capacity = capacity
        self._prepared = 0
        self._cache: ContextCache[ContextState] = ContextCache(cache_bytes, prefixes=config.has_extendable_contexts)
        notes: dict[str, Any] = {
            "kernels": kernels if isinstance(kernels, str) else "custom",
            "step_rows": capacity,
            "cache_bytes": cache_bytes,
        }
        name = dtype_name(dtype)
        self.info = EngineInfo(str(self._device), name, "torch", candidate_positions, notes)

    @torch.inference_mode()
    def compile(self) -> None:
        """Compile every kernel that `forward` will launch. Nothing is computed. `warm_up` does it too."""
        with losses_of(self._device), self._on_device():
            self._runner.compile(self._probe)

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Compile, capture, and check that bits do not depend on the batch. Raises EngineError when a check fails."""
        with losses_of(self._device):
            with self._on_device():
                self._runner.warm_up(self.info.notes, self._probe)
            self.info.notes["self_test"] = check_isolation(self)
        self._cache.clear()
        self._runner.counts = RowCounts()
        self._prepared = self._compilations()

    @torch.inference_mode()
    def forward(self, items: Sequence[Item]) -> list[Outcome]:
        """Outcomes in the order of the items; a context that several items share is computed once.

        If the device runs out of memory, the context cache is emptied and the batch is tried once more.
        """
        with losses_of(self._device):
            try:
                return self._forward(items)
            except torch.OutOfMemoryError:
                pass  # outside of the handler, whose traceback holds the tensors of the attempt
            self._cache.clear()
            if self._stream is not None:
                self._stream.synchronize()  # host buffers may still be read by what was queued
            free_memory(self._device)
            try:
                return self._forward(items)
            except torch.OutOfMemoryError as error:
                raise EngineError("the device is out of memory") from error

    def _forward(self, items: Sequence[Item]) -> list[Outcome]:
        computed: dict[ContextKey, ContextState] = {}
        with self._on_device():
            works, results = self._works(items, computed)
            plans = plan_steps(works, self._capacity)
            outputs = self._runner.run(plans)
        dropped = {id(state) for item, (state, *_) in zip(items, results, strict=True) if not item.context.is_kept}
        entries = {}
        for key, state in computed.items():
            if id(state) not in dropped and (entry := self._cache.insert(key, state, state.nbytes)):
                entries[id(state)] = entry
        outcomes = []
        for item, scores, lookup in zip(items, self._scores(items, plans, outputs), results, strict=True):
            state, result, handle = lookup
            if id(state) in entries and item.state is None:
                handle = self._cache.handle(entries[id(state)], item)
            outcomes.append(Outcome(scores, state, result, handle))
        return outcomes

    def late_compilations(self) -> int:
        """Kernels compiled and graphs recorded since `warm_up`; if there are any, readiness was declared too early."""
        return self._compilations() - self._prepared

    def padding_ratio(self) -> float:
        """The fraction of computed rows, since warm-up, that no request asked for."""
        counts = self._runner.counts
        return 1 - counts.used / counts.computed if counts.computed else 0.0

    def context_of(self, handle: str, caller: str) -> Context | None:
        """The context of a handle given to this caller, None if it is no longer kept. Safe to call from any thread."""
        return self._cache.context_of(handle, caller, self.config)

    def cache_stats(self) -> CacheStats:
        """Safe to call from any thread."""
        return self._cache.stats()

    def close(self) -> None:
        """Drop the cache, the activations and the graphs. The engine must not be used afterwards."""
        self._cache.clear()
        for name in ("_runner", "_trunk", "_kernels"):
            self.__dict__.pop(name, None)
        free_memory(self._device)  # the next version is loading into the same memory

    def _on_device(self) -> AbstractContextManager[object]:
        """Enter the engine's stream: it is a property of the calling thread, and the engine's thread did not build the engine."""
        return torch.cuda.stream(self._stream) if self._stream is not None else nullcontext()

    def _compilations(self) -> int:
        return self._runner.recorded + self._kernels.compiled()

    def _probe(self, rows: int) -> StepPlan:
        """A step of exactly `rows` rows, see `sizes.Probe`: one request's candidates, another's, the first ones again."""
        config = self.config
        first, second = (random_context(config, min(config.history_length, n), seed=n) for n in (20, 5))
        candidates = random_candidates(config, PROBE_CANDIDATES, seed=1)
        plan = StepPlan()
        for context in (first, second):
            work = ContextWork(context, self._allocate(context, None))
            plan.add_context(work, work.state.length)
        states = [work.state for work in plan.contexts]
        others = random_candidates(config, rows - plan.rows - 2 * PROBE_CANDIDATES, seed=2)
        for number, (chunk, owner) in enumerate(((candidates, 0), (others, 1), (candidates, 0))):
            plan.add_candidates(CandidateWork(number, 0, chunk, states[owner]))
        return plan

    def _works(
        self, items: Sequence[Item], computed: dict[ContextKey, ContextState]
    ) -> tuple[list[Work], list[Lookup]]:
        """The work to compute, and what was found for each item's context."""
        works: list[Work] = []
        results: list[Lookup] = []
        for number, item in enumerate(items):
            context, lookup = self._context_of(item, computed)
            works.append((context, number, counted(item.context, item.candidates, self.config), lookup[0]))
            results.append(lookup)
        return works, results

    def _context_of(self, item: Item, computed: dict[ContextKey, ContextState]) -> tuple[ContextWork | None, Lookup]:
        """The context to compute before an item's candidates, if any, and what was found."""
        if item.state is not None:
            return None, (item.state, "hit", "")
        key = ContextKey.of(item.context, self.config)
        if key in computed:
            return None, (computed[key], "hit", "")
        entry = self._cache.find(key)
        if entry is not None:
            return None, (entry.state, "hit", self._cache.handle(entry, item))
        older = self._cache.find_prefix(key)
        state = self._allocate(item.context, older)
        computed[key] = state
        work = ContextWork(item.context, state, older.history if older else 0, older.length if older else 0)
        return work, (state, "prefix" if older else "miss", "")

    def _allocate(self, context: Context, older: ContextState | None) -> ContextState:
        """Room for a context's keys and values, with those of its known beginning copied in."""
        config = self.config
        length = int(context.user_id != 0) + int(np.count_nonzero(context.post_ids))
        capacity = -(-length // self._kernels.key_tile) * self._kernels.key_tile
        shape = (config.layers, 2, capacity, config.kv_heads, config.head_width)
        # padded keys are multiplied before they are masked, so they must be numbers
        make = torch.empty if capacity == length else torch.zeros
        keys_values = make(shape, dtype=self._dtype, device=self._device)
        if older is not None:
            keys_values[:, :, : older.length] = older.keys_values[:, :, : older.length]
        return ContextState(keys_values, length, len(context))

    def _scores(
        self, items: Sequence[Item], plans: Sequence[StepPlan], outputs: Sequence[NDArray[np.float32]]
    ) -> list[Scores]:
        actions, columns = self.config.actions, self.config.actions + self.config.continuous_actions
        raw = [np.empty((len(item.candidates), columns), np.float32) for item in items]
        for plan, output in zip(plans, outputs, strict=True):
            row = 0
            for work in plan.candidates:
                count = len(work.candidates)
                raw[work.item][work.start : work.start + count] = output[row : row + count, :columns]
                row += count
        return [
            Scores(
                np.ascontiguousarray(numbers[:, :actions]), sigmoid(numbers[:, :actions]), sigmoid(numbers[:, actions:])
            )
            for numbers in raw
        ]


def sigmoid(x: NDArray[np.float32]) -> NDArray[np.float32]:
    """`1 / (1 + exp(-x))` in fp32; where exp overflows, 0 is the right result."""
    with np.errstate(over="ignore"):
        result: NDArray[np.float32] = np.reciprocal(1 + np.exp(-np.ascontiguousarray(x)), dtype=np.float32)
    return result


def default_capacity(config: ModelConfig) -> int:
    """Rows of a step: as many as keep the widest activation at 64 MiB of bf16, 1024 to 16384, and at least one context."""
    widest = max(2 * config.ffn_width, (config.query_heads + 2 * config.kv_heads) * config.head_width)
    rows = 1 << max(10, min(14, (2**25 // widest).bit_length() - 1))
    return max(rows, -(-(1 + config.history_length) // TILE_ROWS) * TILE_ROWS)


def device_tables(ranker: Ranker, device: torch.device) -> Tables:
    """The embedding tables on the device. Raises EngineError unless all are float32 or all bfloat16."""
    tables = ranker.tables
    tables.dtype()
    return Tables(*(table.detach().to(device) for table in (tables.user, tables.post, tables.author)))


def _torch_kernels(config: ModelConfig, weights: SplitWeights, dtype: torch.dtype) -> Kernels:
    return PortableKernels(config, weights.rope)


def _triton_kernels(config: ModelConfig, weights: SplitWeights, dtype: torch.dtype) -> Kernels:
    try:
        from model.split.kernels.launch import TritonKernels
    except ImportError as error:
        raise EngineError(f"the CUDA engine needs triton: {error}") from error
    return TritonKernels(config, weights, dtype)


MAKERS: dict[str, MakeKernels] = {"torch": _torch_kernels, "triton": _triton_kernels}
