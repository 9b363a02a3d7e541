"""Floats as text, on every kind of processor that the codec is built for: what orjson writes."""

from __future__ import annotations

import platform
import shutil
import subprocess
from pathlib import Path

import numpy as np
import orjson
import pytest

from app.request import codec

NATIVE = Path(codec.__file__).parent / "native"
PROGRAM = """
#include "decimal.h"
#include <cstdio>

int main() {
    float values[codec::LANES];
    while (std::fread(values, 4, codec::LANES, stdin) == codec::LANES) {
        const codec::Decimals found = codec::shortest(values);
        for (size_t lane = 0; lane < codec::LANES; ++lane) {
            char text[64];
            std::fwrite(text, 1, codec::write(text, values[lane], found, lane) - text, stdout);
            std::putchar(',');
        }
    }
}
"""


@pytest.mark.parametrize(
    ("compiler", "processor", "emulator"),
    [
        ("g++", "native", None),
        ("clang++", "native", None),
        ("g++", "x86-64-v3", None),
        ("g++", "x86-64", None),
        ("aarch64-linux-gnu-g++", "armv8-a", "qemu-aarch64"),
    ],
)
def test_floats_are_written_as_orjson_does(compiler: str, processor: str, emulator: str | None, tmp_path: Path) -> None:
    for program in (compiler, emulator):
        if program is not None and shutil.which(program) is None:
            pytest.skip(f"there is no {program} here")
    if processor.startswith("x86") and platform.machine() != "x86_64":
        pytest.skip("this is another kind of processor")
    (tmp_path / "main.cpp").write_text(PROGRAM)
    flags = ("-std=c++17", "-O3", "-ffp-contract=off", "-static", f"-march={processor}", f"-I{NATIVE}")
    built = subprocess.run(
        [compiler, *flags, str(tmp_path / "main.cpp"), "-o", str(tmp_path / "main")], capture_output=True, text=True
    )
    assert built.returncode == 0, built.stderr
    random = np.random.default_rng(0)
    drawn = random.integers(0, 0x7F800000, 40_000, dtype=np.uint32).view(np.float32)
    exponents = (np.arange(255, dtype=np.uint32)[:, None] << 23) + np.array([0, 1, 2, 2**22, 2**23 - 1], np.uint32)
    numbers = np.concatenate(
        [drawn, -drawn[:999], exponents.ravel().view(np.float32), random.random(39_000, np.float32)]
    )
    numbers = numbers[: len(numbers) // 8 * 8]
    command = [*([emulator] if emulator else []), str(tmp_path / "main")]
    written = subprocess.run(command, input=numbers.tobytes(), capture_output=True, check=True).stdout
    assert b"[%b]" % written[:-1] == orjson.dumps(numbers, option=orjson.OPT_SERIALIZE_NUMPY)
