"""When a file's times can be trusted. What else the reader refuses is in `test_checkpoint.py`, with whole checkpoints."""

from __future__ import annotations

import os
import time
from io import FileIO
from pathlib import Path

import pytest

from weights.errors import CheckpointError
from weights.format import reader


def test_the_status_of_a_young_file_is_returned_when_a_write_would_change_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "x").write_bytes(b"1")
    with FileIO(tmp_path / "x") as file:
        status = reader._settled(file)
        assert time.time() - status.st_ctime >= reader._CLOCK_STEP_SECONDS
        monkeypatch.setattr(time, "sleep", lambda _: pytest.fail("an old file needs no wait"))
        assert reader._settled(file) == status


def test_a_write_during_the_wait_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "x").write_bytes(b"1")
    monkeypatch.setattr(time, "sleep", lambda _: (tmp_path / "x").write_bytes(b"12"))
    with FileIO(tmp_path / "x") as file, pytest.raises(CheckpointError, match="changed while it was being read"):
        reader._settled(file)


def test_what_is_no_regular_file_is_refused_and_closed(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "manifest.json")
    with reader.open_directory(tmp_path) as directory:
        before = os.listdir("/proc/self/fd")
        with pytest.raises(CheckpointError, match="is not a regular file"):
            reader.read_manifest(directory, bytes)
        assert os.listdir("/proc/self/fd") == before


def test_a_manifest_may_be_so_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "MAX_MANIFEST_BYTES", 100)
    with reader.open_directory(tmp_path) as directory:
        (tmp_path / "manifest.json").write_bytes(bytes(100))
        assert reader.read_manifest(directory, len) == 100
        (tmp_path / "manifest.json").write_bytes(bytes(101))
        with pytest.raises(CheckpointError, match="is longer than 100 bytes"):
            reader.read_manifest(directory, len)
