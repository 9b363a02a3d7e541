"""Floating-point operations and bytes of a forward that no implementation of the split can avoid."""

from __future__ import annotations

from dataclasses import dataclass

from model.config import ModelConfig

BF16_BYTES = 2


@dataclass(frozen=True, slots=True)
class Work:
    """Floating-point operations, and bytes moved if everything is read once."""

    flops: float
    nbytes: float


def forward_work(config: ModelConfig, context: int, candidates: int, *, cached: bool) -> Work:
    """The work of a request with `context` tokens and `candidates`, without the context's own share if `cached`.

    Weights are counted once in bf16, the cached keys and values once, embedding rows as products only.
    """
    width, head = config.width, config.head_width
    queries, keys = config.query_heads * head, config.kv_heads * head
    layer_weights = width * (queries + 2 * keys) + queries * width + 3 * width * config.ffn_width
    embeddings = (config.post_hashes.count + config.author_hashes.count) * width * width
    flops = 2.0 * candidates * (embeddings + config.layers * layer_weights)
    flops += 4.0 * queries * config.layers * candidates * (context + 1)
    if not cached:
        pairs = context * (context + 1) / 2 if config.context_attention == "causal" else context**2
        flops += 2.0 * context * (embeddings + (config.layers - 1) * layer_weights + 2 * width * keys)
        flops += 4.0 * queries * (config.layers - 1) * pairs
    stored = config.layers * 2 * context * keys * BF16_BYTES
    return Work(flops, BF16_BYTES * (config.layers * layer_weights + embeddings) + stored)
