"""Chooses the engine for a ranker: device, dtype and backend, with the reason. Reads no environment."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from model.config import CandidatePositions
from model.dense import DenseEngine
from model.engine import Engine
from model.ranker import Ranker


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """What an operator may choose. `cache_bytes` bounds the context cache; 0 turns it off. `threads` 0 leaves torch's choice."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    backend: Literal["auto", "dense", "native", "torch"] = "auto"
    candidate_positions: CandidatePositions = "shared"
    cache_bytes: int = 256 * 2**20
    threads: int = 0


def create_engine(ranker: Ranker, options: EngineOptions) -> Engine:
    """Build an engine; call its `warm_up` before the first forward. Raises EngineError where the choice cannot run here."""
    dtype = torch.bfloat16 if options.dtype == "bfloat16" else torch.float32
    return DenseEngine(ranker, dtype, options.candidate_positions)
