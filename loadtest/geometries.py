"""The model configurations that benchmarks use, by name. `model.synthetic` makes their weights."""

from __future__ import annotations

from typing import Any

import torch

from model.config import HashSpec, ModelConfig
from model.ranker import Ranker

TABLE_ROWS = 5000  # embedding rows per entity; their number does not change the work


def _geometry(**shape: Any) -> ModelConfig:
    def spec(scale: int) -> HashSpec:
        return HashSpec((scale, scale + 12), (scale // 3, scale // 5), 2**61 - 1, TABLE_ROWS)

    return ModelConfig(
        candidate_length=64,
        actions=19,
        continuous_actions=8,
        has_dwell=True,
        has_post_age=True,
        user_hashes=spec(141364432931),
        post_hashes=spec(162646450045),
        author_hashes=spec(1042698161345),
        **shape,
    )


GEOMETRIES: dict[str, ModelConfig] = {
    "mini": _geometry(width=128, layers=4, query_heads=4, kv_heads=4, head_width=32, widening=2.0, history_length=127),
    "nano": _geometry(width=512, layers=4, query_heads=4, kv_heads=2, head_width=128, widening=2.0, history_length=1022),
    "seed": _geometry(width=2048, layers=24, query_heads=16, kv_heads=8, head_width=128, widening=4.0, history_length=512),
    "flagship": _geometry(width=2560, layers=8, query_heads=20, kv_heads=4, head_width=128, widening=2.0, history_length=1022),
}  # fmt: skip


def in_dtype(ranker: Ranker, dtype: torch.dtype) -> Ranker:
    """Cast the matrices of the ranker's trunk in place, so that the dense reference does not cast them in every call."""
    for layer in ranker.trunk.layers:
        for name, parameter in layer.named_parameters():
            if name.endswith(".weight"):
                parameter.data = parameter.data.to(dtype)
    return ranker
