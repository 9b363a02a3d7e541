"""Searches over a small corpus, as a ranker of one process has them, engines that wait or fail, and requests. Not a test itself."""

from __future__ import annotations

import asyncio
import shutil
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from app.corpus.loading import CorpusLoader, LoadedCorpus, corpus_loader
from app.corpus.searches import Searches
from app.interface import SearchRequest, SearchResult, ServedCorpus
from app.service.local import LocalService
from app.settings import Settings
from app.telemetry.metrics import Metrics
from model.inputs import NO_IDS, Context
from model.retrieval.inputs import Answers, Filters, PostChange, PostRows, Query
from tests.support import corpora
from tests.support.fakes import fake_loader
from weights.checkpoint import load_encoder
from weights.corpus.importer import encode
from weights.corpus.store import CorpusLabels, write_corpus

FAR = float("inf")  # a deadline
ADMIN = {"port": 1, "token_sha256": "0" * 64}  # with an admin port a process may change its corpus


def settings_of(
    root: Path, version: str = "v1", *, feed: str | None = None, lag: float = 300.0, **groups: Any
) -> Settings:
    """Settings for the towers and the corpus below `root`, which are written there unless they are there already."""
    paths = root / f"towers-{version}", root / f"corpus-{version}"
    if not paths[1].exists():
        corpora.written(root, version=version)
    retrieval = {"checkpoint": paths[0], "corpus": paths[1], "feed": feed, "feed_lag_seconds": lag}
    options: dict[str, Any] = {"retrieval": retrieval, "admin": ADMIN, "threads": 1} | groups
    return Settings(**options)


def create(
    settings: Settings, load: CorpusLoader | None = None, clock: Callable[[], float] = time.monotonic
) -> LocalService:
    """A ranker that has not begun to load; its ranking side is a fake."""
    load = load or corpus_loader(settings)
    return LocalService(settings, Metrics(), load=fake_loader(), load_corpus=load, clock=clock)


class Watched:
    """An engine that says which users shared a scan, and the thread of each. `before` runs before each call of the method that it is
    given for, and may wait or raise. A scan seems to take `search_seconds`, so long that none is computed in the event loop, and to
    encode users whom it does not know `encode_seconds`."""

    def __init__(self, engine: Any, before: dict[str, Callable[[Any], object]]) -> None:
        self._engine, self._before = engine, before
        self.scans: list[list[int]] = []
        self.threads: list[str] = []
        self.search_seconds, self.encode_seconds = 1.0, 1e-6
        self.closed = threading.Event()

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._engine, name)
        if name not in self._before:
            return found
        return lambda *arguments: (self._before[name](arguments), found(*arguments))[1]

    def __setattr__(self, name: str, value: Any) -> None:
        vars(self)[name] = value

    def retrieve(self, queries: Sequence[Query], users: Any) -> Answers:
        self.scans.append([query.context.user_id for query in queries])
        self.threads.append(threading.current_thread().name.partition("_")[0])
        self._before.get("retrieve", id)(queries)
        encode_seconds = self.encode_seconds if users.uncached else 0.0
        answers: Answers = self._engine.retrieve(queries, users)
        return replace(answers, encode_seconds=encode_seconds, search_seconds=self.search_seconds)

    def close(self) -> None:
        self._engine.close()
        self.closed.set()


def watched(settings: Settings, **before: Callable[[Any], object]) -> tuple[CorpusLoader, list[Watched]]:
    """A loader of watched engines, and the list that it puts them into."""
    engines: list[Watched] = []
    load = corpus_loader(settings)

    def loading(checkpoint: Path, corpus: Path, serving: LoadedCorpus | None) -> LoadedCorpus:
        loaded = load(checkpoint, corpus, serving)
        engines.append(Watched(loaded.engine, before))
        return replace(loaded, engine=engines[-1])  # type: ignore[arg-type]

    return loading, engines


@asynccontextmanager
async def running(
    settings: Settings, load: CorpusLoader | None = None, clock: Callable[[], float] = time.monotonic
) -> AsyncIterator[Searches]:
    """Searches over the corpus of the settings, until the end of the block."""
    ranker = create(settings, load, clock)
    ranker.start()
    try:
        await ranker.wait_ready()
        yield ranker.corpus
    finally:
        await ranker.stop(10.0)


def query(user: int = 1, k: int = 500, at_least: str = "") -> Query:
    """A query of a user without history."""
    times = np.empty(0, np.int64)
    context = Context(user, NO_IDS, NO_IDS, np.zeros((0, 3), np.float32), times, np.zeros(0, np.float32))
    return Query(context, k, Filters(NO_IDS), at_least=at_least)


async def found(searches: Searches, asked: Query) -> SearchResult:
    return await searches.search(searches.served, SearchRequest(asked, FAR))


def begun(
    searches: Searches, user: int, deadline: float = FAR, served: ServedCorpus | None = None, key: str | None = None
) -> asyncio.Task[SearchResult]:
    """A search of five posts that is under way."""
    request = SearchRequest(query(user, 5), deadline, key)
    return asyncio.ensure_future(searches.search(served or searches.served, request))


async def posts_of(searches: Searches) -> list[tuple[int, float]]:
    """Every post that a search returns with its score, in order."""
    posts = (await found(searches, query())).posts
    return list(zip(posts.post_ids.tolist(), posts.scores.tolist(), strict=True))


async def ids_of(searches: Searches) -> set[int]:
    return {post for post, _ in await posts_of(searches)}


def change(delete: list[int], new: list[int]) -> PostChange:
    ids = np.array(new, np.uint64)
    rows = PostRows(ids, ids % np.uint64(40) + np.uint64(1), np.zeros(len(new), np.int64), ["news"] * len(new))
    return PostChange(np.array(delete, np.uint64), rows)


def write_mapped_corpus(root: Path) -> None:
    """A corpus for `settings_of(root)` whose vectors are too long to be copied into memory."""
    checkpoint, corpus = corpora.written(root)
    encoder, ids = load_encoder(checkpoint), np.arange(1, 140_001, dtype=np.uint64)
    columns = {
        "post_ids": torch.from_numpy(ids.view(np.int64)),
        "author_ids": torch.from_numpy(ids.view(np.int64)),
        "vectors": encode(encoder, ids, ids),
    }
    shutil.rmtree(corpus)
    labels, names = CorpusLabels("posts", "v1"), ["post_ids", "author_ids"]
    write_corpus(corpus, labels, encoder, len(ids), names, lambda name: [columns[name]])
