"""A decoder's trunk under a ranker: its numbers stay, inputs and heads are given or new, and the result is a checkpoint like any other."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from model.create import EngineOptions, create_engine
from model.tolerances import TRUNKS
from tests import trunk_goldens as goldens
from tests.model.builders import random_config, random_ranker
from tests.weights.call import call
from weights.checkpoint import load_checkpoint, save_checkpoint

ACTIONS = tuple(f"action_{index}" for index in range(7))


def ranker_at(path: Path, **shape: Any) -> Path:
    """A checkpoint of random weights to graft onto."""
    save_checkpoint(
        path, random_ranker(random_config(continuous_actions=0, **shape)), name="base", action_names=ACTIONS
    )
    return path


@pytest.mark.parametrize("name", ["gemma", "gemma2"])
def test_where_widths_agree_inputs_and_heads_are_given(name: str, tmp_path: Path) -> None:
    goldens.decoder_directory(name, tmp_path / "decoder")
    base = ranker_at(tmp_path / "base", width=48, history_length=13)
    grafted = call("graft", "--trunk", tmp_path / "decoder", "--onto", base, "--out", tmp_path / "out")
    assert grafted.exit_code == 0, grafted.output
    assert f"a trunk of {name}" in grafted.stdout
    assert f"Its inputs and heads are those of {base}." in grafted.stdout
    assert call("verify", tmp_path / "out").exit_code == 0
    ours, given = load_checkpoint(tmp_path / "out").ranker, load_checkpoint(base).ranker.state_dict()
    assert all(
        torch.equal(tensor, given[key])
        for key, tensor in ours.state_dict().items()
        if not key.startswith("trunk.") and key != "heads.norm"
    )
    expected = goldens.arrays(name, "expected")
    x, positions = torch.from_numpy(expected["x"]), torch.from_numpy(expected["ranking/positions"])
    final = goldens.run(ours, x, positions, goldens.mask_of("ranking", 14, len(x)), torch.float32, final=True)[-1]
    assert (final - torch.from_numpy(expected["ranking/final_fp32"])).abs().max() <= TRUNKS[name].final
    engine = create_engine(ours, EngineOptions(device="cpu", dtype="float32", threads=1))
    engine.warm_up()
    assert engine.info.notes["self_test"]["different_bits"] == 0


def test_where_they_do_not_they_are_new_and_it_says_so(tmp_path: Path) -> None:
    goldens.decoder_directory("llama", tmp_path / "decoder")
    base = ranker_at(tmp_path / "base", width=48)
    grafted = call("graft", "--trunk", tmp_path / "decoder", "--onto", base, "--out", tmp_path / "out", "--seed", 3)
    assert grafted.exit_code == 0, grafted.output
    assert f"Its inputs and heads are new, for those of {base} are 48 wide" in grafted.stdout
    made = load_checkpoint(tmp_path / "out")
    assert (made.manifest.config.width, made.manifest.config.attention_cap) == (64, None)
    assert made.manifest.action_names == ACTIONS
    assert made.ranker.tokens.history_projection.any()
    assert made.ranker.heads.actions.any()


@pytest.mark.parametrize(
    ("name", "changes", "reason"),
    [
        ("gemma2", {"sliding_window": 38}, "sees 38 tokens back in some layers, which is not implemented"),
        (
            "gemma",
            {"intermediate_size": 96},
            "has trunk.layers.0.ffn_gate as .48, 144. .inputs first., where its config asks",
        ),
        ("gemma", {"num_key_value_heads": 3}, r"cannot be a ranker's trunk: query_heads .4. must be a multiple"),
        ("gemma", {"head_dim": 15}, "cannot be a ranker's trunk: head_width must be even, got 15"),
        ("gemma", {"num_hidden_layers": 5}, "lacks tensor layers.2.input_layernorm.weight"),
        ("llama", {"hidden_act": "relu"}, "its activation is 'relu'"),
    ],
)
def test_what_cannot_be_a_trunk_is_refused(name: str, changes: dict[str, Any], reason: str, tmp_path: Path) -> None:
    goldens.decoder_directory(name, tmp_path / "decoder", **changes)
    base = ranker_at(tmp_path / "base", width=48)
    refused = call("graft", "--trunk", tmp_path / "decoder", "--onto", base, "--out", tmp_path / "out")
    assert refused.exit_code == 1
    assert re.search(reason, refused.stderr), refused.stderr
    assert len(refused.stderr.splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_a_window_that_just_holds_a_request_is_taken(tmp_path: Path) -> None:
    goldens.decoder_directory("gemma2", tmp_path / "decoder", sliding_window=39)
    base = ranker_at(tmp_path / "base", width=48)
    assert call("graft", "--trunk", tmp_path / "decoder", "--onto", base, "--out", tmp_path / "out").exit_code == 0
