"""Sets the initial values of a ranker. Upstream's are a saddle point that no gradient leaves; `leave_saddle` steps off it.

Upstream sets every linear weight and every norm scale to 0, and draws the input projections, the action projection, the
surface table and the heads (variance scaling). The branch of a decoder layer is then `norm1(0) = 0` with a scale of 0: its
derivative by the scale is 0 because the branch is 0, and by the weights because the scale is 0. Only the final norm, the heads and
the candidates' inputs would ever learn; the trunk would stay at exactly 0.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from model.config import HISTORY_COUNTS, MOST_COUNTED, ModelConfig
from model.inputs import COUNT_EDGES
from model.names import checkpoint_parameters
from model.ranker import Ranker, by_feature, candidate_features, history_features
from model.trunk import DecoderLayer

PRE_NORMS = ("attention_norm", "ffn_norm")
POST_NORMS = ("attention_post_norm", "ffn_post_norm")
LAST_LINEAR = ("output", "ffn_output")  # last of each branch: without a sandwich a layer adds their output
QUERY_KEY = (".query", ".key")
AUTHOR_DEVIATION = 1.0
USER_DEVIATION = 0.3
FAST_PAIR_GAIN = 0.1


def upstream(ranker: Ranker, generator: torch.Generator) -> None:
    """Upstream's initial values: zeros, and draws where upstream draws.

    A projection `[in, out]` is drawn with deviation 1/√in, the action projection and tables `[rows, D]` with 1/√D.
    Upstream does not draw the embedding tables. Post rows stay 0, so that an untrained one adds nothing. Rows of authors and codes are
    drawn, because what is equal must look equal to attention before anything is learned about it. All user rows are one row drawn once:
    from 0, the norm before attention would blow up the first steps; beside a common vector they stay small.
    """
    tokens, heads = ranker.tokens, ranker.heads
    with torch.no_grad():
        for parameter in ranker.parameters():
            parameter.zero_()
        for name, parameter in (*tokens.named_parameters(), *heads.named_parameters()):
            if parameter.ndim == 2:
                fan = parameter.shape[1] if name.endswith(("table", "action_projection")) else parameter.shape[0]
                draw(parameter, fan**-0.5, generator)
        draw(ranker.tables.author, AUTHOR_DEVIATION, generator)
        if ranker.config.token_levels:
            _draw_codes(tokens.code_table, ranker.config, generator)
        ranker.tables.user[:] = USER_DEVIATION * torch.randn(ranker.config.width, generator=generator)
        # share the post and author blocks, so that a candidate and an event of one author start as similar tokens
        # and so do those of equal codes
        candidate = by_feature(tokens.candidate_projection, candidate_features(ranker.config))
        history = by_feature(tokens.history_projection, history_features(ranker.config))
        for name in ("post", "author", "codes"):
            if name in candidate:
                candidate[name].copy_(history[name])


def silence(ranker: Ranker, actions: NDArray[np.bool_]) -> None:
    """Set the heads of these actions, bool `[A]`, to 0: their probability is 0.5 for every post, so it orders none, whatever it weighs."""
    with torch.no_grad():
        ranker.heads.actions.weight[:, torch.from_numpy(actions)] = 0


def code_deviation(config: ModelConfig) -> float:
    """The deviation of each code's row with which all codes of a post together weigh as much in its token as the rows of its author."""
    return AUTHOR_DEVIATION * math.sqrt(config.author_hashes.count / (config.code_levels or HISTORY_COUNTS))


def _draw_codes(table: Tensor, config: ModelConfig, generator: torch.Generator) -> None:
    """Content codes as authors: what is equal must look equal to attention. Counts of the history as multiples of one vector a level,
    by the logarithm of the count, so that a model begins with more is more and need not learn it number by number."""
    draw(table, code_deviation(config), generator)
    growth = torch.tensor(np.log1p(COUNT_EDGES) / np.log1p(COUNT_EDGES[-1]), dtype=torch.float32)
    for level in table.unflatten(0, (config.token_levels, config.token_values))[config.code_levels :]:
        level[:MOST_COUNTED] = growth[:, None] * level[:1].clone()


def stuck(module: nn.Module) -> list[str]:
    """Names of parameters that are all 0 and have a gradient of exactly 0 after a backward pass: no step moves them."""

    def zero(tensor: Tensor | None) -> bool:
        return tensor is None or not bool(tensor.any())

    return [name for name, parameter in checkpoint_parameters(module) if zero(parameter) and zero(parameter.grad)]


def leave_saddle(ranker: Ranker, generator: torch.Generator) -> None:
    """Draw the trunk's linear weights and set its inner norm scales to 1. The outer scales and every output bit stay the same.

    The outer scales (`…_post_norm`), or without a sandwich the last weights of both branches, are still 0, so each layer still
    adds exactly 0; but now they have a gradient.
    """
    zero_weights = POST_NORMS if ranker.config.sandwich else LAST_LINEAR
    with torch.no_grad():
        for layer in ranker.trunk.layers:
            assert isinstance(layer, DecoderLayer)
            for name, parameter in checkpoint_parameters(layer):
                if name in PRE_NORMS:
                    parameter.fill_(1)
                elif name not in zero_weights and not name.endswith("_bias"):
                    draw(parameter, parameter.shape[0] ** -0.5, generator)
            _match_queries_and_keys(layer, ranker.config)


def _match_queries_and_keys(layer: DecoderLayer, config: ModelConfig) -> None:
    """Make each key head a copy of the first query head that reads it; with RoPE, favour pairs that say little about position.

    A pair of RoPE that turns by more than half a circle over the history hides whether two tokens are alike.
    """
    if config.positions == "rope":
        _favour_slow_pairs(layer, config)
    queries = layer.attention.query.weight.unflatten(1, (config.kv_heads, -1, config.head_width))
    layer.attention.key.weight.copy_(queries[:, :, 0].flatten(1))


def _favour_slow_pairs(layer: DecoderLayer, config: ModelConfig) -> None:
    pairs = config.head_width // 2
    angles = config.history_length * config.rope_base ** (-torch.arange(pairs) / pairs)
    slow = angles <= math.pi
    gain = torch.where(slow, (pairs / slow.sum().clamp(min=1)).sqrt(), FAST_PAIR_GAIN)
    layer.attention.query.weight.mul_(gain.repeat(2 * config.query_heads))


def draw(parameter: Tensor, deviation: float, generator: torch.Generator) -> None:
    """Draw from a normal truncated at two deviations, as variance scaling does."""
    nn.init.trunc_normal_(parameter, std=deviation, a=-2 * deviation, b=2 * deviation, generator=generator)
