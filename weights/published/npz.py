"""Reads arrays out of npz files from strangers: plain float32 arrays or a refusal, before anything is allocated.

numpy's own loader trusts the header of a member; here a member's header, its length in the archive and the shape that the
caller expects must agree first, and nothing is ever unpickled.
"""

from __future__ import annotations

import math
import os
import stat
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO

import numpy as np
import torch
from numpy.lib import format as npy
from torch import Tensor

from weights.errors import CheckpointError

CHUNK_BYTES = 2**20
_MAX_DIRECTORY_BYTES = 4 * 2**20  # about 40 000 members
_MAX_HEADER_BYTES = 10_000
_MAX_RATIO = 250  # weights barely compress; 1000 is what a bomb of zeros reaches
_RATIO_FREE_BYTES = 2**20  # a small member may be all zeros
_METHODS = {zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED}


@dataclass(frozen=True, slots=True)
class Member:
    """One array of the archive: its shape, and the length in bytes of the npy header before its data."""

    info: zipfile.ZipInfo
    shape: tuple[int, ...]
    header_bytes: int


class NpzFile:
    """The float32 arrays of an npz file by name. Use as a context manager; opening checks the directory of the archive.

    Raises CheckpointError, naming file and member, for anything else than an archive of plain little-endian C-ordered
    float32 arrays: a broken or encrypted archive, doubled names, members that lie about their length or expand absurdly.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = _open_regular(path)
        try:
            _check_directory_bytes(self._file)
            self._archive = zipfile.ZipFile(self._file)
            self._members = self._directory()
        except BaseException as error:
            self._file.close()
            if isinstance(error, (*_ARCHIVE_ERRORS, NotImplementedError)):
                raise CheckpointError(f"{path} is no readable npz archive: {_reason(error)}.") from error
            raise

    def __enter__(self) -> NpzFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._archive.close()
        self._file.close()

    @property
    def names(self) -> tuple[str, ...]:
        """Array names in the order of the archive."""
        return tuple(self._members)

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of one array, from its npy header. Raises CheckpointError where the header cannot be believed."""
        return self._open(name)[0].shape

    def read(self, name: str, shape: tuple[int, ...]) -> Iterator[Tensor]:
        """The elements of array `name` in C order, float32, flat, in parts of at most 1 MiB.

        Raises CheckpointError before reading when the array has another shape, and on a short or corrupt member.
        """
        member, stream = self._open(name)
        with stream:
            if member.shape != shape:
                raise self._error(name, f"has shape {list(member.shape)}, the configuration asks {list(shape)}")
            left = math.prod(shape) * 4
            try:
                while left:
                    wanted = min(left, CHUNK_BYTES)
                    part = stream.read(wanted)
                    if len(part) != wanted:
                        raise self._error(name, "ends before its data does")
                    left -= len(part)
                    yield torch.frombuffer(bytearray(part), dtype=torch.float32)
                if stream.read(1):
                    raise self._error(name, "goes on after its data")
            except _ARCHIVE_ERRORS as error:
                raise self._error(name, f"cannot be read: {_reason(error)}") from error

    def _directory(self) -> dict[str, zipfile.ZipInfo]:
        infos = self._archive.infolist()
        size = os.fstat(self._file.fileno()).st_size
        if sum(info.compress_size for info in infos) > size:
            raise CheckpointError(f"{self.path} is a bomb or broken: its members claim more bytes than the file has.")
        members: dict[str, zipfile.ZipInfo] = {}
        for info in infos:
            name = info.filename.removesuffix(".npy")
            if name in members:
                raise self._error(name, "is there twice")
            if name == info.filename:
                raise self._error(name, "is no npy array")
            members[name] = info
        return members

    def _open(self, name: str) -> tuple[Member, IO[bytes]]:
        """The member and a stream that stands at its data, after every claim about its length was checked."""
        info = self._members.get(name)
        if info is None:
            raise CheckpointError(f"{self.path} lacks array {name}.")
        self._check_packing(name, info)
        try:
            stream = self._archive.open(info)
        except _ARCHIVE_ERRORS as error:
            raise self._error(name, f"cannot be read: {_reason(error)}") from error
        try:
            shape, header_bytes = self._read_header(name, stream)
            if header_bytes + math.prod(shape) * 4 != info.file_size:
                raise self._error(
                    name, f"promises {math.prod(shape) * 4} bytes of data but holds {info.file_size - header_bytes}"
                )
        except BaseException:
            stream.close()
            raise
        return Member(info, shape, header_bytes), stream

    def _check_packing(self, name: str, info: zipfile.ZipInfo) -> None:
        if info.flag_bits & 0x41:
            raise self._error(name, "is encrypted")
        if info.compress_type not in _METHODS:
            raise self._error(name, f"is packed by method {info.compress_type}; only stored and deflated are read")
        if info.compress_type == zipfile.ZIP_STORED and info.file_size != info.compress_size:
            raise self._error(name, "is stored with two different lengths")
        if info.file_size > max(_RATIO_FREE_BYTES, _MAX_RATIO * info.compress_size):
            raise self._error(name, f"would expand {info.compress_size} bytes to {info.file_size}, as no weights do")

    def _read_header(self, name: str, stream: IO[bytes]) -> tuple[tuple[int, ...], int]:
        try:
            version = npy.read_magic(stream)
            readers = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}
            if version not in readers:
                raise ValueError(f"npy version {version} is not read")
            shape, fortran, dtype = readers[version](stream, max_header_size=_MAX_HEADER_BYTES)
            header_bytes = stream.tell()
        except (*_ARCHIVE_ERRORS, SyntaxError, TypeError, RecursionError, MemoryError) as error:
            raise self._error(name, f"has no readable npy header: {_reason(error)}") from error
        if dtype.hasobject:
            raise self._error(name, "holds Python objects, which would have to be unpickled; that is never done")
        if dtype != np.dtype("<f4"):
            raise self._error(name, f"is {dtype.str}; only little-endian float32 is read")
        if fortran:
            raise self._error(name, "is in Fortran order; write it again from numpy.ascontiguousarray(array)")
        if any(type(size) is not int or size < 1 for size in shape):
            raise self._error(name, f"has shape {list(shape)}, with a length below 1")
        return shape, header_bytes

    def _error(self, name: str, reason: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: array {name[:200]} {reason}.")


_ARCHIVE_ERRORS = (zipfile.BadZipFile, zipfile.LargeZipFile, zlib.error, OSError, EOFError, ValueError, RuntimeError)


def _open_regular(path: Path) -> IO[bytes]:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a pipe must not hang
    except OSError as error:
        raise CheckpointError(f"{path} cannot be opened: {error.strerror}.") from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise CheckpointError(f"{path} is not a regular file.")
    return os.fdopen(descriptor, "rb")


def _check_directory_bytes(file: IO[bytes]) -> None:
    """zipfile reads the whole directory of an archive at once, so its claimed length is looked at first."""
    size = file.seek(0, os.SEEK_END)
    start = max(0, size - 22)
    file.seek(start)
    end = file.read(22)
    if not (end[:4] == b"PK\x05\x06" and end[-2:] == b"\0\0"):  # a comment follows the end record
        tail_start = max(0, size - 22 - 0xFFFF)
        file.seek(tail_start)
        tail = file.read()
        found = tail.rfind(b"PK\x05\x06")
        start, end = tail_start + found, tail[found : found + 22]
        if found < 0:
            raise zipfile.BadZipFile("there is no end record; the file is cut or is something else")
    length = int.from_bytes(end[12:16], "little")
    if start >= 76:  # the 64-bit end record and its locator lie right before it
        file.seek(start - 76)
        wide = file.read(76)
        if wide[56:60] == b"PK\x06\x07" and wide[:4] == b"PK\x06\x06":
            length = int.from_bytes(wide[40:48], "little")
    if length > _MAX_DIRECTORY_BYTES:
        raise zipfile.BadZipFile(f"its directory would be {length} bytes long")
    file.seek(0)


def _reason(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]
