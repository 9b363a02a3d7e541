"""The log of what was served: rankings of every endpoint, as the engine was given them. Whatever the disk does, callers are served."""

from __future__ import annotations

import io
import json
import os
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from starlette.testclient import TestClient

from app.served.parts import Part, remove_old
from app.service.local import LocalService
from app.settings import Batching, Logs, Served
from app.telemetry.logs import configure
from loadtest.generate.tensors import inference_of, masked
from model.engine import Item
from tests.app.api.live import until
from tests.support import corpora
from tests.support.asgi import served
from tests.support.bodies import good
from tests.support.fakes import ACTIONS, FakeEngine, fake_loader
from tests.support.log_lines import logs_as_before
from tests.support.parts import bits, by_name, rankings_of
from tests.support.rankers import figure
from weights.served import PARTS, ServedRanking, schema
from weights.text_ids import text_id

INFER = "/v2/models/fake/infer"


class Recorder:
    """A fake engine that keeps the items of every forward."""

    def __init__(self) -> None:
        self.items: list[Item] = []
        self.engine = FakeEngine(before=self.keep)

    def keep(self, items: Sequence[Item]) -> None:
        self.items += items

    def check(self, row: ServedRanking) -> None:
        """Check that the engine was given exactly what this row says."""
        of_user = [item for item in self.items if item.context.user_id == row.context.user_id]
        given = (bits(row.context), bits(row.candidates))
        assert given in [(bits(item.context), bits(item.candidates)) for item in of_user]


@contextmanager
def logging(
    directory: Path,
    recorder: Recorder | None = None,
    *,
    load: Any = None,
    log: dict[str, Any] | None = None,
    **groups: Any,
) -> Iterator[tuple[TestClient, LocalService]]:
    """A client of an application that logs into this directory; the log is whole after the block."""
    engine = None if recorder is None else recorder.engine
    with served(engine, load=load, served=Served(directory=directory, **(log or {})), **groups) as both:
        yield both


def post(client: TestClient, path: str, body: Any, **headers: str) -> Any:
    reply = client.post(path, json=body, headers=headers)
    assert reply.status_code == 200, reply.text
    return reply.json()


def test_a_ranking_is_logged_as_the_reply_tells_it(tmp_path: Path) -> None:
    recorder = Recorder()
    with logging(tmp_path / "log", recorder) as (client, ranker):
        before, manifest = time.time(), ranker.model().manifest
        reply = post(client, "/rank", good(top_k=2, actions_wanted=...))
    (row,) = rankings_of(tmp_path / "log")
    recorder.check(row)
    assert (row.request_id, row.endpoint, row.key) == ("page-7", "/rank", None)
    assert before - 1 <= row.served_us / 1e6 <= time.time() + 1
    assert (row.model_name, row.model_version, row.model_digest) == ("fake", "v1", manifest.digest)
    assert (row.action_names, row.continuous_names) == (ACTIONS, ("dwell_time",))
    assert (row.impression_ts, row.score_form) == (1_780_000_000, "sum")
    assert row.created_at.tolist() == [1_779_990_000, 0, 0]
    assert row.weights.tolist() == [1.0, 0.0, -20.0]
    assert (row.returned, row.temperature, row.propensities) == (2, None, None)
    best = np.argsort(row.ranks)[:2]
    assert row.probabilities is not None
    assert row.continuous is not None
    for said, place in zip(reply["candidates"], best.tolist(), strict=True):
        assert (said["score"], said["rank"]) == (row.scores[place], row.ranks[place])
        assert np.array_equal(np.float32(said["probabilities"]), row.probabilities[place])
        assert np.float32(said["continuous"]["dwell_time"]) == row.continuous[place, 0]


def test_each_endpoint_logs_what_its_engine_was_given(tmp_path: Path) -> None:
    recorder, retrieval = Recorder(), corpora.setting(tmp_path / "retrieval")
    with logging(tmp_path / "log", recorder, retrieval=retrieval) as (client, _):
        post(client, "/rank", good(user_id=1, request_id="whole"))
        post(client, "/rank", good(user_id=2, request_id="long", history=good()["history"] * 9))
        post(client, "/rank", good(user_id=3, request_id="none", history=[]))
        handle = post(client, "/context", {"user_id": 4, "history": good()["history"] * 7})["context"]
        post(client, "/rank", good(user_id=..., history=..., context=handle, request_id="handle"))
        post(client, "/rank/batch", [good(user_id=5, request_id="first"), good(user_id=6, request_id="second")])
        post(client, "/recommend", corpora.asked(k=20, request_id="found"))
        tensors = inference_of(good(user_id=7, request_id="tensors", history=good()["history"] * 8), ACTIONS)
        for each in (tensors, replace(masked(tensors), request_id="masks")):
            body, headers = each.body(binary=True)
            assert client.post(INFER, content=body, headers=headers).status_code == 200
    rows = by_name(tmp_path / "log")
    endpoints = {name: row.endpoint for name, row in rows.items()}
    assert endpoints == {
        **dict.fromkeys(("whole", "long", "none", "handle"), "/rank"),
        **dict.fromkeys(("first", "second"), "/rank/batch"),
        "found": "/recommend",
        **dict.fromkeys(("tensors", "masks"), "/v2/models/{name}/infer"),
    }
    for row in rows.values():
        recorder.check(row)
    assert (len(rows["long"].context), rows["long"].context.dropped) == (16, 11)
    assert (len(rows["handle"].context), rows["handle"].context.dropped) == (16, 5)
    assert len(rows["none"].context) == 0
    assert rows["found"].created_at.any()


def test_the_log_and_the_access_line_name_the_same_route(tmp_path: Path) -> None:
    lines, retrieval = io.StringIO(), corpora.setting(tmp_path / "retrieval")
    with logs_as_before(), logging(tmp_path / "log", retrieval=retrieval) as (client, _):
        configure(Logs(format="json"), lines)
        for path in ("/rank", "/rank/fake", "/rank/fake@v1"):
            post(client, path, good(request_id=path))
        post(client, "/rank/batch", [good(request_id="first")], **{"X-Request-ID": "batch"})
        post(client, "/recommend", corpora.asked(k=20, request_id="found"))
        for path in (INFER, "/v2/models/fake/versions/v1/infer"):
            body, headers = replace(inference_of(good(), ACTIONS), request_id=path).body(binary=True)
            assert client.post(path, content=body, headers=headers).status_code == 200
    said = [json.loads(line) for line in lines.getvalue().splitlines()]
    routes = {line["request_id"]: line["route"] for line in said if line["event"] == "request"}
    routes["first"] = routes.pop("batch")
    assert {name: row.endpoint for name, row in by_name(tmp_path / "log").items()} == routes


def test_text_ids_are_logged_as_the_model_reads_them(tmp_path: Path) -> None:
    recorder = Recorder()
    texts = [{"post_id": f"post {place}", "author_id": "Ann"} for place in range(3)]
    body = good(user_id="Lee", history=texts, candidates=texts, weights=...)
    with logging(tmp_path / "log", recorder, load=fake_loader(recorder.engine, ids="text")) as (client, _):
        post(client, "/rank", body)
    (row,) = rankings_of(tmp_path / "log")
    recorder.check(row)
    assert row.context.user_id == text_id("Lee")
    assert row.candidates.post_ids.tolist() == [text_id(f"post {place}") for place in range(3)]


def test_requests_of_a_batch_have_names_of_their_own(tmp_path: Path) -> None:
    items = [good(request_id=name) for name in ("a", ..., "a", "call/0", ..., "a")]
    items[0], items[3] = items[3], items[0]
    with logging(tmp_path / "log") as (client, _):
        replies = post(client, "/rank/batch", items, **{"x-request-id": "call"})
    assert [reply["request_id"] for reply in replies] == ["call/0", "call/1", "a", "a/3", "call/4", "a/5"]
    assert by_name(tmp_path / "log").keys() == {reply["request_id"] for reply in replies}


def test_rows_of_a_batch_have_the_times_of_their_rankings(tmp_path: Path) -> None:
    recorder = Recorder()
    recorder.engine.before = lambda items: time.sleep(0.1)
    settings = {"batching": Batching(max_candidates=3)}
    with logging(tmp_path / "log", recorder, **settings) as (client, _):
        post(client, "/rank/batch", [good(user_id=user) for user in range(1, 4)])
    times = sorted(row.served_us for row in rankings_of(tmp_path / "log"))
    assert min(late - early for early, late in pairwise(times)) > 50_000


def test_no_name_of_a_batch_is_taken_twice(tmp_path: Path) -> None:
    items = [good(request_id=name) for name in ("call/1", ..., "call/1")]
    with logging(tmp_path / "log") as (client, _):
        replies = post(client, "/rank/batch", items, **{"x-request-id": "call"})
    assert [reply["request_id"] for reply in replies] == ["call/1", "call/1/1", "call/1/2"]
    assert by_name(tmp_path / "log").keys() == {reply["request_id"] for reply in replies}


def test_a_ranking_without_a_name_has_that_of_the_header(tmp_path: Path) -> None:
    with logging(tmp_path / "log") as (client, _):
        drawn = client.post("/rank", json=good(request_id=...)).headers["x-request-id"]
        post(client, "/rank", good(request_id=...), **{"x-request-id": "by-header"})
        post(client, "/rank", good(request_id="by-body"), **{"x-request-id": "of-a-proxy"})
    assert sorted(by_name(tmp_path / "log")) == sorted([drawn, "by-header", "by-body"])


def test_a_user_is_logged_always_or_never(tmp_path: Path) -> None:
    with logging(tmp_path / "log", log={"share": 0.5}) as (client, _):
        for turn in range(2):
            for user in range(1, 121):
                post(client, "/rank", good(user_id=user, request_id=f"{user}-{turn}"))
    users = [row.context.user_id for row in rankings_of(tmp_path / "log")]
    assert 30 < len({*users}) < 90
    assert sorted(users) == sorted([*{*users}, *{*users}])


def test_anonymous_rankings_are_drawn_one_by_one(tmp_path: Path) -> None:
    with logging(tmp_path / "log", log={"share": 0.5}) as (client, _):
        for number in range(120):
            post(client, "/rank", good(user_id=0, request_id=f"{number}"))
    assert 30 < len(rankings_of(tmp_path / "log")) < 90


def test_a_share_of_0_logs_nobody(tmp_path: Path) -> None:
    with logging(tmp_path / "log", log={"share": 0}) as (client, _):
        post(client, "/rank", good())
    assert rankings_of(tmp_path / "log") == []


def test_probabilities_can_be_left_out(tmp_path: Path) -> None:
    with logging(tmp_path / "log", log={"probabilities": False}) as (client, _):
        post(client, "/rank", good())
    (row,) = rankings_of(tmp_path / "log")
    assert (row.probabilities, row.continuous) == (None, None)
    assert len(row.scores) == 3


def test_what_is_not_ranked_is_not_logged(tmp_path: Path) -> None:
    with logging(tmp_path / "log", retrieval=corpora.setting(tmp_path / "retrieval")) as (client, ranker):
        post(client, "/context", {"user_id": 1})
        post(client, "/recommend", corpora.asked(topics=[]))
        post(client, "/retrieve", corpora.asked())
        assert client.post("/rank", json=good(user_id=-1)).status_code == 422
        no_number = b'{"requests": [%b, {"user_id": 1e999}]}' % json.dumps(good()).encode()
        refused = client.post("/rank/batch", content=no_number, headers={"content-type": "application/json"})
        assert (refused.status_code, refused.json()["code"]) == (400, "malformed_json")
    assert rankings_of(tmp_path / "log") == []
    assert figure(ranker, 'ranker_served_dropped_total{reason="fault"}') == 0


def test_only_the_owner_can_read_the_log(tmp_path: Path) -> None:
    with logging(tmp_path / "log") as (client, _):
        post(client, "/rank", good())
    (part,) = (tmp_path / "log").glob(PARTS)
    modes = [stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "log", part.parent, part)]
    assert modes == [0o700, 0o700, 0o600]
    assert part.parent.name == time.strftime("date=%Y-%m-%d", time.gmtime())


def test_a_part_is_closed_when_it_is_old(tmp_path: Path) -> None:
    with logging(tmp_path / "log", log={"part_seconds": 1}) as (client, ranker):
        post(client, "/rank", good())
        until(lambda: figure(ranker, "ranker_served_rankings_total") == 1)
        assert len(rankings_of(tmp_path / "log")) == 1
        post(client, "/rank", good(request_id="later"))
    assert len([*(tmp_path / "log").glob(PARTS)]) == 2
    assert figure(ranker, "ranker_served_bytes_total") == sum(
        part.stat().st_size for part in (tmp_path / "log").glob(PARTS)
    )


def test_a_part_is_closed_when_it_is_large(tmp_path: Path) -> None:
    posts = [{"post_id": place, "author_id": 1} for place in range(1, 2000)]
    with logging(tmp_path / "log", log={"part_bytes": 2**16}) as (client, ranker):
        post(client, "/rank", good(candidates=posts, top_k=..., reply="columns"))
        until(lambda: figure(ranker, "ranker_served_rankings_total") == 1)
    assert len(rankings_of(tmp_path / "log")) == 1


def test_old_days_are_removed_and_foreign_files_stay(tmp_path: Path) -> None:
    log, part = tmp_path / "log", "20260601T101112Z-00112233aabbccdd.parquet"
    days = [time.strftime("date=%Y-%m-%d", time.gmtime(time.time() - ago * 86_400)) for ago in (3, 2, 0)]
    for day in days:
        (log / day).mkdir(parents=True)
        for name in (part, f"{part}.open", "notes.txt"):
            (log / day / name).write_bytes(b"x")
    (log / days[0] / "notes.txt").unlink()
    os.utime(log / days[2] / f"{part}.open", (1, 1))  # of a process that was killed
    with logging(log, log={"keep_days": 2}):
        until(lambda: not (log / days[2] / f"{part}.open").exists())
    kept = sorted(path.relative_to(log).as_posix() for path in log.rglob("*.*"))
    assert kept == [f"{days[1]}/{name}" for name in (part, f"{part}.open", "notes.txt")] + [
        f"{days[2]}/{name}" for name in (part, "notes.txt")
    ]
    assert not (log / days[0]).exists()


def test_nothing_of_another_name_is_removed(tmp_path: Path) -> None:
    part = "20260601T101112Z-00112233aabbccdd.parquet"
    folders = ("date=2026-06-01.backup", "date=2026-06-01 (copy)", "date=0-archive", "date=2026-06")
    files = [f"{folder}/{part}" for folder in folders]
    files += [f"date=2026-06-01/{name}" for name in ("compacted.parquet", "mine.parquet.open", f"old-{part}")]
    for name in files:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"x")
        os.utime(tmp_path / name, (1, 1))
    (tmp_path / "date=2026-05").mkdir()
    assert remove_old(tmp_path, keep_days=30, now=time.time()) == 0
    assert sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*.*")) == sorted(
        {*files, "date=2026-06-01.backup"}
    )
    assert (tmp_path / "date=2026-05").exists()


def test_no_service_removes_what_another_is_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.served.parts.TOUCH_SECONDS", 0)
    with logging(tmp_path, log={"part_seconds": 86_400}) as (client, _):
        post(client, "/rank", good())
        until(lambda: [*tmp_path.glob("*/*.open")])
        (part,) = tmp_path.glob("*/*.open")
        os.utime(part, (1, 1))  # nothing reaches the disk below eight megabytes
        until(lambda: part.stat().st_mtime > 1)
        with logging(tmp_path) as (other, _):
            post(other, "/rank", good(request_id="other"))
            until(lambda: len([*tmp_path.glob("*/*.open")]) != 1)
        assert part.exists()
    assert len(rankings_of(tmp_path)) == 2


def test_nothing_is_removed_where_days_are_kept_for_ever(tmp_path: Path) -> None:
    part = tmp_path / "log/date=2020-01-01/a.parquet"
    part.parent.mkdir(parents=True)
    part.write_bytes(b"x")
    with logging(tmp_path / "log", log={"keep_days": 0}) as (client, _):
        post(client, "/rank", good())
    assert part.exists()


@pytest.mark.parametrize("place", ["missing/log", "file/log", "file"])
def test_an_unwritable_directory_costs_rankings_not_requests(tmp_path: Path, place: str) -> None:
    (tmp_path / "file").write_bytes(b"")
    with logging(tmp_path / place) as (client, ranker):
        for number in range(5):
            post(client, "/rank", good(request_id=f"{number}"))
    assert figure(ranker, 'ranker_served_dropped_total{reason="not_written"}') == 5
    assert figure(ranker, "ranker_served_rankings_total") == 0


def test_a_directory_that_goes_away_and_comes_back_is_used_again(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    with logging(tmp_path / "disk/log", log={"part_seconds": 1}) as (client, ranker):
        post(client, "/rank", good(request_id="before"))
        until(lambda: figure(ranker, "ranker_served_rankings_total") == 1)
        (tmp_path / "disk").rename(tmp_path / "gone")
        post(client, "/rank", good(request_id="lost"))
        until(lambda: figure(ranker, 'ranker_served_dropped_total{reason="not_written"}') == 1)
        (tmp_path / "gone").rename(tmp_path / "disk")
        post(client, "/rank", good(request_id="after"))
    assert sorted(by_name(tmp_path / "disk/log")) == ["after", "before"]


def test_a_part_that_cannot_be_named_closes_nobody_elses_file(tmp_path: Path) -> None:
    part = Part(tmp_path, 20_000, schema(), time.time(), lambda batch: None)
    part.path.mkdir()  # a file cannot take the place of a directory
    with pytest.raises(OSError, match="directory"):
        part.close()
    others = [os.open("/dev/null", os.O_RDONLY) for _ in range(8)]  # one of them has the number of the part's file
    part.abandon()
    for other in others:
        os.close(other)
    assert not part.open_path.exists()


def test_a_byte_that_changes_on_the_disk_is_noticed(tmp_path: Path) -> None:
    with logging(tmp_path) as (client, _):
        post(client, "/rank", good())
    (path,) = tmp_path.glob(PARTS)
    data, place = bytearray(path.read_bytes()), pq.read_metadata(path).row_group(0).column(0)
    data[place.data_page_offset + place.total_compressed_size - 1] ^= 1
    path.write_bytes(data)
    with pytest.raises(ValueError, match=r"\.parquet cannot be read as Parquet: "):
        rankings_of(tmp_path)


FULL_DISK = """
import os, resource, sys, time
from pathlib import Path
from app.served.writer import Writer
from app.settings import Served
from app.telemetry.metrics import Metrics
from tests.weights.test_served import batch_of, ranking

directory = Path(sys.argv[1])
_, most = resource.getrlimit(resource.RLIMIT_FSIZE)
writer = Writer(Served(directory=directory), directory, Metrics())
before = os.dup(0)
resource.setrlimit(resource.RLIMIT_FSIZE, (0, most))  # files can be made, and take no byte
for number in range(20):
    writer.put(batch_of([ranking(number)]), 20_000, 1000)
writer.start()
while writer.waiting_bytes:
    time.sleep(0.01)
print(os.dup(0) - before, len([*directory.glob("date=*/*")]))
resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
writer.put(batch_of([ranking(20)]), 20_000, 1000)
print(writer.close(30))
"""


def test_a_full_disk_uses_up_no_descriptors(tmp_path: Path) -> None:
    command = [sys.executable, "-c", FULL_DISK, str(tmp_path / "log")]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    said = [line for line in ended.stdout.splitlines() if "served_not_written" not in line]
    assert said == ["1 0", "True"], ended.stderr
    assert [*by_name(tmp_path / "log")] == ["feed-20"]


@pytest.mark.slow
def test_a_disk_that_hangs_costs_rankings_beyond_a_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened, sync = threading.Event(), os.fsync
    monkeypatch.setattr(os, "fsync", lambda descriptor: (opened.wait(30), sync(descriptor)))
    posts = [{"post_id": place, "author_id": 1} for place in range(1, 4001)]
    body = json.dumps(good(candidates=posts, top_k=1)).encode()
    with logging(tmp_path / "log", log={"part_bytes": 2**16}) as (client, ranker):
        dropped = 0.0
        for _ in range(400):
            assert client.post("/rank", content=body, headers={"content-type": "application/json"}).status_code == 200
            dropped = figure(ranker, 'ranker_served_dropped_total{reason="queue_full"}')
            if dropped:
                break
        assert dropped
        opened.set()
    rows = rankings_of(tmp_path / "log")
    assert sum(len(row.scores) for row in rows) * 108 < 80 * 2**20
    assert len(rows) == figure(ranker, "ranker_served_rankings_total")


@pytest.mark.slow
def test_a_disk_that_hangs_does_not_hold_up_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened, sync = threading.Event(), os.fsync
    monkeypatch.setattr(os, "fsync", lambda descriptor: (opened.wait(30), sync(descriptor)))
    with logging(tmp_path / "log") as (client, _):
        post(client, "/rank", good())
        started = time.monotonic()
    assert time.monotonic() - started < 15
    opened.set()


def test_without_pyarrow_one_sentence_says_what_to_install(tmp_path: Path) -> None:
    program = "import sys; sys.modules['pyarrow'] = None; from app.__main__ import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", program, "--served.directory", str(tmp_path / "log")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (
        2,
        "python -m app: served.directory needs pyarrow: pip install 'phoenix-ranking-server[served]'\n",
    )
