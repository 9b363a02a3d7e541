"""The short form of R1 to R4: posts are changed, compacted, swapped and killed while they are searched, against a replay."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import httpx
import pytest

from loadtest.servers.launch import Server, ranking_server
from loadtest.soak import posts
from loadtest.soak.corpora import Edit, Oracle
from loadtest.soak.oracle import TOKEN
from loadtest.soak.pairs import pairs
from loadtest.soak.posts import NEW_POSTS, Pace, changes, each_user, kills, settings_of
from loadtest.soak.posts import Searched as Searching
from loadtest.soak.servers import QUIET

pytestmark = pytest.mark.timeout(120)

BRISK = Pace(4, 5, 7)
IN_A_NAMESPACE = ("unshare", "--user", "--map-root-user", "--mount")


@pytest.fixture(autouse=True)
def few_searchers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(posts, "SEARCHERS", 3)


def test_r1_r2_r3_every_answer_is_what_a_replay_says() -> None:
    rows = changes(80, BRISK)
    assert [row.to_json() for row in rows if not row.ok] == []
    assert min(row.tried for row in rows[:2]) > 50
    assert rows[2].tried > 3


def test_r1_r2_r3_hold_through_fronts() -> None:
    rows = changes(40, BRISK, fronts=2)
    assert [row.to_json() for row in rows if not row.ok] == []
    assert min(row.tried for row in rows[:2]) > 50


def test_they_are_red_for_planted_faults() -> None:
    """The replay misses changes (R1), posts are taken for deleted that are not (R2), a swap names the corpus alone (R3)."""
    assert [row.row for row in changes(45, BRISK, ["forget", "claim", "half"]) if not row.ok] == ["R1", "R2", "R3"]


def test_r1_a_kill_loses_no_acknowledged_change() -> None:
    assert kills(1).ok


def test_r1_is_red_where_a_crash_takes_half_of_the_log() -> None:
    assert kills(1, ["lose"]).figure == 1


def test_r4_two_servers_on_one_corpus_lose_no_acknowledged_change() -> None:
    rows = pairs(10, 6)
    assert [row.to_json() for row in rows if not row.ok] == []
    assert rows[0].tried > 5


def test_r4_is_red_where_a_crash_takes_half_of_the_log() -> None:
    rows = pairs(4, 10, ["lose"], compact_share=0)
    assert [(row.ok, row.figure > 0) for row in rows[:1]] == [(False, True)]


def wrong_answers(oracle: Oracle, server: Server) -> int:
    """How many users do not get what a replay of the acknowledged changes says."""
    seen = Searching({"a": oracle}, None)
    each_user(seen, server)
    late = sum(answer.edits != len(oracle.edits) for answer in seen.answers)
    return late + seen.dropped if late else seen.differing() + seen.dropped


def fill_the_disk(command: list[str], root: Path) -> tuple[dict[str, list[str]], dict[str, int]]:
    """On a small disk: change posts, fill it, go on, restart, free it, go on. `command`: of a server that sees the disk.

    The control at the end: a crash that takes half of the log is seen.
    """
    oracle, statuses, wrong, filler = Oracle("a", root, 0), dict[str, list[str]](), dict[str, int](), root / "filler"
    settings = settings_of(root, oracle) | QUIET
    url = f"http://127.0.0.1:{settings['admin__port']}/admin/posts"

    def ask(when: str, path: str = "", **body: object) -> bool:
        reply = httpx.post(url + path, headers={"Authorization": f"Bearer {TOKEN}"}, timeout=30, **body)  # type: ignore[arg-type]
        told = "" if reply.status_code == 200 else f" {reply.json()['code']} {reply.headers['retry-after']}"
        statuses.setdefault(when, []).append(f"{reply.status_code}{told}")
        return reply.status_code == 200

    def change(when: str) -> None:
        number = sum(map(len, statuses.values()))
        oracle.add(Edit([number + 1], [(NEW_POSTS + 50 * number + row, 1 + row) for row in range(50)]))
        if not ask(when, json=oracle.edits[-1].body()):
            oracle.forget_after(len(oracle.edits) - 1)

    with ranking_server(*command, **settings) as server:
        for _ in range(3):
            change("before")
        with filler.open("wb", buffering=0) as file, suppress(OSError):
            while True:
                file.write(bytes(4096))
        for _ in range(6):
            change("full")
        ask("compacting", "/compact")
        wrong["full"] = wrong_answers(oracle, server)
    with ranking_server(*command, **settings) as server:
        wrong["started when full"] = wrong_answers(oracle, server)
        change("full")
        filler.unlink()
        for _ in range(3):
            change("freed")
        ask("compacted", "/compact")
        wrong["freed"] = wrong_answers(oracle, server)
        change("freed")
        change("freed")
    [log] = oracle.corpus.glob("changes-*.log")
    os.truncate(log, log.stat().st_size // 2)
    with ranking_server(*command, **settings) as server:
        wrong["half of the log lost"] = wrong_answers(oracle, server)
    return statuses, wrong


IN_ITS_NAMESPACES = """
import ctypes, os, runpy, sys
for kind in ("user", "mnt"):
    assert ctypes.CDLL(None).setns(os.open(f"/proc/{holder}/ns/{{kind}}", os.O_RDONLY), 0) == 0
sys.argv = ["app"]
runpy.run_module("app", run_name="__main__")"""


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[int]:
    """The process that holds a file system of 8 MiB at `tmp_path`, which it and those in its namespaces see."""
    mounted = ["sh", "-c", 'mount -t tmpfs -o size=8m tmpfs "$0" && echo && exec sleep 110', str(tmp_path)]
    try:
        holder = subprocess.Popen([*IN_A_NAMESPACE, *mounted], stdout=-1, stderr=subprocess.STDOUT, text=True)
    except OSError as error:
        pytest.skip(f"no unshare of util-linux: {os.strerror(error.errno or errno.ENOENT)}")
    with holder:
        assert holder.stdout is not None
        if told := holder.stdout.readline().strip():
            pytest.skip(f"no namespace of one's own to mount a small disk in: {told}")
        yield holder.pid
        holder.kill()


def test_r5_on_a_full_disk_changes_are_refused_and_none_is_lost(small_disk: int, tmp_path: Path) -> None:
    command = [sys.executable, "-c", IN_ITS_NAMESPACES.format(holder=small_disk)]
    statuses, wrong = fill_the_disk(command, Path(f"/proc/{small_disk}/root/{tmp_path}"))
    assert wrong.pop("half of the log lost") > 0
    assert wrong == {"full": 0, "started when full": 0, "freed": 0}
    assert set(statuses["before"] + statuses["freed"] + statuses["compacted"]) == {"200"}
    refused = [status for status in statuses["full"] if status != "200"]
    assert len(refused) >= 3
    assert {status.rpartition(" ")[0] for status in refused + statuses["compacting"]} == {"507 storage_full"}
    assert all(int(status.rpartition(" ")[2]) > 0 for status in refused)


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_r4_holds_for_a_thousand_rounds() -> None:
    rows = pairs(1000, seconds=1000)
    assert [row.to_json() for row in rows if not row.ok] == []
    assert rows[0].tried > 900
