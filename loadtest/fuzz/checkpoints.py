"""Makes corrupted checkpoints, each a valid one with one change. The loader must refuse every one."""

from __future__ import annotations

import json
import os
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

from loadtest.matrix import Row
from weights.checkpoint import load_checkpoint
from weights.errors import CheckpointError
from weights.format.manifest import signed
from weights.format.writer import write_checkpoint
from weights.published.importer import labels_for
from weights.synthetic.random_weights import mini_config, random_chunks

BATCH = 50
SHAPING = (
    "width", "layers", "query_heads", "kv_heads", "head_width", "actions", "continuous_actions", "product_surfaces",
)  # fmt: skip
"""Fields whose other values do not fit the tensors. A signed change of another field, say `rope_base`, is a valid model."""


@dataclass(frozen=True)
class Mutant:
    """A corrupted checkpoint in `path`. `kind` names the corruption; `meanwhile` runs during the load."""

    path: Path
    kind: str
    meanwhile: Callable[[], None] | None = None

    def load(self) -> None:
        """Load it as the server would."""
        done = False

        def progress(_done: int, _total: int) -> None:
            nonlocal done
            if self.meanwhile and not done:
                done = True
                self.meanwhile()

        load_checkpoint(self.path, progress)


def write_small(path: Path, seed: int) -> None:
    """Write a small valid checkpoint. Two tables have the same shape, so that a shape check does not catch swapping them."""
    config = replace(mini_config(seed, (40, 40, 41), continuous_actions=2), width=16, layers=1, head_width=4)
    write_checkpoint(path, config, random_chunks(config, seed), labels_for(config, "small"))


def mutants(count: int, seed: int, work: Path) -> Iterator[Mutant]:
    """`count` random mutants, all kinds in turn. Each exists below `work` until the next one is requested."""
    rng = random.Random(seed)
    base, other = work / "base", work / "other"
    write_small(base, seed)
    write_small(other, seed + 1)
    made = 0
    kinds = [(name.removeprefix("make_"), make) for name, make in globals().items() if name.startswith("make_")]
    while made < count:
        kind, make = kinds[made % len(kinds)]
        path = work / f"mutant-{made}"
        shutil.copytree(base, path)
        meanwhile = make(path, rng, other)
        if meanwhile or content(path) != content(base):  # skip a random change without effect
            made += 1
            yield Mutant(path, kind, meanwhile)
        shutil.rmtree(path, ignore_errors=True)


def accepted(count: int, seed: int, work: Path) -> list[str]:
    """Describe the mutants that loaded, or failed without an error that names a file of the checkpoint."""
    wrong = []
    for mutant in mutants(count, seed, work):
        try:
            mutant.load()
        except CheckpointError as error:
            if not ("manifest.json" in str(error) or ".safetensors" in str(error)):
                wrong.append(f"{mutant.kind}: refused without naming a file: {error}")
        except Exception as error:  # any other exception would reach an operator as a traceback
            wrong.append(f"{mutant.kind}: {type(error).__name__}: {error}")
        else:
            wrong.append(f"{mutant.kind}: accepted")
    return wrong


def content(path: Path) -> dict[str, Any]:
    """The bytes of every file; for a link, its target."""
    return {entry.name: os.readlink(entry) if entry.is_symlink() else entry.read_bytes() for entry in path.iterdir()}


def sign_again(path: Path, change: Callable[[dict[str, Any]], None] = lambda manifest: None) -> None:
    """Recompute lengths, digests and the manifest's own digest, as a skilled forger would."""
    manifest = json.loads((path / "manifest.json").read_text())
    del manifest["digest"]
    for name in manifest["files"]:
        raw = (path / name).read_bytes()
        manifest["files"][name] = {"sha256": sha256(raw).hexdigest(), "bytes": len(raw)}
    change(manifest)
    (path / "manifest.json").write_bytes(signed(manifest))


def edit_header(file: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Rewrite the header of a safetensors file, keeping its data."""
    raw = file.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + length :])


def _any_file(path: Path, rng: random.Random) -> Path:
    return rng.choice(sorted(path.iterdir()))


def _tensor_file(path: Path, rng: random.Random) -> Path:
    return rng.choice(sorted(path.glob("*.safetensors")))


def make_truncated(path: Path, rng: random.Random, _other: Path) -> None:
    file = _any_file(path, rng)
    os.truncate(file, rng.randrange(file.stat().st_size))


def make_grown(path: Path, rng: random.Random, _other: Path) -> None:
    file = _any_file(path, rng)
    file.write_bytes(file.read_bytes() + rng.randbytes(rng.randrange(1, 100)))


def make_flipped_bit(path: Path, rng: random.Random, _other: Path) -> None:
    file = _any_file(path, rng)
    raw = bytearray(file.read_bytes())
    raw[rng.randrange(len(raw))] ^= 1 << rng.randrange(8)
    file.write_bytes(raw)


def make_zeroed_range(path: Path, rng: random.Random, _other: Path) -> None:
    file = _tensor_file(path, rng)
    raw = bytearray(file.read_bytes())
    start = rng.randrange(len(raw))
    raw[start : start + 64] = bytes(len(raw[start : start + 64]))
    file.write_bytes(raw)


def make_missing_file(path: Path, rng: random.Random, _other: Path) -> None:
    _any_file(path, rng).unlink()


def make_renamed_file(path: Path, rng: random.Random, _other: Path) -> None:
    file = _any_file(path, rng)
    file.rename(path / f"x{file.name}")


def make_swapped_files(path: Path, rng: random.Random, _other: Path) -> None:
    first, second = rng.sample(sorted(path.glob("*.safetensors")), 2)
    content_of_first = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(content_of_first)


def make_file_of_another_checkpoint(path: Path, rng: random.Random, other: Path) -> None:
    file = _any_file(path, rng)
    shutil.copyfile(other / file.name, file)


def make_link(path: Path, rng: random.Random, other: Path) -> None:
    file = _any_file(path, rng)
    target = path.parent / f"outside-{file.name}"
    shutil.copyfile(file, target)  # the right content, but outside the directory
    file.unlink()
    file.symlink_to(target)


def make_signed_nan(path: Path, rng: random.Random, _other: Path) -> None:
    file = _tensor_file(path, rng)
    raw = bytearray(file.read_bytes())
    start = 8 + int.from_bytes(raw[:8], "little")
    place = start + 4 * rng.randrange((len(raw) - start) // 4)
    raw[place : place + 4] = np.float32(rng.choice([np.nan, np.inf, -np.inf])).tobytes()
    file.write_bytes(raw)
    sign_again(path)


def make_signed_renamed_tensor(path: Path, rng: random.Random, _other: Path) -> None:
    file = _tensor_file(path, rng)
    names = list(json.loads(file.read_bytes()[8 : 8 + int.from_bytes(file.read_bytes()[:8], "little")]))
    old = rng.choice(names)
    new = rng.choice(
        [name for name in (f"{old}x", "tables.user", "heads.norm", "../../etc/passwd", "\x1b[31m") if name != old]
    )
    edit_header(file, lambda header: header.update({new: header.pop(old)}))
    both = rng.random() < 0.5  # change the manifest too, or only the file

    def rename(manifest: dict[str, Any]) -> None:
        manifest["tensors"][new] = manifest["tensors"].pop(old)

    sign_again(path, rename if both else lambda manifest: None)


def make_signed_wrong_shape(path: Path, rng: random.Random, _other: Path) -> None:
    manifest = json.loads((path / "manifest.json").read_text())
    name, entry = rng.choice([item for item in manifest["tensors"].items() if len(set(item[1]["shape"])) == 2])
    shape = entry["shape"][::-1]
    edit_header(path / entry["file"], lambda header: header[name].update(shape=shape))
    sign_again(path, lambda manifest: manifest["tensors"][name].update(shape=shape))


def make_signed_wrong_dtype(path: Path, rng: random.Random, _other: Path) -> None:
    manifest = json.loads((path / "manifest.json").read_text())
    name, entry = rng.choice([item for item in manifest["tensors"].items() if "tables" not in item[0]])
    shape = [*entry["shape"][:-1], entry["shape"][-1] * 2]  # as many bytes in bfloat16
    edit_header(path / entry["file"], lambda header: header[name].update(dtype="BF16", shape=shape))
    if rng.random() < 0.5:
        sign_again(path, lambda manifest: manifest["tensors"][name].update(dtype="bfloat16", shape=shape))
    else:
        edit_header(path / entry["file"], lambda header: header[name].update(dtype=rng.choice(["I32", "F64", "O"])))
        sign_again(path)


def make_signed_overlap(path: Path, rng: random.Random, _other: Path) -> None:
    names = ["heads.actions", "heads.continuous", "tokens.user_projection"]
    delta = rng.choice([-4, 4, 2**40, -(2**40)])

    def move(header: dict[str, Any]) -> None:
        offsets = header[rng.choice(names)]["data_offsets"]
        offsets[0], offsets[1] = offsets[0] + delta, offsets[1] + delta

    edit_header(path / "params.safetensors", move)
    sign_again(path)


def make_signed_bad_manifest(path: Path, rng: random.Random, _other: Path) -> None:
    changes: list[Callable[[dict[str, Any]], Any]] = [
        lambda m: m.pop(rng.choice(sorted(m))),
        lambda m: m.update(surprise=1),
        lambda m: m.update(format_version=rng.choice([0, 2, "1", True, None])),
        lambda m: m.update({rng.choice(sorted(set(m) - {"score_weights"})): rng.choice([None, [], {}, "", 0, -1, 1e308])}),
        lambda m: m.update(score_weights=rng.choice([None, [], "", 1, {"favorite": None}, {"favorite": 2**2000}])),
        lambda m: m["architecture"].update({rng.choice(SHAPING): rng.choice([0, -1, 7, 10**9, "x"])}),
        lambda m: m["files"].update({rng.choice(["../x.safetensors", "/etc/passwd", "a/b.safetensors"]): {"sha256": "0" * 64, "bytes": 1}}),
        lambda m: m["tensors"]["heads.norm"].update(file="../params.safetensors"),
        lambda m: m["action_names"].append("extra"),
        lambda m: m["score_weights"].update(nothing=1.0),
        lambda m: m.update(name="a\nb"),
    ]  # fmt: skip
    sign_again(path, rng.choice(changes))


def make_changed_while_reading(path: Path, rng: random.Random, _other: Path) -> Callable[[], None]:
    file = _tensor_file(path, rng)

    def write() -> None:
        with file.open("r+b") as handle:
            handle.seek(-4, os.SEEK_END)
            handle.write(np.float32(rng.random()).tobytes())

    return write


def make_truncated_while_reading(path: Path, rng: random.Random, _other: Path) -> Callable[[], None]:
    """If the file were memory-mapped, this would be a fatal signal instead of an error."""
    file = _tensor_file(path, rng)
    length = rng.randrange(file.stat().st_size)
    return lambda: os.truncate(file, length)


def damaged(seconds: float) -> Row:
    """F2: load mutants for this many seconds. Prints the wrongly accepted to standard error."""
    until, tried, wrong = time.monotonic() + seconds, 0, []
    while time.monotonic() < until:
        with tempfile.TemporaryDirectory() as work:
            wrong += accepted(BATCH, seed=tried, work=Path(work))
        tried += BATCH
    for line in wrong:
        print(line, file=sys.stderr)
    return Row("F2", "damaged checkpoints refused with file and reason", tried, len(wrong), 0, 0, "")
