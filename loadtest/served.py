"""Serves rankings by every endpoint, then reads the log of what was served and looks for differences from what the engine was given.

Two independent checks of every row: its context and candidates are those that the request's JSON says, read here in a plain way; and an
engine that scores them again gets the bits that the caller got.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import httpx
import numpy as np
import typer
from numpy.typing import NDArray

from loadtest.generate.tensors import inference_of, masked
from loadtest.generate.traffic import Traffic, TrafficSettings
from loadtest.server import DEMO, PLAIN, Server, serving
from model.config import MAX_DWELL_SECONDS, ModelConfig
from model.create import EngineOptions, create_engine
from model.engine import Engine, Item
from model.inputs import Candidates, Context, Scores
from model.ranking import combine, magnitudes, offset
from weights.checkpoint import Checkpoint, load_checkpoint
from weights.served import PARTS, ServedRanking, read_part
from weights.synthetic.small_checkpoint import write_small_checkpoint
from weights.text_ids import text_id

CALLERS = 4
HISTORY = 200  # the longest that is sent: longer than the windows of the models
KINDS = ("objects", "columns", "handle", "batch", "tensors", "masks", "explore", "recommend", "recommend by handle")
TEXT_KINDS = ("objects", "columns", "handle", "batch", "explore")
Body = dict[str, Any]
Reply = Mapping[str, Any]


@dataclass(frozen=True)
class Answered:
    """A request that names its user and history, and the candidates of its reply by their ids."""

    body: Body
    scores: Mapping[int, float]


@dataclass
class Tally:
    """Counts of one run. `different`: candidates of rankings in which anything differs; `lacking`: rankings that the log does not have."""

    rankings: int = 0
    candidates: int = 0
    different: int = 0
    lacking: int = 0
    truncated: int = 0
    by_handle: int = 0
    explored: int = 0


class Caller:
    """Sends requests of all kinds to a service, and keeps what they said."""

    def __init__(self, server: Server, checkpoint: Checkpoint, kinds: Sequence[str]) -> None:
        self.answered: dict[str, Answered] = {}
        self.by_handle: set[str] = set()  # names of requests
        self.kinds = kinds
        self._manifest = checkpoint.manifest
        self._http = httpx.Client(base_url=server.url, timeout=60, verify=PLAIN)

    def send(self, number: int, body: Body) -> int:
        """Send a request in the form of its number, by the turn of the kinds; return how many candidates were ranked."""
        kind, name = self.kinds[number % len(self.kinds)], f"ranking-{number}"
        body = body | {"request_id": name}
        if kind == "columns":
            posts = {part: _in_columns(body[part]) for part in ("history", "candidates") if body[part]}
            return self._keep(body, self._post("/rank", body | posts | {"reply": "columns", "score": "offset"}))
        if kind == "handle":
            return self._keep(body, self._post("/rank", self._by_handle(body)))
        if kind == "batch":
            halves = [body["candidates"][0::2], body["candidates"][1::2] or body["candidates"][:1]]
            items = [body | {"candidates": half, "request_id": f"{name}-{place}"} for place, half in enumerate(halves)]
            replies = self._post("/rank/batch", items)
            return sum(self._keep(item, reply) for item, reply in zip(items, replies, strict=True))
        if kind in ("tensors", "masks"):
            tensors = inference_of(body, self._manifest.action_names)
            tensors = masked(tensors) if kind == "masks" and body["history"] else tensors
            content, headers = tensors.body(binary=True)
            path = f"/v2/models/{self._manifest.name}/infer"
            reply = self._http.post(path, content=content, headers=headers).raise_for_status()
            length = int(reply.headers["inference-header-content-length"])
            outputs, rest = json.loads(reply.content[:length])["outputs"], reply.content[length:]
            columns: dict[str, NDArray[Any]] = {}
            for output in outputs:
                size = output["parameters"]["binary_data_size"]
                columns[output["name"]] = np.frombuffer(
                    rest[:size], {"UINT64": "u8", "FP64": "f8"}.get(output["datatype"], "V1")
                )
                rest = rest[size:]
            said = {"post_id": columns["post_id"].tolist(), "score": columns["score"].tolist()}
            return self._keep(body, {"candidates": said})
        if kind == "explore":
            return self._keep(body, self._post("/rank", body | {"explore": {"temperature": 0.05}}))
        if kind.startswith("recommend"):
            request = self._by_handle(body) if kind.endswith("handle") else dict(body)
            del request["candidates"]
            reply = self._post("/recommend", request | {"k": len(body["candidates"]), "exclude_history": False})
            return self._keep(body | {"candidates": None}, reply)
        return self._keep(body, self._post("/rank", body))

    def _by_handle(self, body: Body) -> Body:
        self.by_handle.add(body["request_id"])
        whose = {name: body[name] for name in ("user_id", "history")}
        return {name: value for name, value in body.items() if name not in whose} | {
            "context": self._post("/context", whose)["context"]
        }

    def _post(self, path: str, body: Any) -> Any:
        return self._http.post(path, json=body).raise_for_status().json()

    def _keep(self, body: Body, reply: Reply) -> int:
        said = reply["candidates"]
        if isinstance(said, dict):
            said = [
                {"post_id": post, "score": score} for post, score in zip(said["post_id"], said["score"], strict=True)
            ]
        scores = {_id(row["post_id"], self._manifest.ids): row["score"] for row in said}
        self.answered[body["request_id"]] = Answered(body, scores)
        return len(said)


def _in_columns(items: Sequence[Body]) -> Body:
    return {name: [item[name] for item in items] for name in items[0]}


def _id(sent: int | str, kind: str) -> int:
    return int(sent) if kind == "uint64" else text_id(str(sent))


def bodies(ids: str, seed: int) -> Iterator[Body]:
    """Requests without end, with posts as objects. Some histories are longer than any window."""
    settings = TrafficSettings(seed=seed, history_window=HISTORY, as_is=True, objects_share=1.0)
    for request in Traffic(settings):
        body = json.loads(request.body)
        if ids == "text":
            body["user_id"] = f"user {body['user_id']}"
            for post in (*body["history"], *body["candidates"]):
                post |= {"post_id": f"post {post['post_id']}", "author_id": f"{post['author_id']:x} é"}
        yield body


class Checker:
    """Knows what a checkpoint is given of a request, and what it answers."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.manifest = checkpoint.manifest
        self.engine: Engine = create_engine(checkpoint.ranker, EngineOptions("cpu", threads=1, cache_bytes=0))
        self.engine.warm_up()

    def is_right(self, row: ServedRanking, answered: Answered) -> bool:
        """Whether a row says exactly what the engine was given for this request, and what the caller was told."""
        body, config = answered.body, self.manifest.config
        is_same = [_same(row.context, self._context(body["user_id"], body["history"], config))]
        if body["candidates"] is not None:  # else the service chose them
            is_same.append(_same(row.candidates, self._candidates(body["candidates"], body["impression_ts"], config)))
            is_same.append(row.created_at.tolist() == [post["created_at"] for post in body["candidates"]])
        scores = self.engine.forward([Item(row.context, row.candidates)])[0].scores
        sent_scores = [answered.scores[post] for post in row.candidates.post_ids.tolist()]
        return all(is_same) and self._same_scores(row, scores) and sent_scores == row.scores.tolist()

    def _same_scores(self, row: ServedRanking, scores: Scores) -> bool:
        combined = combine(scores.probabilities, row.weights)
        if row.score_form == "offset":
            combined = offset(combined, *magnitudes(row.weights))
        assert row.probabilities is not None
        ranks = row.ranks if row.temperature is not None else np.argsort(np.argsort(-combined, kind="stable")) + 1
        return (
            combined.tobytes() == row.scores.tobytes()
            and scores.probabilities.tobytes() == row.probabilities.tobytes()
            and ranks.tolist() == row.ranks.tolist()
        )

    def _context(self, user: int | str, history: Sequence[Body], config: ModelConfig) -> Context:
        names, read = self.manifest.action_names, history[-config.history_length :]
        actions = [[float(name in event["actions"]) for name in names] for event in read]
        dwell = [min(event["dwell_time"], MAX_DWELL_SECONDS) for event in read]
        return Context(
            _id(user, self.manifest.ids),
            self._ids(read, "post_id"),
            self._ids(read, "author_id"),
            np.array(actions, np.float32).reshape(len(read), len(names)),
            np.array([event["product_surface"] for event in read], np.int64),
            np.array(dwell, np.float32),
            dropped=len(history) - len(read),
        )

    def _candidates(self, posts: Sequence[Body], impression_ts: int, config: ModelConfig) -> Candidates:
        ages = [
            (impression_ts - post["created_at"]) // (60 * config.post_age_granularity_minutes) + 1 for post in posts
        ]
        return Candidates(
            self._ids(posts, "post_id"),
            self._ids(posts, "author_id"),
            np.array([post["product_surface"] for post in posts], np.int64),
            np.clip(np.array(ages, np.int64), 0, config.post_age_buckets - 1),
        )

    def _ids(self, posts: Sequence[Body], name: str) -> NDArray[np.uint64]:
        return np.array([_id(post[name], self.manifest.ids) for post in posts], np.uint64)


def _same(ours: Context | Candidates, theirs: Context | Candidates) -> bool:
    """Whether two inputs have the same values; a history by handle lacks the columns that its checkpoint cannot see."""
    for name in ours.__dataclass_fields__:
        one, two = getattr(ours, name), getattr(theirs, name)
        if isinstance(one, np.ndarray):
            if (one.dtype, one.shape, one.tobytes()) != (two.dtype, two.shape, two.tobytes()):
                return False
        elif name != "is_kept" and one != two:
            return False
    return True


def run(checkpoint: Path, candidates: int, workers: int, *, seed: int = 1) -> Tally:
    """Rank at least so many candidates on a service with so many workers (0: one process), and check its log."""
    loaded = load_checkpoint(checkpoint)
    is_text = loaded.manifest.ids == "text"
    tally = Tally()
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder) / "log"
        options: dict[str, Any] = {
            "workers": workers,
            "threads": 1,
            "logs__level": "error",
            "queue__max_wait_seconds": 0,
        }
        with serving(
            checkpoint, retrieval=not is_text, served__directory=directory, served__part_seconds=2, **options
        ) as server:
            caller = Caller(server, loaded, TEXT_KINDS if is_text else KINDS)
            stream, number = bodies(loaded.manifest.ids, seed), 0
            with ThreadPoolExecutor(CALLERS) as pool:
                while tally.candidates < candidates:
                    turn = [(number + place, next(stream)) for place in range(8 * CALLERS)]
                    number += len(turn)
                    tally.candidates += sum(pool.map(lambda one: caller.send(*one), turn))
        checker = Checker(loaded)
        rows = [row for part in sorted(directory.glob(PARTS)) for row in read_part(part)]
        by_name = {row.request_id: row for row in rows}
        if len(by_name) != len(rows):
            raise RuntimeError("two rows of the log have one name")
        for name, answered in caller.answered.items():
            row = by_name.get(name)
            tally.rankings += 1
            if row is None:
                tally.lacking += 1
                continue
            tally.different += 0 if checker.is_right(row, answered) else len(row.scores)
            tally.truncated += row.context.dropped > 0
            tally.by_handle += name in caller.by_handle
            tally.explored += row.temperature is not None
        tally.lacking += len(by_name.keys() - caller.answered.keys())
    return tally


def measure(
    candidates: Annotated[int, typer.Option(min=4)] = 100_000, seed: Annotated[int, typer.Option(min=0)] = 1
) -> None:
    """Compare the log of what was served with what the engine was given. Exit code 1 if anything differs.

    `candidates`: in total, split evenly over one process and two workers, each with integer ids and with text ids.
    """
    failed = False
    with tempfile.TemporaryDirectory() as folder:
        texts = Path(folder) / "texts"
        write_small_checkpoint(texts, 0, ids="text")
        for workers in (0, 2):
            for checkpoint in (DEMO, texts):
                started = time.perf_counter()
                tally = run(checkpoint, candidates // 4, workers, seed=seed)
                facts = {"checkpoint": checkpoint.name, "workers": workers, **vars(tally)}
                print(json.dumps(facts | {"seconds": round(time.perf_counter() - started, 1)}), flush=True)
                failed |= bool(tally.different or tally.lacking)
    sys.exit(failed)
