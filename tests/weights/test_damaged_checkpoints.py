"""Damaged and forged checkpoints are refused with a sentence that names the file; none is loaded, and none ends the process."""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.weights.call import call
from tests.weights.small import sign, write_small
from weights.checkpoint import load_checkpoint, load_manifest
from weights.errors import CheckpointError

PARAMS, USER, POST = "params.safetensors", "tables.user.safetensors", "tables.post.safetensors"
NO_HEADER, NO_MANIFEST = f"{PARAMS} is not a readable safetensors file", "manifest.json is not as it should be"
ACTIONS = "heads.actions"
LFS_POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"4d" * 32 + b"\nsize 1475837465\n"

Damage = Callable[[Path], object]


def edit(name: str, change: Callable[[bytearray], object]) -> Damage:
    """Change the bytes of a file."""

    def damage(path: Path) -> None:
        raw = bytearray((path / name).read_bytes())
        change(raw)
        (path / name).write_bytes(raw)

    return damage


def holds(name: str, content: bytes) -> Damage:
    """A file with this content."""
    return lambda path: (path / name).write_bytes(content)


def flip(name: str, place: int) -> Damage:
    def change(raw: bytearray) -> None:
        raw[place] ^= 1

    return edit(name, change)


def header(change: Callable[[dict[str, Any]], object]) -> Damage:
    """Rewrite the header of the parameters' file and sign."""

    def damage(path: Path) -> None:
        raw = (path / PARAMS).read_bytes()
        length = int.from_bytes(raw[:8], "little")
        entries = json.loads(raw[8 : 8 + length])
        change(entries)
        text = json.dumps(entries).encode()
        (path / PARAMS).write_bytes(struct.pack("<Q", len(text)) + text + raw[8 + length :])
        sign(path)

    return damage


def entry(**changes: Any) -> Damage:
    """Change what the header says of the tensor heads.actions, and sign."""
    return header(lambda entries: entries[ACTIONS].update(changes))


def raw_header(text: bytes, length: int | None = None) -> Damage:
    """Put this header before 16 bytes of data and sign."""

    def damage(path: Path) -> None:
        (path / PARAMS).write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + bytes(16))
        sign(path)

    return damage


def manifest(change: Callable[[dict[str, Any]], object]) -> Damage:
    """Change the manifest and sign it."""
    return lambda path: sign(path, change)


def signed_number(name: str, number: bytes) -> Damage:
    """Replace the last number of a file and sign."""

    def damage(path: Path) -> None:
        edit(name, lambda raw: raw.__setitem__(slice(-len(number), None), number))(path)
        sign(path)

    return damage


def replaced(name: str, make: Callable[[Path], object]) -> Damage:
    def damage(path: Path) -> None:
        (path / name).unlink()
        make(path / name)

    return damage


def from_another(path: Path) -> None:
    write_small(path.parent / "other", 6)
    shutil.copyfile(path.parent / "other" / PARAMS, path / PARAMS)


def swapped_tables(path: Path) -> None:
    (path / USER).rename(path / "x")
    (path / POST).rename(path / USER)
    (path / "x").rename(path / POST)


def linked(path: Path) -> None:
    """The right bytes, but outside the directory."""
    (path / PARAMS).rename(path.parent / PARAMS)
    (path / PARAMS).symlink_to(path.parent / PARAMS)


def renamed(path: Path) -> None:
    """An edit by hand, after which the digest is not that of the content."""
    file = path / "manifest.json"
    file.write_text(file.read_text().replace('"small"', '"smart"'))


def wrong_shape(path: Path) -> None:
    header(lambda entries: entries[ACTIONS].update(shape=[19, 16]))(path)
    sign(path, lambda values: values["tensors"][ACTIONS].update(shape=[19, 16]))


def in_bfloat16(path: Path) -> None:
    """Parameters must be float32, whatever file and manifest say together."""
    tensors = load_file(path / PARAMS)
    save_file(tensors | {ACTIONS: tensors[ACTIONS].bfloat16()}, path / PARAMS)
    sign(path, lambda values: values["tensors"][ACTIONS].update(dtype="bfloat16"))


def table_as(dtype: torch.dtype) -> Damage:
    """The table of users in another dtype, by file and manifest together."""

    def damage(path: Path) -> None:
        save_file({"tables.user": load_file(path / USER)["tables.user"].to(dtype)}, path / USER)
        named = str(dtype).removeprefix("torch.")
        sign(path, lambda values: values["tensors"]["tables.user"].update(dtype=named))

    return damage


DAMAGES: dict[str, tuple[Damage, str]] = {
    "a file is missing": (lambda path: (path / PARAMS).unlink(), f"{PARAMS} is missing"),
    "a shard is missing": (lambda path: (path / POST).unlink(), f"refused: {POST} is missing"),
    "the manifest is missing": (lambda path: (path / "manifest.json").unlink(), "manifest.json is missing"),
    "a file is cut": (edit(PARAMS, lambda raw: raw.pop()), f"{PARAMS} is .* bytes long instead of"),
    "a file has grown": (edit(USER, lambda raw: raw.extend(b"more")), f"{USER} is .* bytes long instead of"),
    "a bit of a parameter": (flip(PARAMS, -2), f"{PARAMS} has SHA-256 .* instead of"),
    "a bit of a table": (flip(USER, -2), f"{USER} has SHA-256 .* instead of"),
    "a bit of a header": (flip(POST, 20), POST),
    "a file of another checkpoint": (from_another, f"{PARAMS} has SHA-256"),
    "tables in each other's place": (swapped_tables, r"tables\.(user|post)\.safetensors lacks tensor"),
    "a link": (linked, f"{PARAMS} cannot be opened, or is a symbolic link"),
    "a pipe": (replaced(PARAMS, os.mkfifo), f"{PARAMS} is not a regular file"),
    "an LFS pointer for a tensor file": (holds(USER, LFS_POINTER), f"{USER} is a Git LFS pointer.*git lfs pull"),
    "NaN in a parameter": (signed_number(PARAMS, struct.pack("<f", float("nan"))), f"{PARAMS} holds a NaN or an infinity in tensor"),
    "infinity in a table": (signed_number(USER, struct.pack("<f", float("-inf"))), f"{USER} holds a NaN or an infinity"),
    "a tensor of another name": (header(lambda entries: entries.update({"\x1b[31m": entries.pop("heads.norm")})), f"{PARAMS} lacks tensor"),
    "one tensor more": (header(lambda entries: entries.update(more={"dtype": "F32", "shape": [0], "data_offsets": [0, 0]})), f"{PARAMS} "),
    "another shape in the file": (entry(shape=[19, 16]), f"{PARAMS} holds tensor heads.actions as float32"),
    "another shape in both": (wrong_shape, f"{PARAMS} has tensor heads.actions of shape .* the architecture asks"),
    "parameters in bfloat16": (in_bfloat16, f"{PARAMS} has tensor heads.actions as bfloat16; parameters must be float32"),
    "one table of three in bfloat16": (
        table_as(torch.bfloat16),
        r"tables\.author is float32 in tables\.author\.safetensors and tables\.user is bfloat16 in tables\.user\.safetensors: all "
        "tables must have one dtype",
    ),
    "a table of int32": (table_as(torch.int32), f"{USER} has tensor tables.user as int32; tables must be float32 or bfloat16"),
    "a table of bytes": (table_as(torch.uint8), f"{USER} has tensor tables.user as uint8; tables must be float32 or bfloat16"),
    "a dtype that is not stored": (entry(dtype="U32"), f"{PARAMS} holds tensor heads.actions as U32; only"),
    "offsets that overlap": (entry(data_offsets=[4, 1220]), NO_HEADER),
    "negative offsets": (entry(data_offsets=[-4, 1212]), NO_HEADER),
    "offsets beyond the file": (entry(data_offsets=[2**40, 2**40 + 1216]), NO_HEADER),
    "a header beyond the file": (raw_header(b"{}", 2**40), NO_HEADER),
    "a header that is a list": (raw_header(b"[]"), NO_HEADER),
    "the manifest is no JSON": (holds("manifest.json", b"{"), "manifest.json is not valid JSON"),
    "the manifest is too long": (edit("manifest.json", lambda raw: raw.extend(b" " * 2**24)), "manifest.json is longer than"),
    "a manifest of brackets": (holds("manifest.json", b'{"a":' * 10**5), "manifest.json is not valid JSON"),
    "an edited name": (renamed, "manifest.json says its digest is"),
    "another format version": (manifest(lambda values: values.update(format_version=2)), "manifest.json has format version 2"),
    "no architecture": (manifest(lambda values: values.pop("architecture")), "manifest.json has no architecture"),
    "a layer without tensors": (manifest(lambda values: values["architecture"].update(layers=2)), "manifest.json lacks tensor"),
    "a thousand layers": (manifest(lambda values: values["architecture"].update(layers=1000)), "manifest.json lists fewer tensors than"),
    "an absurd width": (manifest(lambda values: values["architecture"].update(width=10**9)), "describes a model that cannot be built"),
    "an unknown key": (manifest(lambda values: values.update(surprise=1)), "contains unknown field `surprise`"),
    "a file outside": (manifest(lambda values: values["files"].update({"../x": values["files"][PARAMS]})), NO_MANIFEST),
    "a tensor outside": (manifest(lambda values: values["tensors"]["heads.norm"].update(file="../x")), "which is not among the files"),
    "a file that is too short": (manifest(lambda values: values["files"][PARAMS].update(bytes=-1)), NO_MANIFEST),
    "an action more": (manifest(lambda values: values["action_names"].append("extra")), "needs 19 different action names"),
    "a weight of nothing": (manifest(lambda values: values["score_weights"].update(nothing=1.0)), "'nothing' belongs to no action"),
    "a weight that is too large": (manifest(lambda values: values["score_weights"].update(favorite=1e10)), "weight of favorite must be"),
    "a name of two lines": (manifest(lambda values: values.update(name="a\nb")), "must be 1 to 100 letters"),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_refused_with_file_and_reason(small: Path, damage: str) -> None:
    make, sentence = DAMAGES[damage]
    make(small)
    with pytest.raises(CheckpointError, match=sentence) as refused:
        load_checkpoint(small)
    said = str(refused.value)
    assert str(small) in said
    assert said.endswith(".")
    assert said.isprintable()
    verified = call("verify", small)
    assert (verified.exit_code, verified.output.strip().endswith(said)) == (1, True)


@pytest.mark.parametrize("cut", [True, False])
def test_a_file_that_changes_while_it_is_read_is_refused(small: Path, cut: bool) -> None:
    left = [lambda: os.truncate(small / USER, 100) if cut else flip(USER, -2)(small)]

    def meanwhile(_done: int, _total: int) -> None:
        if left:
            left.pop()()

    with pytest.raises(CheckpointError, match=rf"{USER} "):
        load_checkpoint(small, meanwhile, threads=1)  # the files are read one after another, this one last


def test_a_write_after_the_last_byte_was_read_is_refused(small: Path) -> None:
    headers = sum(8 + int.from_bytes(file.read_bytes()[:8], "little") for file in small.glob("*.safetensors"))
    data = sum(entry.bytes for entry in load_manifest(small).files.values()) - headers

    def meanwhile(done: int, _total: int) -> None:
        if done == data:
            flip(USER, -2)(small)

    with pytest.raises(CheckpointError, match=f"{USER} changed while it was being read"):
        load_checkpoint(small, meanwhile, threads=1)


def test_an_intact_checkpoint_loads_also_through_a_link(small: Path) -> None:
    (small.parent / "current").symlink_to(small)  # the way to switch versions: the link is renamed over
    assert load_checkpoint(small.parent / "current").manifest == load_checkpoint(small).manifest


@pytest.mark.parametrize("place", ["nothing", "file", "."])
def test_what_is_no_checkpoint_directory_is_refused(tmp_path: Path, place: str) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(CheckpointError) as refused:
        load_checkpoint(tmp_path / place)
    assert str(tmp_path / place) in str(refused.value)
