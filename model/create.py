"""Chooses the engine for a ranker: device, dtype and backend, with the reason. Reads no environment."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from model.config import CandidatePositions
from model.dense import DenseEngine
from model.device import free_memory
from model.engine import Engine, EngineError, EngineInfo
from model.layers import dtype_name
from model.memory import engine_bytes, require_room, usable_threads
from model.native.build import KernelUnavailable, Vectors
from model.native.engine import NativeEngine
from model.ranker import Ranker

Device = Literal["auto", "cpu", "cuda"]
Dtype = Literal["auto", "bfloat16", "float32"]
Backend = Literal["auto", "dense", "native", "torch"]

HOST_CACHE_BYTES = 256 * 2**20


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """What an operator may choose.

    `backend`: `native` is the C++ kernel (CPU only), `torch` the split engine (CUDA, and CPUs without a compiler), `dense`
    the reference; `auto` takes the fastest that passes its checks here, on CUDA down to the CPU's engine, where `torch` takes the fastest
    on the device or none. `cache_bytes` bounds
    the context cache, 0 turns it off, None is 256 MiB on a CPU and an eighth of the device's memory on CUDA, so that a reload has
    room for a second one. `threads` 0: `usable_threads`; `vectors` are those of `native`. Compiled code is kept in `kernel_directory`, by
    default the user's cache.
    """

    device: Device = "auto"
    dtype: Dtype = "auto"
    backend: Backend = "auto"
    candidate_positions: CandidatePositions = "shared"
    cache_bytes: int | None = None
    threads: int = 0
    vectors: Vectors = "auto"
    kernel_directory: Path | None = None


def create_engine(ranker: Ranker, options: EngineOptions) -> Engine:
    """Build an engine; call its `warm_up` before the first forward. Raises EngineError if it cannot run here."""
    device = find_device(options.device)
    torch.set_num_threads(options.threads or usable_threads())
    if device.type == "cuda" and options.backend in ("auto", "torch"):
        return _ladder(ranker, options, device)
    if options.backend == "auto":
        return _for_cpu(ranker, options)
    _require_room(ranker, device)
    if options.backend == "native":
        return _native(ranker, options, device)
    if options.backend == "torch":
        return _split(ranker, options, device)
    budget = cache_budget(options.cache_bytes, torch.device("cpu"))  # it keeps columns in host memory, no states
    return DenseEngine(ranker.to(device), _dtype(options.dtype, device), options.candidate_positions, budget)


def _ladder(ranker: Ranker, options: EngineOptions, device: torch.device) -> Engine:
    """The first way of computing that passes its checks on this card, or else the CPU's engine. With backend `torch` there is one way."""
    from model.split.ladder import LadderEngine, Rung
    from model.split.probe import Trial, try_in_child

    dtype, positions = _dtype(options.dtype, device), options.candidate_positions

    def rung(name: str, kernels: Literal["triton", "torch"]) -> Rung:
        tables = dtype_name(ranker.tables.user.dtype)
        needed = _needed_bytes(ranker, device)
        trial = Trial(ranker.config, str(device), dtype_name(dtype), positions, kernels, tables, needed)

        def probe() -> str:  # the first to use the card is the child: a driver that hangs there hangs no server
            free_memory(device)  # what this process gives back is free for the child too
            return try_in_child(trial)

        def build() -> Engine:
            _require_room(ranker, device)
            return _split(ranker, options, device, kernels)

        return Rung(name, build, probe, device)

    rungs = [rung("recorded", "triton")]
    if options.backend == "auto":
        rungs += [rung("torch", "torch"), Rung("cpu", lambda: _for_cpu(ranker, options))]
    info = EngineInfo(str(device), dtype_name(dtype), "torch", positions, {})
    return LadderEngine(ranker, rungs, info)


def _for_cpu(ranker: Ranker, options: EngineOptions) -> Engine:
    """The native engine or, where its kernel cannot be built, plain torch."""
    cpu = torch.device("cpu")
    _require_room(ranker, cpu)
    try:
        return _native(ranker, options, cpu)
    except KernelUnavailable as error:
        engine = _split(ranker, options, cpu)
        engine.info.notes["fallback"] = str(error)
        return engine


def _require_room(ranker: Ranker, device: torch.device) -> None:
    """Raises EngineError if the device lacks memory for the engine. On a card, gives back before what torch keeps there unused."""
    if device.type == "cuda":
        free_memory(device)
    require_room(_needed_bytes(ranker, device), device)


def _needed_bytes(ranker: Ranker, device: torch.device) -> int:
    """Bytes that the engine needs: on a card for the embedding tables too."""
    tables = sum(table.nbytes for table in ranker.tables.parameters()) if device.type == "cuda" else 0
    return engine_bytes(ranker) + tables


def _native(ranker: Ranker, options: EngineOptions, device: torch.device) -> Engine:
    if device.type != "cpu":
        raise EngineError("backend 'native' runs on the CPU only: choose device 'cpu', or backend 'torch'")
    return NativeEngine(
        ranker,
        None if options.dtype == "auto" else getattr(torch, options.dtype),
        options.candidate_positions,
        cache_bytes=cache_budget(options.cache_bytes, device),
        threads=options.threads,
        vectors=options.vectors,
        kernel_directory=options.kernel_directory,
        only_if_fast=options.backend == "auto",
    )


def _split(
    ranker: Ranker, options: EngineOptions, device: torch.device, kernels: Literal["auto", "torch", "triton"] = "auto"
) -> Engine:
    from model.split.engine import SplitEngine  # imported late: its kernels are not needed where the native engine runs

    dtype = _dtype(options.dtype, device)
    cache_bytes = cache_budget(options.cache_bytes, device)
    return SplitEngine(ranker, device, dtype, options.candidate_positions, cache_bytes, kernels=kernels)


def cache_budget(requested_bytes: int | None, device: torch.device) -> int:
    """Bytes of the context cache: from the device's total memory, not what is free, so that a reload gets the same."""
    if requested_bytes is not None:
        return requested_bytes
    return torch.cuda.mem_get_info(device)[1] // 8 if device.type == "cuda" else HOST_CACHE_BYTES


def find_device(choice: Device) -> torch.device:
    """The torch device for an operator's choice on this machine. Raises EngineError if there is none."""
    if choice == "cuda" and not torch.cuda.is_available():
        raise EngineError("device 'cuda' was asked for, but torch sees no CUDA device here: choose 'auto' or 'cpu'")
    return torch.device("cuda" if choice != "cpu" and torch.cuda.is_available() else "cpu")


def _dtype(choice: Dtype, device: torch.device) -> torch.dtype:
    """bf16 on CUDA by default; fp32 on a CPU, where torch's bf16 is fast on few processors."""
    if choice == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    dtype: torch.dtype = getattr(torch, choice)
    return dtype
