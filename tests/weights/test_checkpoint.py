"""Save, load, and everything that a load refuses."""

from __future__ import annotations

import gc
import os
import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from loadtest.fuzz.checkpoints import accepted, make_signed_nan, mutants, sign_again, write_small
from model.batch import collate
from tests import goldens
from weights.checkpoint import load_checkpoint, load_manifest, save_checkpoint
from weights.errors import CheckpointError
from weights.format import layout, reader
from weights.format.manifest import ContinuousOutput
from weights.synthetic.random_weights import mini_config, random_ranker

CONFIG = mini_config(3, (50, 60, 70), continuous_actions=2)
NAMES = [f"action_{index}" for index in range(19)]
OUTPUTS = [ContinuousOutput("first", 1, ""), ContinuousOutput("dwell_time", 30, "s")]


@pytest.fixture
def small(tmp_path: Path) -> Path:
    write_small(tmp_path / "small", 5)
    return tmp_path / "small"


def save(path: Path, **options: object) -> None:
    save_checkpoint(
        path, random_ranker(CONFIG, 1), name="x", action_names=NAMES, continuous=OUTPUTS, **options  # type: ignore[arg-type]
    )  # fmt: skip


@pytest.mark.parametrize("table_dtype", ["float32", "bfloat16"])
def test_a_saved_ranker_comes_back(tmp_path: Path, table_dtype: str) -> None:
    save(tmp_path / "c", table_dtype=table_dtype, score_weights={"action_3": -2}, version="7")
    loaded = load_checkpoint(tmp_path / "c")
    assert loaded.manifest.version == "7"
    assert loaded.manifest.score_weights == {"action_3": -2.0}
    assert loaded.manifest.config == loaded.ranker.config == CONFIG
    original = random_ranker(CONFIG, 1).state_dict()
    assert list(loaded.ranker.state_dict()) == list(original)
    for name, tensor in loaded.ranker.state_dict().items():
        dtype = getattr(torch, table_dtype) if name.startswith("tables.") else torch.float32
        assert tensor.dtype == dtype
        assert torch.equal(tensor, original[name].to(dtype)), name


def test_scores_survive_the_round_trip_bit_for_bit(tmp_path: Path) -> None:
    save(tmp_path / "c")
    batch = collate([goldens.features(goldens.requests("phoenix-mini")[3], CONFIG)], CONFIG)
    original, loaded = random_ranker(CONFIG, 1), load_checkpoint(tmp_path / "c").ranker
    for before, after in zip(original(batch), loaded(batch), strict=True):
        assert before.abs().max() > 0.1
        assert torch.equal(before, after)


def test_the_same_weights_and_names_have_the_same_identity(tmp_path: Path) -> None:
    for name in ("a", "b"):
        save(tmp_path / name)
    save(tmp_path / "c", score_weights={"action_0": 1.0})
    digests = [load_manifest(tmp_path / name).digest for name in "abc"]
    assert digests[0] == digests[1] != digests[2]
    assert re.fullmatch("[0-9a-f]{12}", load_manifest(tmp_path / "a").version)


def test_the_safetensors_library_reads_our_files_and_we_read_its(small: Path) -> None:
    loaded = load_checkpoint(small).ranker.state_dict()
    for file in small.glob("*.safetensors"):
        tensors = load_file(file)
        for name, tensor in tensors.items():
            assert torch.equal(tensor, loaded[name])
        save_file({name: tensor + 1 for name, tensor in tensors.items()}, file, metadata={"format": "pt"})
    sign_again(small)
    for name, tensor in load_checkpoint(small).ranker.state_dict().items():
        assert torch.equal(tensor, loaded[name] + 1)


def test_two_hundred_mutants_are_refused(tmp_path: Path) -> None:
    assert accepted(200, 11, tmp_path) == []


def nothing(*_: object) -> None:
    """A check that was switched off."""


def take_from_another(path: Path) -> None:
    """The parameters are those of another checkpoint of the same shape."""
    write_small(path.parent / "other", 6)
    shutil.copyfile(path.parent / "other" / "params.safetensors", path / "params.safetensors")


def swap_tables(path: Path) -> None:
    """Each file has its digest, and the table of the other."""
    first, second = path / "tables.user.safetensors", path / "tables.post.safetensors"
    user, post = first.read_bytes(), second.read_bytes()
    first.write_bytes(post)
    second.write_bytes(user)
    sign_again(path)


@pytest.mark.parametrize(
    ("damage", "check", "sentence"),
    [
        (take_from_another, "check_digest", r"params\.safetensors has SHA-256 .* instead of"),
        (lambda path: make_signed_nan(path, random.Random(1), path), "check_finite", "holds a NaN or an infinity in tensor"),
        (swap_tables, "check_stored", r"tables\.post\.safetensors lacks tensor tables\.post"),
    ],
)  # fmt: skip
def test_a_damage_is_refused_and_without_its_check_gets_in(
    small: Path, monkeypatch: pytest.MonkeyPatch, damage: Callable[[Path], object], check: str, sentence: str
) -> None:
    damage(small)
    with pytest.raises(CheckpointError, match=sentence):
        load_checkpoint(small)
    monkeypatch.setattr(reader, check, nothing)
    load_checkpoint(small)


def test_without_a_second_look_a_late_change_gets_in(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A write into the last table after its last byte was hashed."""
    table = small / "tables.user.safetensors"
    left = sum(entry.bytes for entry in load_manifest(small).files.values()) - header_bytes(small)

    def write(done: int, _total: int) -> None:
        if done == left:
            with table.open("r+b") as file:
                file.seek(-4, os.SEEK_END)
                file.write(random.randbytes(2) + b"\0\0")

    with pytest.raises(CheckpointError, match=r"tables\.user\.safetensors changed while it was being read"):
        load_checkpoint(small, write, threads=1)  # files one after another, tables.user last
    sign_again(small)
    monkeypatch.setattr(reader, "check_unchanged", nothing)
    load_checkpoint(small, write, threads=1)


def header_bytes(path: Path) -> int:
    """Bytes of a checkpoint's tensor files that are no data."""
    return sum(8 + int.from_bytes(file.read_bytes()[:8], "little") for file in path.glob("*.safetensors"))


def test_without_the_shape_check_no_sentence_is_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant = next(mutant for mutant in mutants(100, 9, tmp_path) if mutant.kind == "signed_wrong_shape")
    monkeypatch.setattr(layout, "check_tensors", nothing)
    with pytest.raises(RuntimeError, match="size mismatch"):
        mutant.load()


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (lambda path: (path / "manifest.json").unlink(), "manifest.json is missing"),
        (lambda path: (path / "params.safetensors").unlink(), "params.safetensors is missing"),
        (lambda path: (path / "params.safetensors").write_bytes(b"short"), r"params.safetensors is 5 bytes long instead of"),
        (lambda path: (path / "params.safetensors").write_bytes(b""), r"params.safetensors is 0 bytes long instead of"),
        (lambda path: (path / "manifest.json").write_text("{"), "manifest.json is not valid JSON"),
        (lambda path: (path / "manifest.json").write_text("[]"), "manifest.json must hold a JSON object"),
        (lambda path: (path / "manifest.json").write_text('{"format_version": 9}'), "format version 9, this build reads 1"),
    ],
)  # fmt: skip
def test_the_sentence_names_file_and_reason(small: Path, damage: Callable[[Path], object], sentence: str) -> None:
    damage(small)
    with pytest.raises(CheckpointError, match=sentence) as refused:
        load_checkpoint(small)
    assert str(small) in str(refused.value)
    assert str(refused.value).endswith(".")
    assert "\n" not in str(refused.value)


def test_a_link_to_a_checkpoint_directory_is_followed(small: Path) -> None:
    """The way to switch versions: `current` is a link that is renamed over."""
    (small.parent / "current").symlink_to(small)
    assert load_checkpoint(small.parent / "current").manifest == load_manifest(small)


def test_what_is_no_checkpoint_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for path in (tmp_path / "nothing", tmp_path / "file", tmp_path):
        with pytest.raises(CheckpointError, match=re.escape(str(path))):
            load_checkpoint(path)


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


@pytest.mark.parametrize("copied", [0, 2**30])
def test_a_write_to_the_loaded_tables_does_not_reach_the_file(
    small: Path, monkeypatch: pytest.MonkeyPatch, copied: int
) -> None:
    monkeypatch.setattr("weights.format.reader.COPIED_BYTES", copied)
    ranker = load_checkpoint(small).ranker
    ranker.tables.user.zero_()
    assert load_checkpoint(small).ranker.tables.user.abs().max() > 0


def test_a_write_to_a_mapped_file_is_seen_and_a_copied_one_is_not_touched(
    small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied = load_checkpoint(small)
    monkeypatch.setattr("weights.format.reader.COPIED_BYTES", 0)
    mapped = load_checkpoint(small)
    before = copied.ranker.tables.post.clone()
    assert (copied.mapped.changed(), mapped.mapped.changed()) == ("", "")
    (small / "params.safetensors").write_bytes(b"")  # in memory in any case
    (small / "tables.user.safetensors").unlink()  # what is mapped lives on
    assert mapped.mapped.changed() == ""
    with (small / "tables.post.safetensors").open("r+b") as file:
        file.seek(-4, os.SEEK_END)
        file.write(b"\xff\xff\xff\xff")
    assert "tables.post.safetensors was written to" in mapped.mapped.changed()
    assert copied.mapped.changed() == ""
    assert torch.equal(copied.ranker.tables.post, before)


def test_tables_are_mapped_while_the_ranker_lives(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weights.format.reader.COPIED_BYTES", 0)
    tables = {str(file) for file in small.glob("tables.*")}

    def mapped() -> set[str]:
        return {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines()} & tables

    ranker = load_checkpoint(small).ranker
    assert mapped() == tables
    del ranker
    gc.collect()
    assert mapped() == set()


def test_progress_reaches_all_bytes(small: Path) -> None:
    seen: list[tuple[int, int]] = []
    load_checkpoint(small, lambda done, total: seen.append((done, total)))
    done, total = seen[-1]
    assert done + header_bytes(small) == total == sum(file.stat().st_size for file in small.glob("*.safetensors"))
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
