"""Copies a checkpoint or corpus from any fsspec URL, checks it and points a link to it: how new weights reach a machine."""

from __future__ import annotations

import hashlib
import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import fsspec
from fsspec.implementations.local import LocalFileSystem

from weights.checkpoint import check_any
from weights.corpus.manifest import KIND, CorpusManifest
from weights.corpus.store import load_corpus
from weights.errors import CheckpointError, reason_of
from weights.format.manifest import (
    EXAMPLE_NAME,
    MANIFEST_NAME,
    MAX_MANIFEST_BYTES,
    NAMES_NAME,
    FileEntry,
    Manifest,
    kind_in,
)
from weights.format.writer import refused_writing, remove_unfinished, sync, write_file, written_beside
from weights.git_lfs import HEAD_BYTES, pointer_problem

ALONGSIDE = (EXAMPLE_NAME, NAMES_NAME)
PIECE_BYTES = 8 * 2**20
HTTP = ("http://", "https://")


async def http_session(**options: Any) -> Any:
    """A session of aiohttp that reads a file as long as something comes each minute. By itself aiohttp gives up after five minutes."""
    import aiohttp

    patient = aiohttp.ClientTimeout(total=None, sock_connect=30, sock_read=60)
    return aiohttp.ClientSession(**{"timeout": patient, **options})


IN_ORDER = {"block_size": 0, "get_client": http_session}  # one request for a file: no server needs to know byte ranges


def fetch(
    url: str, out: Path, link: str, digest: str = "", progress: Callable[[str, int, int], None] = lambda *_: None
) -> tuple[Path, Manifest | CorpusManifest]:
    """Copy the directory at `url` to `out/NAME@VERSION` in one step, then point the link `out/LINK` to it. A copy that is already there
    is not fetched again. Either passes every check of a load before the link moves. If `digest` is given, the manifest must have it. What
    killed fetches left in `out` is removed.

    Raises CheckpointError, which says what is wrong: nothing there, another digest, or what a load would refuse.
    """
    if not link or link in (".", "..") or "/" in link:
        raise CheckpointError(f"--link {link!r} must be a plain name: the link is made in {out}.")
    with read_from(url):
        source, root = fsspec.core.url_to_fs(url, **(IN_ORDER if url.startswith(HTTP) else {}))
    raw = small_file(source, root, url, MANIFEST_NAME)
    is_corpus = kind_in(raw) == KIND
    try:
        manifest = (CorpusManifest if is_corpus else Manifest).from_json(raw)
    except CheckpointError as error:
        raise CheckpointError(f"{url} is refused: its {MANIFEST_NAME} {error}.") from error
    if digest and manifest.digest != digest:
        raise CheckpointError(f"{url} is refused: its digest is {manifest.digest}, not {digest}.")
    if isinstance(manifest, CorpusManifest) and is_there(source, root, url, manifest.changes_name):
        raise CheckpointError(
            f"{url} was changed after it was built, and a copy would lack what is in {manifest.changes_name}: write a corpus that has "
            "its changes with `corpus snapshot`, and fetch that."
        )
    target = out / f"{manifest.name}@{manifest.version}"
    with refused_writing(str(target)):
        out.mkdir(parents=True, exist_ok=True)
        remove_unfinished(out, "*@*")
        if not target.exists():
            with suppress(FileExistsError), written_beside(target) as partial:  # another process may be the first
                done, total = 0, sum(entry.bytes for entry in manifest.files.values())
                for name, entry in manifest.files.items():
                    for size in copied(source, f"{root}/{name}", partial / name, entry):
                        progress("Fetching", done := done + size, total)
                for name in () if is_corpus else ALONGSIDE:
                    if is_there(source, root, url, name):
                        write_file(partial / name, small_file(source, root, url, name))
                write_file(partial / MANIFEST_NAME, raw)
                check_copy(partial, manifest, progress)
        elif _manifest_at(target, manifest).digest == manifest.digest:
            try:
                check_copy(target, manifest, progress)
            except CheckpointError as error:
                raise CheckpointError(f"the copy that is already there is damaged, remove it: {error}") from error
        there = _manifest_at(target, manifest)
        if (present := f"{there.name}@{there.version}") != target.name:
            raise CheckpointError(
                f"the directory of this name now holds {present}, because it was changed after it was fetched, such as by `relabel`: "
                f"rename it to {present} or remove it, and fetch again"
            )
        if there.digest != manifest.digest:
            raise CheckpointError("a different one with this name and version is already there")
        point(out / link, target.name)
    return target, manifest


def _manifest_at(target: Path, manifest: Manifest | CorpusManifest) -> Manifest | CorpusManifest:
    """The manifest that is there, which is of the same kind."""
    return type(manifest).from_json((target / MANIFEST_NAME).read_bytes())


def check_copy(copy: Path, manifest: Manifest | CorpusManifest, progress: Callable[[str, int, int], None]) -> None:
    """Raises CheckpointError, which names the file in the copy, unless a load would take it. One thread reads: a server may be busy."""
    check = load_corpus if isinstance(manifest, CorpusManifest) else check_any
    try:
        check(copy, progress=lambda done, total: progress("Checking", done, total), threads=1)
    except CheckpointError as error:
        cause = error.__cause__  # what is wrong, without the directory, which may have a name for this moment alone
        raise CheckpointError(reason_of(cause if isinstance(cause, Exception) else error)) from error


@contextmanager
def read_from(place: str) -> Iterator[None]:
    """Turn what a file system raises, which for many is an error of their own library, into a CheckpointError that names the place."""
    try:
        yield
    except Exception as error:
        reason = reason_over_http(error) if place.startswith(HTTP) else reason_of(error)
        raise CheckpointError(f"{place} cannot be read: {reason}.") from error


def reason_over_http(error: Exception) -> str:
    """What an error of fsspec's says. Its FileNotFoundError, and its own error of a timeout, hide the real one, which is their cause."""
    if isinstance(error, ImportError):
        return "it needs the extra `fetch`: pip install 'phoenix-ranking-server[fetch]'"
    if isinstance(error, (FileNotFoundError, TimeoutError)) and isinstance(error.__cause__, Exception):
        error = error.__cause__
    status = getattr(error, "status", None)
    return f"the server answers {status} {getattr(error, 'message', '')}".rstrip() if status else reason_of(error)


def is_there(source: Any, root: str, url: str, name: str) -> bool:
    """Whether the source has a file of this name. Raises CheckpointError where it does not say, such as for an answer of 503: fsspec's
    `exists` takes that for a no. Its FileNotFoundError over HTTP may be any error, which is then the cause."""
    with read_from(f"{url}/{name}"):
        try:
            source.info(f"{root}/{name}")
        except FileNotFoundError as error:
            if error.__cause__ and url.startswith(HTTP) and getattr(error.__cause__, "status", None) not in (404, 410):
                raise
            return False
    return True


def small_file(source: Any, root: str, url: str, name: str) -> bytes:
    """The content of a manifest, or of a file beside it. Raises CheckpointError, also for one longer than `MAX_MANIFEST_BYTES`, of which
    no more is read."""
    path = f"{root}/{name}"
    with read_from(f"{url}/{name}"):
        check_regular(source, path)
        size = source.size(path)
        content = b""
        if size is None:  # the source does not say
            with source.open(path, "rb") as reading:
                while len(content) <= MAX_MANIFEST_BYTES and (piece := reading.read(PIECE_BYTES)):
                    content += piece
            size = len(content)
        elif size <= MAX_MANIFEST_BYTES:
            content = source.cat_file(path)
    if size > MAX_MANIFEST_BYTES:
        raise CheckpointError(f"{url} is refused: {name} is longer than {MAX_MANIFEST_BYTES} bytes.")
    return content


def check_regular(source: Any, path: str) -> None:
    """Raises CheckpointError for what is there on this machine and is no file, such as a pipe, which may have no end."""
    if isinstance(source, LocalFileSystem) and os.path.exists(path) and not os.path.isfile(path):
        raise CheckpointError("it is not a regular file")


def copied(source: Any, path: str, target: Path, entry: FileEntry) -> Iterator[int]:
    """Copy one file, checking length and SHA-256; yields the size of each piece in bytes. Raises CheckpointError, OSError."""
    hashed, length = hashlib.sha256(), 0
    with read_from(path):
        check_regular(source, path)
        reading = source.open(path, "rb")
    with reading, target.open("xb") as writing:
        while length <= entry.bytes:
            with read_from(path):
                piece = reading.read(PIECE_BYTES)
            if not piece:
                break
            writing.write(piece)
            hashed.update(piece)
            length += len(piece)
            yield len(piece)
        writing.flush()
        os.fsync(writing.fileno())
    with target.open("rb") as written:
        problem = pointer_problem(written.read(HEAD_BYTES))
    if problem:
        raise CheckpointError(f"{target.name} {problem}")
    if (length, hashed.hexdigest()) != (entry.bytes, entry.sha256):
        raise CheckpointError(f"{target.name} is not what the manifest says")


def point(link: Path, name: str) -> None:
    """Point a link elsewhere in one step: a reader sees the old directory or the new one. Raises CheckpointError if it is not a link."""
    if link.exists() and not link.is_symlink():
        raise CheckpointError(f"{link} exists and is not a link")
    fresh = link.with_name(f".{link.name}.{secrets.token_hex(4)}")
    try:
        fresh.symlink_to(name)
        fresh.replace(link)
        sync(link.parent)
    finally:
        fresh.unlink(missing_ok=True)
