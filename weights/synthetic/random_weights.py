"""Draws random weights for any architecture, none of them zero, for measurements and tests."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor

from model.config import HashSpec, ModelConfig
from weights.format.layout import expected_shapes, is_table

_PIECE_ELEMENTS = 2**18
_MODULUS = 2**61 - 1


def random_hashes(rng: np.random.Generator, vocab_size: int, count: int) -> HashSpec:
    """Hash functions like the release's: each with a large scale and bias, modulo a Mersenne prime."""
    scales, biases = (tuple(int(value) for value in rng.integers(10**9, 10**12, count)) for _ in range(2))
    return HashSpec(scales, biases, _MODULUS, vocab_size)


def mini_config(seed: int, rows: tuple[int, int, int], continuous_actions: int = 8, hashes: int = 2) -> ModelConfig:
    """The released mini model with every input of the May variant; `rows` of the user, post and author tables."""
    rng = np.random.default_rng(seed)
    user, post, author = (random_hashes(rng, vocab_size, hashes) for vocab_size in rows)
    return ModelConfig(
        width=128,
        layers=4,
        query_heads=4,
        kv_heads=4,
        head_width=32,
        history_length=127,
        candidate_length=64,
        actions=19,
        user_hashes=user,
        post_hashes=post,
        author_hashes=author,
        continuous_actions=continuous_actions,
        has_dwell=True,
        has_post_age=True,
    )


def random_pieces(config: ModelConfig, seed: int) -> Callable[[str], Iterator[Tensor]]:
    """Return a function from a tensor's name to its values, in flat float32 pieces of at most 1 MiB.

    Norm scales are near 1, biases near 0; embeddings have deviation 0.5; matrices keep the scale of their inputs, so every input moves
    every score. The values depend on seed, name and shape only.
    """
    shapes = expected_shapes(config)

    def pieces(name: str) -> Iterator[Tensor]:
        shape = shapes[name]
        rng = np.random.default_rng([seed, zlib.crc32(name.encode())])
        left = math.prod(shape)
        while left:
            values = torch.from_numpy(rng.standard_normal(min(left, _PIECE_ELEMENTS), dtype=np.float32))
            left -= len(values)
            if len(shape) == 1:
                yield values.mul_(0.1).add_(0 if name.endswith("_bias") else 1)
            else:
                yield values.mul_(0.5 if name.endswith("_table") or is_table(name) else shape[0] ** -0.5)

    return pieces
