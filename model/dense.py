"""The plain definition as an engine (one dense forward per item: the reference and slow baseline), and its attention weights."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from model.batch import Batch, collate
from model.cache import ContextCache
from model.config import CandidatePositions
from model.device import free_memory, losses_of
from model.engine import CacheStats, EngineError, EngineInfo, Item, Outcome
from model.inputs import Candidates, Context, Scores
from model.layers import attention_weights, dtype_name
from model.ranker import Ranker


class DenseEngine:
    """Runs `Ranker.forward` in the given dtype on the ranker's own device. Bits may depend on how many candidates an item has.

    It keeps no states. Of contexts with a handle it keeps the input columns, in at most `cache_bytes`.
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
        self.device = ranker.tokens.user_projection.device
        self.info = EngineInfo(str(self.device), dtype_name(dtype), "dense", candidate_positions, {})
        self._named: ContextCache[None] = ContextCache(cache_bytes, prefixes=False)

    def warm_up(self) -> None:
        """Nothing to prepare."""

    @torch.inference_mode()
    def forward(self, items: Sequence[Item]) -> list[Outcome]:
        """One forward per item, each with the full mask. If the device runs out of memory, an EngineError says so."""
        try:
            with losses_of(self.device):
                return self._forward(items)
        except torch.OutOfMemoryError as error:
            free_memory(self.device)
            raise EngineError("the device is out of memory") from error

    def _forward(self, items: Sequence[Item]) -> list[Outcome]:
        outcomes = []
        for item in items:
            batch = collate([(item.context, item.candidates)], self.config, self.info.candidate_positions)
            logits, continuous = self.ranker(batch.to(self.device), self.dtype)
            arrays = (tensor[0].cpu().numpy() for tensor in (logits, torch.sigmoid(logits), continuous))
            outcomes.append(Outcome(Scores(*arrays), None, "miss", self._named.name(item, self.config)))
        return outcomes

    def context_of(self, handle: str, caller: str) -> Context | None:
        """The context of a handle given to this caller, None if it is no longer kept. Safe to call from any thread."""
        return self._named.context_of(handle, caller, self.config)

    def cache_stats(self) -> CacheStats:
        """No states are kept."""
        return CacheStats()

    def close(self) -> None:
        """Drop the kept contexts. The ranker belongs to the caller."""
        self._named.clear()


@torch.inference_mode()
def forward_on(ranker: Ranker, batch: Batch, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """`Ranker.forward` with trunk and heads on another device, where one layer at a time needs room. Tokens are made where the ranker's
    tables are. Returns logits fp32 `[B, C, A]` and continuous values fp32 `[B, C, Z]`."""
    hidden, mask, start = ranker.build_inputs(batch.to(ranker.tokens.user_projection.device))
    hidden, mask, positions = hidden.to(device, dtype), mask.to(device), batch.positions.to(device)
    hidden, rope = ranker.trunk.with_positions(hidden, positions)
    for layer in ranker.trunk.decoder_layers():
        hidden = _there(layer, device)(hidden, rope, mask)
    logits, continuous = _there(ranker.heads, device)(hidden[:, start:])
    return logits, continuous


def _there(module: nn.Module, device: torch.device) -> nn.Module:
    """The module itself if it is on the device, else a copy of it there."""
    is_there = next(module.parameters()).device == device
    return module if is_there else copy.deepcopy(module).to(device)


@torch.inference_mode()
def candidate_attention(
    ranker: Ranker, context: Context, candidates: Candidates, positions: CandidatePositions = "shared"
) -> NDArray[np.float32]:
    """Attention weights of the candidates' rows by layer and head, `[L, N, C, 1 + h + 1]`: on the user, on each event of the history
    and on the candidate itself. Rows sum to 1; padding gets 0. One layer's weights are held at a time. In fp32, to explain scores."""
    config = ranker.config
    batch = collate([(context, candidates)], config, positions).to(ranker.tokens.user_projection.device)
    hidden, mask, start = ranker.build_inputs(batch)
    hidden, rope = ranker.trunk.with_positions(hidden, batch.positions)
    rows: list[NDArray[np.float32]] = []
    for layer in ranker.trunk.decoder_layers():
        query, key = layer.attention.query_and_key(layer.attention_norm(hidden), rope)
        seen = mask[:, start:]
        weights = attention_weights(query[:, start:], key, seen, config.attention_multiplier, config.attention_cap)[0]
        itself = weights[:, :, start:].diagonal(dim1=1, dim2=2)[..., None]
        rows.append(torch.cat((weights[:, :, :start], itself), -1).cpu().numpy())
        hidden = layer(hidden, rope, mask)
    return np.stack(rows)
