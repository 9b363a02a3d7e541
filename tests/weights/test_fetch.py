"""`fetch`: a checkpoint or corpus arrives whole and checked, or not at all, from a path and over HTTP."""

from __future__ import annotations

import functools
import http.server
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import fsspec
import pytest

from tests.support import corpora
from tests.weights.call import call
from tests.weights.corpus import changing
from tests.weights.small import sign
from weights.actions import STANDARD_ACTIONS
from weights.checkpoint import load_checkpoint, load_manifest, save_checkpoint
from weights.corpus.changes import load_changed
from weights.corpus.store import load_corpus
from weights.errors import CheckpointError
from weights.fetch import fetch, point
from weights.format.writer import Labels, write_checkpoint
from weights.synthetic.random_weights import mini_config, random_pieces

DEMO = Path("weights/demo")


def tree(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def another(place: Path) -> Path:
    """The demo under another version, and with other default weights."""
    shutil.copytree(DEMO, place, ignore=shutil.ignore_patterns("report"))
    assert call("relabel", place, "--version", "v2").exit_code == 0
    return place


@pytest.fixture(scope="module")
def web() -> Iterator[str]:
    """The demos over HTTP, by a server that knows nothing of us."""
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory="weights")
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


@contextmanager
def served(directory: Path, **methods: Callable[[Any], None]) -> Iterator[str]:
    """The address of a directory over HTTP, with other methods than those of Python's server."""
    kind = type("Served", (http.server.SimpleHTTPRequestHandler,), {"log_message": lambda *_: None, **methods})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(kind, directory=directory)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


def failing(name: str, status: int) -> dict[str, Callable[[Any], None]]:
    """Methods that answer for files whose names begin so with this status, or with none if it is 0: they end the connection."""

    def method(answer: Callable[[Any], None]) -> Callable[[Any], None]:
        def answered(self: Any) -> None:
            if not self.path.rpartition("/")[2].startswith(name):
                answer(self)
            elif status:
                self.send_error(status)

        return answered

    usual = http.server.SimpleHTTPRequestHandler
    return {"do_GET": method(usual.do_GET), "do_HEAD": method(usual.do_HEAD)}


@pytest.mark.parametrize("by", ["path", "http"])
def test_fetched_bytes_equal_the_source_and_the_link_leads_there(by: str, web: str, tmp_path: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    where = web if by == "http" else "weights"
    path, manifest = fetch(f"{where}/demo", tmp_path, "current", progress=lambda *told: seen.append(told))
    assert (tmp_path / "current").resolve() == path == tmp_path / f"demo@{manifest.version}"
    assert tree(path) == {name: held for name, held in tree(DEMO).items() if not name.startswith("report")}
    assert load_checkpoint(tmp_path / "current").manifest.digest == load_manifest(DEMO).digest
    copied = [told for told in seen if told[0] == "Fetching"]
    assert copied[-1][1] == copied[-1][2] == sum(entry.bytes for entry in manifest.files.values())
    fetch(f"{where}/demo-posts", tmp_path, "posts")
    assert len(load_corpus(tmp_path / "posts").corpus) == 4781


def test_a_link_that_the_disk_refuses_is_told_and_leaves_no_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object) -> None:
        raise OSError(5, "Input/output error")

    fetch(str(DEMO), tmp_path, "current")
    before = sorted(os.listdir(tmp_path))
    for name in ("fsync", "replace"):
        with monkeypatch.context() as patch:
            patch.setattr(os, name, refused)
            with pytest.raises(CheckpointError, match="is not written: Input/output error"):
                fetch(str(DEMO), tmp_path, "current")
        assert sorted(os.listdir(tmp_path)) == before


def test_what_is_there_is_not_copied_again(tmp_path: Path) -> None:
    path, _ = fetch(str(DEMO), tmp_path, "current")
    before = (path / "manifest.json").stat().st_ino
    (tmp_path / "current").unlink()
    fetch(str(DEMO), tmp_path, "current")
    assert (tmp_path / "current" / "manifest.json").stat().st_ino == before


def test_a_damaged_copy_that_is_there_is_refused(tmp_path: Path) -> None:
    out = tmp_path / "out"
    copy, manifest = fetch(str(DEMO), out, "current")
    point(out / "current", "elsewhere")
    for damage in (lambda path: path.write_bytes(path.read_bytes()[:-1] + b"x"), Path.unlink):
        damage(copy / next(iter(manifest.files)))
        with pytest.raises(CheckpointError, match="the copy that is already there is damaged"):
            fetch(str(DEMO), out, "current")
        assert os.readlink(out / "current") == "elsewhere"


def test_of_two_fetches_at_once_the_first_stays_and_both_succeed(tmp_path: Path) -> None:
    inodes: list[int] = []

    def meanwhile(*_: object) -> None:
        if not inodes:
            inodes.append(0)
            inodes[0] = fetch(str(DEMO), tmp_path, "current")[0].stat().st_ino

    path, manifest = fetch(str(DEMO), tmp_path, "current", progress=meanwhile)
    assert [path.stat().st_ino] == inodes
    assert sorted(each.name for each in tmp_path.iterdir()) == ["current", f"demo@{manifest.version}"]


@pytest.mark.slow
def test_a_flipped_bit_anywhere_is_refused_and_the_link_stays(tmp_path: Path) -> None:
    source, out = another(tmp_path / "source"), tmp_path / "out"
    fetch(str(DEMO), out, "current")
    files = [path for path in source.iterdir() if path.suffix == ".safetensors" or path.name == "manifest.json"]
    for file in files:
        whole = file.read_bytes()
        file.write_bytes(whole[:-3] + bytes([whole[-3] ^ 1]) + whole[-2:])
        with pytest.raises(CheckpointError, match=r"refused|not what the manifest says"):
            fetch(str(source), out, "current")
        file.write_bytes(whole + b"more")
        with pytest.raises(CheckpointError, match=r"refused|not what the manifest says"):
            fetch(str(source), out, "current")
        file.write_bytes(whole)
    assert sorted(path.name for path in out.iterdir()) == sorted(["current", f"demo@{load_manifest(DEMO).version}"])
    fetch(str(source), out, "current")
    assert load_manifest(out / "current").version == "v2"


@pytest.mark.parametrize(
    ("url", "options", "said"),
    [
        ("/nowhere", {}, "cannot be read"),
        ("s4://nowhere", {}, "Protocol not known"),
        (str(DEMO), {"digest": "0" * 64}, "its digest is"),
        (str(DEMO), {"link": "taken"}, "exists and is not a link"),
        (str(DEMO), {"link": "../elsewhere"}, "must be a plain name"),
    ],
)
def test_what_cannot_be_done_is_one_sentence(url: str, options: dict[str, str], said: str, tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    with pytest.raises(CheckpointError, match=said):
        fetch(url, tmp_path, **{"link": "current", **options})
    assert not (tmp_path / "current").exists()


@pytest.mark.parametrize("fault", ["403", "cut", "500 of the manifest"])
def test_a_server_that_fails_on_the_way_is_one_sentence(fault: str, tmp_path: Path) -> None:
    failing = "manifest.json" if "manifest" in fault else "params.safetensors"

    class Failing(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

        def do_GET(self) -> None:
            if not self.path.endswith(failing):
                super().do_GET()
            elif fault == "cut":
                self.wfile.write(b"HTTP/1.0 200 OK\r\nContent-Length: 1000\r\n\r\nhalf")
            else:
                self.send_error(int(fault[:3]))

    handler = functools.partial(Failing, directory="weights")
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever).start()
        ended = call("fetch", url := f"http://127.0.0.1:{server.server_address[1]}/demo", "--out", tmp_path)
        server.shutdown()
    assert (ended.exit_code, ended.stderr.count("\n")) == (1, 1), ended.output
    assert re.search(rf"{url}[^ ]* cannot be read: .*{fault[:3] if fault != 'cut' else ''}", ended.stderr)
    assert list(tmp_path.iterdir()) == []


def test_another_checkpoint_of_equal_name_and_version_is_refused(tmp_path: Path) -> None:
    source = another(tmp_path / "source")
    fetch(str(source), tmp_path / "out", "current")
    (tmp_path / "weights.json").write_text('{"favorite": 3}')
    relabelled = call("relabel", source, "--version", "v2", "--score-weights", tmp_path / "weights.json")
    assert relabelled.exit_code == 0
    with pytest.raises(CheckpointError, match="a different one with this name and version"):
        fetch(str(source), tmp_path / "out", "current")


def test_a_file_that_git_lfs_has_not_fetched_is_told(tmp_path: Path) -> None:
    source = another(tmp_path / "source")
    for file in ("tables.user.safetensors", "manifest.json"):
        (source / file).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 2097280\n")
        ended = call("fetch", source, "--out", tmp_path / "out")
        assert (ended.exit_code, f"{file} is a Git LFS pointer" in ended.stderr) == (1, True), ended.stderr


@pytest.mark.slow
@pytest.mark.parametrize("file", ["manifest.json", "params.safetensors", "example.json"])
def test_a_pipe_is_refused_instead_of_waited_for(file: str, tmp_path: Path) -> None:
    source = another(tmp_path / "source")
    (source / file).unlink()
    os.mkfifo(source / file)
    command = [sys.executable, "-m", "weights", "fetch", str(source), "--out", str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr.count("\n")) == (1, 1), done.stderr
    assert f"{source}/{file} cannot be read: it is not a regular file" in done.stderr
    assert not (tmp_path / "out" / "current").exists()


class WithoutLengths(http.server.SimpleHTTPRequestHandler):
    """Says of no file how long it is."""

    def send_header(self, keyword: str, value: str) -> None:
        if keyword.lower() != "content-length":
            super().send_header(keyword, value)


@pytest.mark.slow
@pytest.mark.parametrize("file", ["manifest.json", "example.json"])
@pytest.mark.parametrize("by", ["path", "http", "http without lengths"])
def test_a_file_that_is_too_long_is_not_read_to_its_end(by: str, file: str, tmp_path: Path) -> None:
    source = another(tmp_path / "source")
    with (source / file).open("ab") as growing:
        growing.truncate(2**40)  # without a byte on the disk
    kind = WithoutLengths if by == "http without lengths" else http.server.SimpleHTTPRequestHandler
    handler = functools.partial(kind, directory=source)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        server.handle_error = lambda *_: None  # type: ignore[method-assign]  # of a caller that does not read on
        threading.Thread(target=server.serve_forever).start()
        url = str(source) if by == "path" else f"http://127.0.0.1:{server.server_address[1]}"
        ended = call("fetch", url, "--out", tmp_path / "out")
        server.shutdown()
    assert ended.exit_code == 1, ended.output
    assert f"{url} is refused: {file} is longer than 16777216 bytes.\n" in ended.stderr
    assert not (tmp_path / "out" / "current").exists()


def not_a_number(source: Path) -> None:
    with (source / "params.safetensors").open("r+b") as file:
        file.seek(-4, os.SEEK_END)
        file.write(b"\xff" * 4)


REFUSED: dict[str, tuple[Callable[[Path], object], Callable[[dict[str, Any]], object], str]] = {
    "a NaN": (not_a_number, lambda manifest: None, "holds a NaN or an infinity"),
    "no header": (lambda source: (source / "params.safetensors").write_bytes(b"{}"), lambda manifest: None, "is not a readable"),
    "a tensor less": (lambda source: None, lambda manifest: manifest["tensors"].pop("tables.user"), "lacks tensor tables.user"),
    "layers": (lambda source: None, lambda manifest: manifest["architecture"].update(layers=1000), "fewer tensors than"),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("fault", REFUSED)
@pytest.mark.parametrize("is_there", [False, True])
def test_the_link_never_moves_to_what_verify_refuses(fault: str, is_there: bool, tmp_path: Path) -> None:
    """Although each byte is what the manifest says. `is_there`: an earlier version has copied it already."""
    source, out = another(tmp_path / "source"), tmp_path / "out"
    fetch(str(DEMO), out, "current")
    damage, change, said = REFUSED[fault]
    damage(source)
    sign(source, change)
    if is_there:
        shutil.copytree(source, out / "demo@v2")
    ended = call("fetch", source, "--out", out)
    assert (ended.exit_code, ended.stderr.count("\n")) == (1, 1), ended.output
    assert said in call("verify", source).stderr
    assert said in ended.stderr
    assert load_manifest(out / "current").version == load_manifest(DEMO).version
    assert (out / "demo@v2").exists() == is_there


def test_a_corpus_that_no_load_takes_gets_no_link(tmp_path: Path) -> None:
    _, corpus = corpora.written(tmp_path)
    vectors = corpus / "vectors.safetensors"
    vectors.write_bytes(vectors.read_bytes()[:-4] + b"\0\0\0\x7f")
    sign(corpus)
    ended = call("fetch", corpus, "--out", tmp_path / "out", "--link", "posts")
    assert (ended.exit_code, "holds a vector of length" in ended.stderr) == (1, True), ended.stderr
    assert not [*(tmp_path / "out").glob("*")]


def test_a_checkpoint_that_speaks_of_kinds_is_no_corpus(tmp_path: Path) -> None:
    demo = load_checkpoint(DEMO)
    names = ["kind", *demo.manifest.action_names[1:]]
    save_checkpoint(
        tmp_path / "source", demo.ranker, name="kinds", action_names=names, continuous=demo.manifest.continuous,
        score_weights={"kind": 1.0}, training={"kind": "corpus", "split": {"kind": "time"}},
    )  # fmt: skip
    done = call("fetch", tmp_path / "source", "--out", tmp_path / "out")
    assert done.exit_code == 0, done.output
    assert load_manifest(tmp_path / "out" / "current").action_names == tuple(names)


def test_a_corpus_that_was_changed_is_not_copied_without_its_changes(tmp_path: Path) -> None:
    towers, corpus = corpora.written(tmp_path)
    fetch(str(corpus), tmp_path / "before", "posts")
    _, changes, _ = load_changed(corpus, load_manifest(towers))
    changes.record(changing.first(1, changes.mark))
    changes.close()
    with pytest.raises(CheckpointError, match=r"was changed after it was built.*`corpus snapshot`"):
        fetch(str(corpus), tmp_path / "after", "posts")
    assert not [*(tmp_path / "after").glob("*")]


@pytest.mark.parametrize("status", [0, 403, 500, 503])
def test_changes_that_a_server_does_not_show_are_not_lost(status: int, tmp_path: Path) -> None:
    towers, corpus = corpora.written(tmp_path)
    _, changes, _ = load_changed(corpus, load_manifest(towers))
    changes.record(changing.first(1, changes.mark))
    changes.close()
    with served(corpus, **failing("changes-", status)) as url:
        ended = call("fetch", url, "--out", tmp_path / "out", "--link", "posts")
    assert (ended.exit_code, ended.stderr.count("\n")) == (1, 1), ended.output
    assert re.match(rf"{url}/changes-[0-9a-f]+.sqlite cannot be read: ", ended.stderr)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("file", ["example.json", "names.json"])
@pytest.mark.parametrize("status", [0, 403, 503])
def test_a_file_for_the_page_is_not_left_out_silently(status: int, file: str, tmp_path: Path) -> None:
    with served(DEMO, **failing(file, status)) as url:
        ended = call("fetch", url, "--out", tmp_path)
    assert (ended.exit_code, f"{url}/{file} cannot be read: " in ended.stderr) == (1, True), ended.output
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("status", [404, 410])
def test_files_for_the_page_need_not_be_there(status: int, tmp_path: Path) -> None:
    with served(DEMO, **failing("names.json", status)) as url:
        path, _ = fetch(url, tmp_path, "current")
    assert ((path / "example.json").exists(), (path / "names.json").exists()) == (True, False)


def test_long_files_need_no_byte_ranges(tmp_path: Path) -> None:
    config = mini_config(0, (30_000, 101, 53), continuous_actions=0)
    write_checkpoint(tmp_path / "long", config, random_pieces(config, 0), Labels("long", STANDARD_ACTIONS))
    assert max(path.stat().st_size for path in (tmp_path / "long").iterdir()) > 6_000_000
    with served(tmp_path / "long") as url:
        path, _ = fetch(url, tmp_path, "current")
    assert tree(path) == tree(tmp_path / "long")


def slowly(self: Any) -> None:
    """Send a long file in pieces that take 1.5 seconds together."""
    content = (Path(self.directory) / self.path[1:]).read_bytes()
    self.send_response(200)
    self.end_headers()
    for at in range(0, len(content), size := 2**17):
        self.wfile.write(content[at : at + size])
        time.sleep(1.5 * size / len(content) if len(content) > 2**20 else 0)


def test_a_long_file_may_take_longer_than_aiohttp_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By itself it waits for five minutes in all, here for one second."""
    monkeypatch.setattr("aiohttp.client.DEFAULT_TIMEOUT", aiohttp.ClientTimeout(total=1))
    fsspec.get_filesystem_class("http").clear_instance_cache()
    with served(DEMO, do_GET=slowly) as url:
        path, _ = fetch(url, tmp_path, "current")
    assert load_manifest(path).digest == load_manifest(DEMO).digest


@pytest.mark.parametrize("status", ["401 Unauthorized", "404 Not Found", "500 Internal Server Error"])
def test_what_a_server_answers_is_the_reason(status: str, tmp_path: Path) -> None:
    with served(DEMO, **failing("manifest", int(status[:3]))) as url:
        ended = call("fetch", url, "--out", tmp_path)
    assert (ended.exit_code, ended.stderr) == (1, f"{url}/manifest.json cannot be read: the server answers {status}.\n")


@pytest.mark.parametrize(
    ("address", "reason"),
    [
        ("http://127.0.0.1:{closed}", "Connect call failed"),
        ("http://nobody.invalid", "[Nn]ame"),
        ("https://127.0.0.1:{plain}", "SSL"),
    ],
)
def test_why_a_server_is_not_reached_is_the_reason(address: str, reason: str, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as bound:
        closed = bound.getsockname()[1]
    with served(DEMO) as url:
        where = address.format(closed=closed, plain=url.rpartition(":")[2])
        ended = call("fetch", where, "--out", tmp_path)
    assert (ended.exit_code, ended.stderr.count("\n")) == (1, 1), ended.output
    assert re.match(rf"{where}/manifest.json cannot be read: .*{reason}", ended.stderr), ended.stderr


def test_a_fetch_removes_what_killed_ones_left_of_other_versions(tmp_path: Path) -> None:
    source, out = another(tmp_path / "source"), tmp_path / "out"
    child = os.fork()
    if not child:
        fetch(str(DEMO), out, "current", progress=lambda *_: os._exit(9))
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    (left,) = os.listdir(out)
    assert re.fullmatch(r"\.demo@.*\.partial", left)
    fetch(str(source), out, "current")
    assert sorted(os.listdir(out)) == ["current", "demo@v2"]


def test_a_fetch_leaves_another_one_at_work(tmp_path: Path) -> None:
    source, out = another(tmp_path / "source"), tmp_path / "out"

    def meanwhile(*_: object) -> None:
        if not (out / "next").exists():
            fetch(str(source), out, "next")

    path, _ = fetch(str(DEMO), out, "current", progress=meanwhile)
    assert sorted(os.listdir(out)) == sorted(["current", "next", "demo@v2", path.name])


@pytest.mark.parametrize("words", [("relabel", "--name", "other"), ("calibrate", "--log", "never-read.parquet")])
def test_what_is_named_for_its_version_is_not_changed(words: tuple[str, ...], tmp_path: Path) -> None:
    """The name was then no longer true, and each later fetch of the version failed."""
    source, out = another(tmp_path / "source"), tmp_path / "out"
    path, _ = fetch(str(source), out, "current")
    before = tree(path)
    command, *rest = words
    refused = call(command, out / "current", *rest)
    assert refused.exit_code == 1, refused.output
    assert f"is named {path.name} for what it holds, as `fetch` names it: {command} a copy that has" in refused.stderr
    assert tree(path) == before


def test_a_copy_that_was_changed_is_told_by_what_it_holds(tmp_path: Path) -> None:
    source, out = another(tmp_path / "source"), tmp_path / "out"
    path, _ = fetch(str(source), out, "current")
    sign(path, lambda manifest: manifest.update(version="v3"))
    ended = call("fetch", source, "--out", out)
    assert (ended.exit_code, ended.stderr) == (
        1,
        f"{path} is not written: the directory of this name now holds demo@v3, because it was changed after it was fetched, such as by "
        "`relabel`: rename it to demo@v3 or remove it, and fetch again.\n",
    )
    path.rename(out / "demo@v3")
    assert call("fetch", source, "--out", out).exit_code == 0
    assert load_manifest(out / "current").version == "v2"


@pytest.mark.parametrize("by", ["link", "directory"])
def test_relabel_refuses_a_directory_that_fetch_named(by: str, tmp_path: Path) -> None:
    path, manifest = fetch(str(DEMO), tmp_path, "current")
    place = path if by == "directory" else tmp_path / "current"
    ended = call("relabel", place, "--version", "v2")
    assert (ended.exit_code, ended.stderr.count("\n")) == (1, 1), ended.output
    assert f"Checkpoint {place} is not written: " in ended.stderr
    assert load_manifest(path).digest == manifest.digest
    copy = shutil.copytree(place, tmp_path / "copy")
    assert call("relabel", copy, "--version", "v2").exit_code == 0
    assert fetch(str(copy), tmp_path, "current")[0].name == "demo@v2"
