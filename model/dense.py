"""The plain definition behind the engine contract: one dense forward an item. The reference, and the slow baseline."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from model.batch import collate
from model.cache import ContextCache
from model.config import CandidatePositions
from model.engine import CacheStats, EngineInfo, Item, Outcome
from model.inputs import Context, Scores
from model.ranker import Ranker


class DenseEngine:
    """Runs `Ranker.forward` in the given dtype on the ranker's own device. Bits may depend on how many candidates an item has.

    It keeps no states: of a context with a handle at most `cache_bytes` hold what it was made of.
    """

    def __init__(
        self,
        ranker: Ranker,
        dtype: torch.dtype,
        candidate_positions: CandidatePositions = "shared",
        cache_bytes: int = 0,
    ) -> None:
        self.config = ranker.config
        self.ranker = ranker
        self.dtype = dtype
        self.device = ranker.heads.norm.device
        self.info = EngineInfo(str(self.device), str(dtype).removeprefix("torch."), "dense", candidate_positions, {})
        self._named: ContextCache[None] = ContextCache(cache_bytes, prefixes=False)

    def warm_up(self) -> None:
        """Nothing to prepare."""

    @torch.inference_mode()
    def forward(self, items: Sequence[Item]) -> list[Outcome]:
        """One forward an item, each with the full mask."""
        outcomes = []
        for item in items:
            batch = collate([(item.context, item.candidates)], self.config, self.info.candidate_positions)
            logits, continuous = self.ranker(batch.to(self.device), self.dtype)
            arrays = (tensor[0].cpu().numpy() for tensor in (logits, torch.sigmoid(logits), continuous))
            outcomes.append(Outcome(Scores(*arrays), None, "miss", self._named.name(item, self.config)))
        return outcomes

    def context_of(self, handle: str, caller: str) -> Context | None:
        """As `Engine.context_of`."""
        return self._named.context_of(handle, caller, self.config)

    def cache_stats(self) -> CacheStats:
        """No states are kept."""
        return CacheStats()

    def close(self) -> None:
        """The ranker belongs to the caller."""
        self._named.clear()
