"""Models with the weights of `weights.synthetic`, in memory."""

from __future__ import annotations

import torch

from model.config import ModelConfig, RetrievalConfig
from model.ranker import Ranker
from model.retrieval.towers import Towers
from weights.format.layout import empty_model
from weights.synthetic.random_weights import random_pieces


def random_model(config: ModelConfig, seed: int) -> Ranker | Towers:
    """A model in memory with the weights of `random_pieces`, without gradients."""
    model = empty_model(config).to_empty(device="cpu").requires_grad_(False)
    pieces = random_pieces(config, seed)
    for name, tensor in model.state_dict().items():
        tensor.copy_(torch.cat(list(pieces(name))).view(tensor.shape))
    return model


def retrieval_config(config: ModelConfig, *, linear_projection: bool = True) -> RetrievalConfig:
    """Configuration of two towers with the sizes of a ranker."""
    features = {"has_dwell": False, "has_post_age": False, "continuous_actions": 0, "context_attention": "causal"}
    return RetrievalConfig.from_dict(config.to_dict() | features | {"linear_projection": linear_projection})
