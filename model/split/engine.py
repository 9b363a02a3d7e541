"""`SplitEngine`: context once, candidates alone, context cache. Written for CUDA; on a CPU it is the portable engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from model.cache import ContextCache, ContextKey
from model.config import CandidatePositions, ModelConfig
from model.engine import CacheResult, CacheStats, EngineError, EngineInfo, Item, Outcome
from model.inputs import Candidates, Context, Scores
from model.ranker import Ranker
from model.selftest import check_isolation
from model.split.buckets import PROBE_CANDIDATES, RowCounts, StepRunner
from model.split.graphs import CudaRecorder, Recorder
from model.split.kernels.contract import Kernels, softmax_shift
from model.split.kernels.portable import PortableKernels
from model.split.step import TILE_ROWS, CandidateWork, ContextState, ContextWork, StepPlan, plan_steps
from model.split.tables import Placement, table_source
from model.split.trunk import SplitTrunk
from model.split.weights import SplitWeights, split_weights
from model.synthetic import random_candidates, random_context

KernelChoice = Literal["auto", "portable", "fused"]
Work = tuple[ContextWork | None, int, Candidates, ContextState]
Found = tuple[ContextState, CacheResult, str]
"""The state that an item's candidates see, the cache result, and the handle if the context was cached."""


class SplitEngine:
    """The engine contract over flat rows: every request's context and candidates share the matrix products of a step.

    A candidate's bits depend on nothing but its own request's features. `capacity` bounds the rows of a step; more work
    takes several. `kernels` `auto` means Triton on CUDA and plain torch on a CPU. `placement` says where the embedding
    tables live, None decides by size; a `recorder` makes a CPU engine run in padded sizes, as CUDA does. `plain`: only the
    reference kernels, on CUDA launched one by one, each after the previous one has ended.
    Raises EngineError if the device or the checkpoint is not supported.
    """

    def __init__(
        self,
        ranker: Ranker,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        candidate_positions: CandidatePositions = "shared",
        cache_bytes: int = 0,
        *,
        kernels: KernelChoice = "auto",
        capacity: int | None = None,
        placement: Placement | None = None,
        recorder: Recorder | None = None,
        plain: bool = False,
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
        fused = kernels == "fused" or (kernels == "auto" and self._device.type == "cuda")
        capacity = capacity or default_capacity(config)
        if capacity % TILE_ROWS or capacity < 1 + config.history_length:
            raise EngineError(f"capacity must be a multiple of {TILE_ROWS} and hold a whole context, got {capacity}")
        with self._on_device():
            weights = split_weights(ranker, self._device, dtype, dtype if fused else torch.float32)
            self._kernels: Kernels = (
                _fused_kernels(config, weights, dtype, plain=plain) if fused else PortableKernels(config, weights.rope)
            )
            source = table_source(ranker, self._device, capacity, placement)
            self._trunk = SplitTrunk(config, weights, source.tables, self._kernels, capacity, dtype)
            shared = (config, candidate_positions, self._trunk, source, capacity)
            if self._stream is not None and recorder is None:
                # the portable kernels loop on the host, which no graph can record
                recorder = CudaRecorder(self._stream, replay=fused and not plain)
            self._runner = StepRunner(*shared, recorder)
        self._capacity = capacity
        self._prepared = 0
        extendable = config.context_attention == "causal" and not config.right_anchored
        self._cache: ContextCache[ContextState] = ContextCache(cache_bytes, prefixes=extendable)
        notes: dict[str, Any] = {
            "kernels": "triton" if fused else "torch, fixed tiles",
            "embedding_tables": source.placement,
            "step_rows": capacity,
            "cache_bytes": cache_bytes,
        }
        name = str(dtype).removeprefix("torch.")
        self.info = EngineInfo(str(self._device), name, "torch", candidate_positions, notes)

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Compile, capture, and check that bits do not depend on the batch. Raises EngineError when a check fails."""
        with self._on_device():
            self._runner.warm_up(self.info.notes, self._probe, self._trial)
        self.info.notes["self_test"] = check_isolation(self)
        self._cache.clear()
        self._runner.counts = RowCounts()
        self._prepared = self._compilations()

    @torch.inference_mode()
    def forward(self, items: Sequence[Item]) -> list[Outcome]:
        """Outcomes in the order of the items; a context that several items share is computed once.

        If the device runs out of memory, the context cache is emptied and the batch is tried once more.
        """
        try:
            return self._forward(items)
        except torch.OutOfMemoryError:
            pass  # outside of the handler, whose traceback holds the tensors of the attempt
        self._cache.clear()
        if self._stream is not None:
            self._stream.synchronize()  # host buffers may still be read by what was queued
            torch.cuda.empty_cache()
        try:
            return self._forward(items)
        except torch.OutOfMemoryError as error:
            raise EngineError("the device is out of memory") from error

    def _forward(self, items: Sequence[Item]) -> list[Outcome]:
        made: dict[ContextKey, ContextState] = {}
        try:
            with self._on_device():
                works, results = self._works(items, made)
                plans = plan_steps(works, self._capacity)
                outputs = self._runner.run(plans)
        except torch.AcceleratorError as error:
            raise EngineError(f"the device failed: {error}", sticky=True) from error
        dropped = {id(state) for item, (state, *_) in zip(items, results, strict=True) if not item.context.is_kept}
        kept = {}
        for key, state in made.items():
            if id(state) not in dropped and (entry := self._cache.insert(key, state, state.nbytes)):
                kept[id(state)] = entry
        outcomes = []
        for item, scores, found in zip(items, self._scores(items, plans, outputs), results, strict=True):
            state, result, handle = found
            if id(state) in kept and item.state is None:
                handle = self._cache.handle(kept[id(state)], item)
            outcomes.append(Outcome(scores, state, result, handle))
        return outcomes

    @torch.inference_mode()
    def rehearse(self, items: Sequence[Item]) -> Callable[[], None]:
        """Prepare the device's work of this forward; every call of the result queues it again. For measurements. Contexts are
        computed unless an item brings its state. Raises EngineError if the tables are on the host.
        """
        with self._on_device():
            again = self._runner.rehearse(plan_steps(self._works(items, {})[0], self._capacity))
        if self._stream is not None:
            self._stream.synchronize()  # what follows is queued on the caller's stream
        return torch.inference_mode()(again)

    @torch.inference_mode()
    def run_through(self, kernels: Kernels, items: Sequence[Item]) -> None:
        """Compute the items once, without recording, with other kernels on the same weights. For checks."""
        own, self._kernels = self._kernels, kernels  # so that states get the room that these kernels need
        self._trunk.kernels = kernels
        try:
            with self._on_device():
                for plan in plan_steps(self._works(items, {})[0], self._capacity):
                    self._runner.run_plain(plan)
        finally:
            self._kernels = self._trunk.kernels = own

    def late_compilations(self) -> int:
        """Kernels compiled and graphs recorded since `warm_up`; if there are any, readiness was declared too early."""
        return self._compilations() - self._prepared

    def padding_ratio(self) -> float:
        """The fraction of computed rows, since warm-up, that no request asked for."""
        counts = self._runner.counts
        return 1 - counts.used / counts.computed if counts.computed else 0.0

    def context_of(self, handle: str, caller: str) -> Context | None:
        """As `Engine.context_of`."""
        return self._cache.context_of(handle, caller, self.config)

    def cache_stats(self) -> CacheStats:
        """Safe to call from any thread."""
        return self._cache.stats()

    def close(self) -> None:
        """Drop the cache, the activations and the graphs. The engine must not be used afterwards."""
        self._cache.clear()
        for name in ("_runner", "_trunk", "_kernels"):
            self.__dict__.pop(name, None)
        if self._device.type == "cuda":
            with suppress(RuntimeError):  # a device that is lost has nothing to give back
                torch.cuda.empty_cache()  # the next version is loading into the same memory

    def _on_device(self) -> AbstractContextManager[object]:
        """Enter the engine's stream: it is a property of the calling thread, and the engine's thread did not build the engine."""
        return torch.cuda.stream(self._stream) if self._stream is not None else nullcontext()

    def _compilations(self) -> int:
        return self._runner.recorded + self._kernels.compiled()

    def _probe(self, rows: int) -> StepPlan:
        """A step of exactly `rows` rows, see `buckets.Probe`: one request's candidates, another's, the first ones again."""
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

    def _trial(self, rows: int) -> StepPlan:
        """A step of slightly fewer rows: a new context, and candidates of another one of full length with random keys and values."""
        config = self.config
        plan, generator = StepPlan(), torch.Generator(self._device).manual_seed(rows)
        new = random_context(config, min(config.history_length, 20))
        long = self._allocate(random_context(config, config.history_length), None)
        long.keys_values.normal_(generator=generator)
        work = ContextWork(new, self._allocate(new, None))
        plan.add_context(work, work.state.length)
        plan.add_candidates(CandidateWork(0, 0, random_candidates(config, rows - plan.rows - 5), long))
        return plan

    def _works(self, items: Sequence[Item], made: dict[ContextKey, ContextState]) -> tuple[list[Work], list[Found]]:
        """The work to compute, and what was found for each item's context."""
        works: list[Work] = []
        results: list[Found] = []
        for number, item in enumerate(items):
            context, found = self._context_of(item, made)
            works.append((context, number, item.candidates, found[0]))
            results.append(found)
        return works, results

    def _context_of(self, item: Item, made: dict[ContextKey, ContextState]) -> tuple[ContextWork | None, Found]:
        """The context to compute before an item's candidates, if any, and what was found."""
        if item.state is not None:
            return None, (item.state, "hit", "")
        key = ContextKey.of(item.context, self.config)
        if key in made:
            return None, (made[key], "hit", "")
        entry = self._cache.find(key)
        if entry is not None:
            return None, (entry.state, "hit", self._cache.handle(entry, item))
        older = self._cache.find_prefix(key)
        state = self._allocate(item.context, older)
        made[key] = state
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


def _fused_kernels(config: ModelConfig, weights: SplitWeights, dtype: torch.dtype, *, plain: bool) -> Kernels:
    try:
        from model.split.kernels.fused import FusedKernels
    except ImportError as error:
        raise EngineError(f"the CUDA engine needs triton: {error}") from error
    return FusedKernels(config, weights, dtype, plain=plain)
