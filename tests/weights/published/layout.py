"""Writes a random model in the published layout, as if downloaded, for measurements and tests of the import."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any

from numpy.lib import format as npy

from model.config import ModelConfig
from weights.format.layout import expected_shapes, is_table
from weights.published.importer import CONFIG_FILE, ENTITIES, OPTIONAL, PARAMS_FILE, SIZES, TABLES_FILE, published_name
from weights.synthetic.random_weights import random_pieces


def write_published(directory: Path, config: ModelConfig, seed: int) -> None:
    """Write config.json and the two npz files of a random ranker, streaming the tables. `directory` must not exist."""
    directory.mkdir(parents=True)
    (directory / CONFIG_FILE).write_text(json.dumps(published_keys(config), indent=1))
    pieces = random_pieces(config, seed)
    shapes = expected_shapes(config)
    for file, tables, method in (
        (PARAMS_FILE, False, zipfile.ZIP_DEFLATED),
        (TABLES_FILE, True, zipfile.ZIP_STORED),  # packed as in the release
    ):
        with zipfile.ZipFile(directory / file, "w", method) as archive:
            for name in (name for name in shapes if is_table(name) == tables):
                info = zipfile.ZipInfo(f"{published_name(name, False)}.npy")
                info.compress_type = method
                with archive.open(info, "w", force_zip64=True) as member:
                    npy.write_array_header_1_0(member, {"descr": "<f4", "fortran_order": False, "shape": shapes[name]})
                    for piece in pieces(name):
                        member.write(piece.numpy().data)


def published_keys(config: ModelConfig) -> dict[str, Any]:
    """The `config.json` of an architecture, with every constant spelled out."""
    hash_params: dict[str, Any] = {}
    sizes: dict[str, int] = {}
    for entity, name in ENTITIES.items():
        spec = getattr(config, name)
        hash_params |= {
            f"{entity}_hash_scales": list(spec.scales),
            f"{entity}_biases": list(spec.biases),
            f"{entity}_modulus": spec.modulus,
        }
        sizes |= {f"num_{entity}_hashes": spec.count, f"{entity}_vocab_size": spec.vocab_size}
    return {
        **{key: getattr(config, name) for key, name in SIZES.items()},
        **{key: getattr(config, name) for key, (name, _) in OPTIONAL.items() if key != "context_attention"},
        **sizes,
        "hash_params": hash_params,
    }
