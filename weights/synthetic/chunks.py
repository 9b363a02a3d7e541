"""Random weights that are not zero, of any architecture, in the published layout or ours. For measuring and testing only."""

from __future__ import annotations

import json
import math
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.lib import format as npy
from torch import Tensor

from model.config import HashSpec, ModelConfig
from model.ranker import Ranker
from weights.format.layout import expected_shapes, is_table
from weights.published.importer import CONFIG_FILE, PARAMS_FILE, TABLES_FILE, published_name

_CHUNK_ELEMENTS = 2**18
_MODULUS = 2**61 - 1


def random_hashes(rng: np.random.Generator, vocab_size: int, count: int = 2) -> HashSpec:
    """Hash functions as the release has them: a large scale and bias each, modulo a Mersenne prime."""
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


def random_chunks(config: ModelConfig, seed: int) -> Callable[[str], Iterator[Tensor]]:
    """Flat float32 parts of each tensor by name: norm scales near 1, embeddings around 0.5, matrices that keep the size of
    what they multiply, so that every input moves every score. A tensor's values depend on seed, name and shape only."""
    shapes = expected_shapes(config)

    def chunks(name: str) -> Iterator[Tensor]:
        shape = shapes[name]
        rng = np.random.default_rng([seed, zlib.crc32(name.encode())])
        left = math.prod(shape)
        while left:
            values = torch.from_numpy(rng.standard_normal(min(left, _CHUNK_ELEMENTS), dtype=np.float32))
            left -= len(values)
            if len(shape) == 1:
                yield values.mul_(0.1).add_(1)
            else:
                yield values.mul_(0.5 if name.endswith("_table") or is_table(name) else shape[0] ** -0.5)

    return chunks


def random_ranker(config: ModelConfig, seed: int) -> Ranker:
    """A ranker in memory with the weights of `random_chunks`, without gradients."""
    ranker = Ranker(config).requires_grad_(False)
    chunks = random_chunks(config, seed)
    for name, tensor in ranker.state_dict().items():
        tensor.copy_(torch.cat(list(chunks(name))).view(tensor.shape))
    return ranker


def write_published(directory: Path, config: ModelConfig, seed: int) -> None:
    """The published layout of a random ranker, a part of a table at a time. `directory` must not exist."""
    directory.mkdir(parents=True)
    (directory / CONFIG_FILE).write_text(json.dumps(published_keys(config), indent=1))
    chunks = random_chunks(config, seed)
    shapes = expected_shapes(config)
    for file, tables, method in (
        (PARAMS_FILE, False, zipfile.ZIP_DEFLATED),
        (TABLES_FILE, True, zipfile.ZIP_STORED),  # as the release packs them
    ):
        with zipfile.ZipFile(directory / file, "w", method) as archive:
            for name in (name for name in shapes if is_table(name) == tables):
                info = zipfile.ZipInfo(f"{published_name(name)}.npy")
                info.compress_type = method
                with archive.open(info, "w", force_zip64=True) as member:
                    npy.write_array_header_1_0(member, {"descr": "<f4", "fortran_order": False, "shape": shapes[name]})
                    for chunk in chunks(name):
                        member.write(chunk.numpy().data)


def published_keys(config: ModelConfig) -> dict[str, Any]:
    """`config.json` of a config, every constant spelled out."""
    hash_params: dict[str, Any] = {}
    sizes: dict[str, int] = {}
    entities = {"user": config.user_hashes, "item": config.post_hashes, "author": config.author_hashes}
    for entity, spec in entities.items():
        hash_params |= {
            f"{entity}_hash_scales": list(spec.scales),
            f"{entity}_biases": list(spec.biases),
            f"{entity}_modulus": spec.modulus,
        }
        sizes |= {f"num_{entity}_hashes": spec.count, f"{entity}_vocab_size": spec.vocab_size}
    return {
        "emb_size": config.width,
        "num_actions": config.actions,
        "history_seq_len": config.history_length,
        "candidate_seq_len": config.candidate_length,
        "key_size": config.head_width,
        "num_heads": config.query_heads,
        "num_kv_heads": config.kv_heads,
        "num_layers": config.layers,
        "widening_factor": config.widening,
        "attn_output_multiplier": config.attention_multiplier,
        "product_surface_vocab_size": config.product_surfaces,
        "post_age_granularity_mins": config.post_age_granularity_minutes,
        "right_anchored_rope": config.right_anchored,
        **sizes,
        "hash_params": hash_params,
    }
