"""The C++ kernel on an emulated aarch64, and by another compiler: the definition's values, and bits that do not depend on the batch.

Debian's cross compiler and qemu's user emulation run it; what is missing is named where a test is skipped.
"""

from __future__ import annotations

import ctypes
import platform
import shutil
import struct
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from model.dense import DenseEngine
from model.engine import Item
from model.inputs import Scores
from model.native.build import FLAGS
from model.native.engine import ContextRows, NativeEngine
from model.native.kernel import Kernel
from model.native.packing import (
    CANDIDATE_JOB,
    GRAIN,
    PANEL,
    CandidateJob,
    ContextJob,
    Int64,
    Pointer,
    pack,
    round_up,
    structure,
)
from model.ranker import Ranker
from model.selftest import same_bits
from model.tolerances import PARITY
from tests.model.builders import random_config, random_ranker, random_request

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]  # a compiler on a busy machine, then an emulated run
SOURCES = Path(__file__).resolve().parents[2] / "model/native"
DRIVER = Path(__file__).with_name("emulated.cpp")
QEMU = ("qemu-aarch64", "-L", "/usr/aarch64-linux-gnu", "-cpu", "max")
NEON_STRIP = 16
BUILDS = {
    "g++": ("aarch64-linux-gnu-g++", "-march=armv8-a"),
    "g++, bf16 pairs": ("aarch64-linux-gnu-g++", "-march=armv8.2-a+bf16"),
    "clang++": ("clang++", "--target=aarch64-linux-gnu", "-march=armv8-a"),
}
Forward = structure(
    "Forward",
    (Pointer, "contexts jobs post_ids author_ids surfaces ages codes logits probabilities continuous"),
    (Int64, "n_contexts n_jobs rows"),
)
Run = structure("Run", (Pointer, "model forwards"), (Int64, "n_forwards use_bf16"))


COLUMNS = ("post_ids", "author_ids", "surfaces", "age_buckets", "codes")


class Image:
    """Memory for another process: arrays and structs by their address here, and where their pointers lie."""

    def __init__(self) -> None:
        self._bytes = bytearray()
        self._offsets: dict[int, int] = {}
        self._pointers: list[int] = []

    def add(self, array: np.ndarray | Tensor) -> int:
        """Put an array in; returns its address here."""
        if isinstance(array, Tensor):
            array = array.detach().reshape(-1).view(torch.uint8).numpy()
        address: int = array.ctypes.data
        self._place(address, array.tobytes())
        return address

    def add_structs(self, structs: Sequence[ctypes.Structure]) -> int:
        """Put structs in, after all that they point to; returns the address of the first, here."""
        kept = (type(structs[0]) * len(structs))(*structs)
        address = ctypes.addressof(kept)
        start = self._place(address, bytes(kept))
        for i, each in enumerate(kept):
            for offset in _pointers_of(type(each)):
                place = start + i * ctypes.sizeof(each) + offset
                (value,) = struct.unpack_from("Q", self._bytes, place)
                if value:
                    struct.pack_into("Q", self._bytes, place, self._offsets[value])
                    self._pointers.append(place)
        self._kept = [*getattr(self, "_kept", []), kept]  # an address must not be used twice
        return address

    def _place(self, address: int, content: bytes) -> int:
        self._bytes += bytes(-len(self._bytes) % 64)
        self._offsets[address] = len(self._bytes)
        self._bytes += content
        return self._offsets[address]

    def write(self, path: Path, run: int) -> None:
        """The file that emulated.cpp reads. `run`: the address of its Run."""
        words = (self._offsets[run], len(self._pointers), *self._pointers)
        path.write_bytes(struct.pack(f"{len(words)}Q", *words) + self._bytes)


def _pointers_of(kind: type[ctypes.Structure]) -> Iterator[int]:
    for name, inner, *_ in kind._fields_:
        offset = getattr(kind, name).offset
        if inner is Pointer:
            yield offset
        elif issubclass(inner, ctypes.Structure):
            yield from (offset + within for within in _pointers_of(inner))


def image_of(ranker: Ranker, dtype: torch.dtype, forwards: Sequence[Sequence[Item]]) -> tuple[Image, int]:
    """A model and forwards over it, each with contexts of its own, in memory laid out for the driver."""
    config, image, packed = ranker.config, Image(), pack(ranker, dtype, NEON_STRIP)
    for tensor in packed.tensors:
        image.add(tensor)
    assert packed.layers is not None
    packed.model.layer = image.add_structs(list(packed.layers))
    key_bytes = PANEL * (config.head_width + round_up(config.head_width, GRAIN)) * dtype.itemsize
    kept, made = [], []
    for items in forwards:
        contexts, jobs, rows = [], [], 0
        for item in items:
            job = ContextRows(item.context, config)
            blocks = -(-job.rows // PANEL)
            keys = np.zeros(config.layers * config.kv_heads * blocks * key_bytes, np.uint8)
            for array in (keys, *job.arrays):
                image.add(array)
            contexts.append(ContextJob.from_buffer_copy(job.packed(blocks, keys.ctypes.data)))
            count = len(item.candidates)
            fields = (count, rows, 0, job.rows, blocks, len(jobs), keys.ctypes.data)
            jobs.append(CandidateJob.from_buffer_copy(CANDIDATE_JOB(*fields)))
            kept.append((job, keys))
            rows += count
        lists = [item.candidates for item in items]
        arrays = [
            *(np.concatenate([getattr(one, name) for one in lists]) for name in COLUMNS),
            *(np.zeros((rows, width), np.float32) for width in (config.actions, config.actions, config.continuous_actions)),
        ]  # fmt: skip
        kept.append((arrays, keys))
        addresses = [image.add(array) for array in arrays]
        structs = (image.add_structs(contexts), image.add_structs(jobs))
        made.append(Forward(*structs, *addresses, len(contexts), len(jobs), rows))
    run = Run(image.add_structs([packed.model]), image.add_structs(made), len(made), dtype is torch.bfloat16)
    return image, image.add_structs([run])


def scores_of(content: bytes, ranker: Ranker, forwards: Sequence[Sequence[Item]]) -> Iterator[list[Scores]]:
    """What the driver wrote, forward by forward, item by item."""
    values, start, config = np.frombuffer(content, np.float32), 0, ranker.config
    for items in forwards:
        rows, parts = sum(len(item.candidates) for item in items), []
        for width in (config.actions, config.actions, config.continuous_actions):
            parts.append(values[start : start + rows * width].reshape(rows, width))
            start += rows * width
        stops = np.cumsum([len(item.candidates) for item in items])
        yield [
            Scores(*(part[stop - len(item.candidates) : stop] for part in parts))
            for item, stop in zip(items, stops, strict=True)
        ]
    assert start == len(values)


@pytest.fixture(scope="module", params=BUILDS.values(), ids=BUILDS)
def driver(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler, *target = request.param
    for command in (compiler, "aarch64-linux-gnu-g++", QEMU[0]):  # clang links with what comes with the cross g++
        if shutil.which(command) is None:
            pytest.skip(f"there is no {command} here: make test installs it on Debian")
    built: Path = tmp_path_factory.mktemp("aarch64") / "driver"
    flags = [flag for flag in FLAGS if flag not in ("-shared", "-fPIC", "-O3")]
    command = [compiler, *target, *flags, "-Og", f"-I{SOURCES}", str(DRIVER), "-o", str(built)]
    subprocess.run(command, check=True, timeout=280)
    return built


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_on_aarch64(driver: Path, dtype: torch.dtype, tmp_path: Path) -> None:
    ranker = random_ranker(random_config(history_length=70, query_heads=6, kv_heads=2))
    items = [Item(*random_request(ranker.config, history, 9, seed=history)) for history in (70, 12)]
    places = [(0, 0), (0, 8), *((1, i) for i in range(9))]  # a long history is computed again for each
    alone = [[Item(items[which].context, items[which].candidates.chunk(i, i + 1))] for which, i in places]
    forwards = [items, items[::-1], [*items, items[0]], *alone]
    image, run = image_of(ranker, dtype, forwards)
    image.write(tmp_path / "image", run)
    command = [*QEMU, str(driver), str(tmp_path / "image"), str(tmp_path / "scores")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert (done.returncode, done.stdout) == (0, "neon\n"), done.stderr
    (first, second), turned, again, *each = scores_of((tmp_path / "scores").read_bytes(), ranker, forwards)
    together = [(first, second)[which].rows(slice(i, i + 1)) for which, i in places]
    assert all(same_bits(one, scores[0]) for one, scores in zip(together, each, strict=True))
    assert same_bits(turned[0], second)
    assert all(same_bits(ours, theirs) for ours, theirs in zip(again, (first, second, first), strict=True))
    for ours, wanted in zip((first, second), DenseEngine(ranker, torch.float32).forward(items), strict=True):
        np.testing.assert_allclose(ours.logits, wanted.scores.logits, atol=PARITY[dtype].logits, rtol=0)
        np.testing.assert_allclose(ours.continuous, wanted.scores.continuous, atol=PARITY[dtype].logits, rtol=0)
    if dtype is torch.float32:  # the bits of this processor too
        here = NativeEngine(ranker, dtype)
        assert all(same_bits(ours, one.scores) for ours, one in zip((first, second), here.forward(items), strict=True))


@pytest.mark.skipif(platform.machine() != "x86_64", reason="clang is tried on x86-64 here, and on aarch64 by emulation")
def test_clang_builds_the_same(tmp_path: Path) -> None:
    if shutil.which("clang++") is None:
        pytest.skip("there is no clang++ here: make test installs it on Debian")
    library = tmp_path / "kernel.so"
    command = ["clang++", *FLAGS, "-O1", "-march=x86-64-v3", str(SOURCES / "kernel.cpp"), "-o", str(library)]
    subprocess.run(command, check=True, timeout=280)
    ranker = random_ranker(random_config())
    items = [Item(*random_request(ranker.config, 37, 33))]
    for dtype in (torch.float32, torch.bfloat16):
        engines = (NativeEngine(ranker, dtype, kernel=Kernel(library)), NativeEngine(ranker, dtype, vectors="avx2"))
        ours, theirs = (engine.forward(items)[0].scores for engine in engines)
        assert same_bits(ours, theirs)
