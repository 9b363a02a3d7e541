"""Save and load. What a load refuses is in `test_damaged_checkpoints.py`."""

from __future__ import annotations

import gc
import os
import shutil
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.random_models import random_model
from tests.weights.small import sign, write_small
from weights.checkpoint import load_checkpoint, load_encoder, load_manifest, save_checkpoint
from weights.errors import CheckpointError
from weights.format.manifest import ContinuousOutput
from weights.format.writer import write_checkpoint
from weights.published.importer import labels_for
from weights.synthetic.random_weights import mini_config, random_pieces

CONFIG = mini_config(3, (50, 60, 70), continuous_actions=2)
NAMES = [f"action_{index}" for index in range(19)]
OUTPUTS = [ContinuousOutput("first", 1.0, ""), ContinuousOutput("dwell_time", 30.0, "s")]


def save(path: Path, **options: object) -> None:
    save_checkpoint(
        path, random_model(CONFIG, 1), name="x", action_names=NAMES, continuous=OUTPUTS, **options  # type: ignore[arg-type]
    )  # fmt: skip


@pytest.mark.parametrize("table_dtype", ["float32", "bfloat16"])
def test_a_saved_ranker_comes_back(tmp_path: Path, table_dtype: str) -> None:
    save(tmp_path / "c", table_dtype=table_dtype, score_weights={"action_3": -2}, version="7")
    loaded = load_checkpoint(tmp_path / "c")
    save(tmp_path / "again", table_dtype=table_dtype, score_weights={"action_3": -2}, version="7")
    assert load_manifest(tmp_path / "again").digest == loaded.manifest.digest
    assert loaded.manifest.version == "7"
    assert loaded.manifest.score_weights == {"action_3": -2.0}
    assert loaded.manifest.config == loaded.ranker.config == CONFIG
    original = random_model(CONFIG, 1).state_dict()
    assert list(loaded.ranker.state_dict()) == list(original)
    for name, tensor in loaded.ranker.state_dict().items():
        dtype = getattr(torch, table_dtype) if name.startswith("tables.") else torch.float32
        assert tensor.dtype == dtype
        assert torch.equal(tensor, original[name].to(dtype)), name


def test_the_safetensors_library_reads_our_files_and_we_read_its(small: Path) -> None:
    loaded = load_checkpoint(small).ranker.state_dict()
    for file in small.glob("*.safetensors"):
        tensors = load_file(file)
        for name, tensor in tensors.items():
            assert torch.equal(tensor, loaded[name])
        save_file({name: tensor + 1 for name, tensor in tensors.items()}, file, metadata={"format": "pt"})
    sign(small)
    for name, tensor in load_checkpoint(small).ranker.state_dict().items():
        assert torch.equal(tensor, loaded[name] + 1)


def test_a_ranker_is_no_encoder_and_an_encoder_no_ranker() -> None:
    with pytest.raises(CheckpointError, match="it is a ranker, which has no towers"):
        load_encoder("weights/demo")
    with pytest.raises(CheckpointError, match=r"it is a retrieval model \(two towers\), which cannot rank"):
        load_checkpoint("weights/demo-towers")


def test_a_replaced_directory_is_read_as_one(tmp_path: Path) -> None:
    """A rename in the middle of a load: every byte still comes from the directory that was opened."""
    write_small(tmp_path / "served", 5)
    write_small(tmp_path / "next", 6)
    served = load_checkpoint(tmp_path / "served")
    original = {name: tensor.clone() for name, tensor in served.ranker.state_dict().items()}

    def swap(_done: int, _total: int) -> None:
        if (tmp_path / "next").exists():
            (tmp_path / "served").rename(tmp_path / "old")
            (tmp_path / "next").rename(tmp_path / "served")

    loaded = load_checkpoint(tmp_path / "served", swap)
    assert loaded.manifest.digest == served.manifest.digest != load_manifest(tmp_path / "served").digest
    for name, tensor in loaded.ranker.state_dict().items():
        assert torch.equal(tensor, original[name])


@pytest.fixture(scope="module")
def written_large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint whose user table is long enough to be mapped."""
    path = tmp_path_factory.mktemp("large") / "checkpoint"
    config = replace(mini_config(5, (300_000, 40, 41)), width=16, layers=1, head_width=4)
    write_checkpoint(path, config, random_pieces(config, 5), labels_for(config, "large"))
    return path


@pytest.fixture
def large(written_large: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(written_large, tmp_path / "large"))


@pytest.mark.slow
def test_a_write_to_the_loaded_tables_does_not_reach_the_file(large: Path) -> None:
    ranker = load_checkpoint(large).ranker
    ranker.tables.user.zero_()
    ranker.tables.post.zero_()
    again = load_checkpoint(large).ranker
    assert again.tables.user.abs().max() > 0
    assert again.tables.post.abs().max() > 0


def test_a_write_to_a_mapped_file_is_noticed(large: Path) -> None:
    loaded = load_checkpoint(large)
    post = loaded.ranker.tables.post.clone()
    for name in ("params.safetensors", "tables.post.safetensors"):  # short: read into memory
        (large / name).write_bytes(b"")
    assert loaded.mapped.changed() == ""
    assert torch.equal(loaded.ranker.tables.post, post)
    with (large / "tables.user.safetensors").open("r+b") as file:
        file.seek(-4, os.SEEK_END)
        file.write(b"\xff\xff\xff\xff")
    assert "tables.user.safetensors was written to" in loaded.mapped.changed()


def test_tables_stay_mapped_as_long_as_the_ranker_lives(large: Path) -> None:
    def is_mapped() -> bool:
        return str(large / "tables.user.safetensors") in Path("/proc/self/maps").read_text()

    loaded = load_checkpoint(large)
    assert is_mapped()
    (large / "tables.user.safetensors").unlink()
    assert loaded.mapped.changed() == ""
    assert is_mapped()
    del loaded
    gc.collect()
    assert not is_mapped()


def test_a_just_written_file_is_read_when_its_time_is_reliable(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock of file times is coarse: a write in the same tick would not be seen."""
    params = small / "params.safetensors"  # read first
    written = params.stat().st_ctime
    monkeypatch.setattr(time, "time", lambda: written)
    monkeypatch.setattr(time, "sleep", lambda _: params.write_bytes(params.read_bytes()[:-4] + b"1234"))
    with pytest.raises(CheckpointError, match=r"params\.safetensors changed while it was being read"):
        load_checkpoint(small, threads=1)


def test_progress_reaches_all_bytes(small: Path) -> None:
    seen: list[tuple[int, int]] = []
    load_checkpoint(small, lambda done, total: seen.append((done, total)))
    done, total = seen[-1]
    assert total == sum(file.stat().st_size for file in small.glob("*.safetensors"))
    assert total - 4 * 4096 < done <= total, "all but the headers"
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
