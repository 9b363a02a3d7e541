"""The kernel's file: what is kept, what is refused, what is built again. With a stand-in compiler."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from loadtest.machine import ROOT
from loadtest.server import wait_until
from model.create import EngineOptions, create_engine
from model.native.build import (
    LEVELS,
    PREBUILT,
    KernelUnavailable,
    Level,
    Vectors,
    build_kernel,
    find_prebuilt,
    seal,
    source_digest,
)
from tests.model.builders import random_config, random_ranker

COMPILER = """#!/bin/sh
[ "$1" = --version ] && { echo stand-in 1.0; exit; }
echo compiled >> "$0.log"
while [ "$1" != -o ]; do shift; done
echo a library > "$2"
"""

SLOW_COMPILER = """#!/bin/sh
[ "$1" = --version ] && { echo stand-in 1.0; exit; }
sleep 100 & echo $! > "$0.pid"
wait
"""


class Compiler:
    """Writes a few bytes where a library should be, and counts. `source`: one that nobody else has compiled."""

    def __init__(self, path: Path) -> None:
        path.write_text(COMPILER)
        path.chmod(0o700)
        self.path = path
        self._log = Path(f"{path}.log")
        self.source = path.parent / "source" / "kernel.cpp"
        self.source.parent.mkdir()
        self.source.write_text(f"// {path}\n")

    @property
    def runs(self) -> int:
        return len(self._log.read_text().splitlines()) if self._log.exists() else 0


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Compiler:
    tools = tmp_path / "tools"
    tools.mkdir()
    monkeypatch.setenv("PATH", str(tools), prepend=os.pathsep)
    return Compiler(tools / "g++")


def cut(library: Path) -> None:
    library.chmod(0o700)
    os.truncate(library, library.stat().st_size - 1)


def empty(library: Path) -> None:
    library.chmod(0o700)
    os.truncate(library, 0)


def replace_by_link(library: Path) -> None:
    library.rename(library.with_name("elsewhere"))
    library.symlink_to("elsewhere")


DAMAGES = {
    "cut": cut,
    "empty": empty,
    "a link": replace_by_link,
    "writable by others": lambda library: library.chmod(0o722),
    "of another user": lambda library: os.chown(library, 12345, -1),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_file_that_cannot_be_trusted_is_built_again_once(damage: str, compiler: Compiler, tmp_path: Path) -> None:
    directory = tmp_path / "kept"
    first = build_kernel(directory, source=compiler.source)
    assert directory.stat().st_mode & 0o777 == 0o700
    assert (first.note, compiler.runs) == ("", 1)
    assert build_kernel(directory, source=compiler.source) == first
    assert compiler.runs == 1
    try:
        DAMAGES[damage](first.path)
    except PermissionError:
        pytest.skip("only root can give a file away")
    again = build_kernel(directory, source=compiler.source)
    assert again.path == first.path
    assert not again.path.is_symlink()
    assert "built again" in again.note
    assert (build_kernel(directory, source=compiler.source).note, compiler.runs) == ("", 2)


def linked(directory: Path) -> None:
    directory.with_name("real").mkdir(mode=0o700)
    directory.symlink_to("real")


def writable_by_others(directory: Path) -> None:
    directory.mkdir()
    directory.chmod(0o777)


def of_another_user(directory: Path) -> None:
    directory.mkdir()
    os.chown(directory, 12345, -1)


DIRECTORIES = {
    "is a link": linked,
    "can be written by other users": writable_by_others,
    "belongs to another user": of_another_user,
    "cannot be made": lambda directory: directory.write_text("a file where the directory should be"),
}


@pytest.mark.parametrize("problem", DIRECTORIES)
def test_an_unusable_directory_is_replaced_for_the_process(problem: str, compiler: Compiler, tmp_path: Path) -> None:
    directory = tmp_path / "kept"
    try:
        DIRECTORIES[problem](directory)
    except PermissionError:
        pytest.skip("only root can give a directory away")
    built = build_kernel(directory, source=compiler.source)
    assert problem in built.note
    assert directory not in built.path.parents
    assert built.path.parent.stat().st_mode & 0o777 == 0o700
    assert build_kernel(directory, source=compiler.source) == built
    assert compiler.runs == 1


@pytest.mark.parametrize("levels", [1, 2])
def test_a_directory_that_others_may_replace_is_not_used(levels: int, compiler: Compiler, tmp_path: Path) -> None:
    directory = tmp_path / "home" / "cache" / "kept"
    directory.mkdir(parents=True, mode=0o700)
    (above := directory.parents[levels - 1]).chmod(0o777)
    built = build_kernel(directory, source=compiler.source)
    assert f"{above} can be written by other users" in built.note
    assert directory not in built.path.parents
    above.chmod(0o1777)  # sticky, as /tmp: others may write there and not replace what is ours
    assert build_kernel(directory, source=compiler.source).path.parent == directory


def test_a_read_only_directory_is_read_and_not_written(
    compiler: Compiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = build_kernel(tmp_path / "kept", source=compiler.source)
    (tmp_path / "empty").mkdir(mode=0o700)
    monkeypatch.setattr("os.access", lambda path, mode: mode != os.W_OK)  # root may write anywhere
    assert build_kernel(tmp_path / "kept", source=compiler.source) == kept
    assert "cannot be written" in build_kernel(tmp_path / "empty", source=compiler.source).note
    build_kernel(tmp_path / "empty", source=compiler.source)
    assert compiler.runs == 2


def test_a_process_without_a_home_has_a_kernel(compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", no_home)
    assert "home directory" in build_kernel(source=compiler.source).note


@pytest.mark.parametrize("call", ["tempfile.mkdtemp", "subprocess.run"])
def test_with_a_full_disk_auto_takes_the_torch_engine(
    call: str, compiler: Compiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: object, **options: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(call, full)
    ranker, directory = random_ranker(random_config()), tmp_path / "kept"
    engine = create_engine(ranker, EngineOptions(device="cpu", kernel_directory=directory))
    assert engine.info.backend == "torch"
    assert "No space left on device" in engine.info.notes["fallback"]
    with pytest.raises(KernelUnavailable, match="No space left"):
        build_kernel(directory)
    assert list(directory.glob("**/*")) == []


@contextmanager
def building(compiler: Compiler, directory: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process that builds with a compiler that does not end."""
    compiler.path.write_text(SLOW_COMPILER)
    code = f"""if True:
        from pathlib import Path
        from model.native.build import build_kernel
        build_kernel(Path({str(directory)!r}), source=Path({str(compiler.source)!r}))
    """
    pid_file = Path(f"{compiler.path}.pid")
    with subprocess.Popen([sys.executable, "-c", code], cwd=ROOT) as process:
        wait_until(lambda: pid_file.exists() and pid_file.read_text().endswith("\n"))
        compiler.path.write_text(COMPILER)
        try:
            yield process
        finally:
            process.kill()
            os.kill(int(pid_file.read_text()), signal.SIGKILL)


def test_the_next_build_removes_what_a_killed_one_left(compiler: Compiler, tmp_path: Path) -> None:
    with building(compiler, directory := tmp_path / "kept") as process:
        (directory / "tmp-of-another").mkdir()
        (source := tmp_path / "other.cpp").write_text("int other;")
        build_kernel(directory, source=source)
        assert len(list(directory.iterdir())) == 3, "the build that is under way is left alone"
        process.kill()
        process.wait(10)
    built = build_kernel(directory, source=compiler.source)
    assert {path.suffix or path.name for path in directory.iterdir()} == {".so", "tmp-of-another"}
    assert built.path.exists()


def test_nothing_is_compiled_where_no_kernel_can_be_loaded(
    compiler: Compiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "noexec", "none", str(disk)], capture_output=True).returncode:
        pytest.skip("nothing can be mounted here")
    try:
        built = build_kernel(disk / "kept", source=compiler.source)
        assert f"{disk / 'kept'} is mounted noexec" in built.note
        assert disk not in built.path.parents
        runs = compiler.runs
        ended = subprocess.run(
            [sys.executable, "-c", "from model.native.build import build_kernel; build_kernel()"],
            cwd=ROOT, env=os.environ | {"HOME": str(disk), "TMPDIR": str(disk)}, capture_output=True, text=True, timeout=60,
        )  # fmt: skip
        assert "KernelUnavailable: no kernel can be loaded" in ended.stderr
        assert compiler.runs == runs
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


def test_a_compiler_that_refuses_is_quoted(tmp_path: Path) -> None:
    (source := tmp_path / "small.cpp").write_text("int kernel;")
    with pytest.raises(KernelUnavailable, match=r"(?s)g\+\+ .* failed:\n.*error: "):
        build_kernel(tmp_path / "kept", "1X", source=source)


# kernels that a wheel brings


@pytest.fixture
def brought(tmp_path: Path) -> Path:
    """A source with sealed kernels of every level beside it."""
    source = tmp_path / "installed" / "kernel.cpp"
    (source.parent / PREBUILT).mkdir(parents=True)
    source.write_text("int kernel;")
    for level in LEVELS:
        library = source.parent / PREBUILT / f"kernel-{level.name}-{source_digest(source)}.so"
        library.write_bytes(b"a library")
        seal(library)
    return source


def chosen(source: Path, level: Level, vectors: Vectors = "auto", without: str = "") -> str | None:
    """The level that is chosen for a processor that has just what `level` needs, but for one word."""
    found = find_prebuilt(source, vectors, machine=level.machine, words=level.words - {without})
    return found.name.split("-")[1] if found else None


@pytest.mark.parametrize("level", LEVELS, ids=lambda level: level.name)
def test_the_widest_kernel_that_the_processor_runs_is_taken(brought: Path, level: Level) -> None:
    least: dict[str, Vectors] = {"x86_64": "avx2", "aarch64": "neon"}
    assert chosen(brought, level) == level.name
    assert chosen(brought, level, least[level.machine]) == least[level.machine]
    assert chosen(brought, level, without=max(level.words)) != level.name


def test_a_processor_without_any_of_them_finds_none(brought: Path) -> None:
    assert find_prebuilt(brought, machine="x86_64", words=()) is None
    assert find_prebuilt(brought, machine="riscv64", words=LEVELS[0].words) is None


def test_where_one_fits_no_compiler_runs(brought: Path, compiler: Compiler) -> None:
    if (here := find_prebuilt(brought)) is None:
        pytest.skip("this processor is narrower than every level")
    assert build_kernel(source=brought).path == here
    assert compiler.runs == 0
    build_kernel(brought.parent, source=brought)  # a directory of its own is asked for
    assert compiler.runs == 1


def test_one_that_is_not_whole_gives_way_to_the_next(brought: Path) -> None:
    cut(brought.parent / PREBUILT / f"kernel-amx-{source_digest(brought)}.so")
    assert chosen(brought, LEVELS[0]) == "avx512bf16"


def test_those_of_other_sources_are_not_taken(brought: Path) -> None:
    (brought.parent / "more.h").write_text("int more;")
    assert chosen(brought, LEVELS[0]) is None
