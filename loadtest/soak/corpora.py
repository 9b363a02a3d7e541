"""Small corpora with their own towers, each with an oracle of what a search must return after any number of changes."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import torch
from torch import Tensor

from loadtest.generate.payload import post
from model.inputs import Context
from model.retrieval.engine import RetrievalEngine, RetrievalOptions
from model.retrieval.search import score_rows
from model.retrieval.towers import Towers
from weights.actions import STANDARD_ACTIONS
from weights.checkpoint import load_encoder, save_checkpoint
from weights.corpus.importer import encode
from weights.corpus.store import CorpusLabels, load_corpus, write_corpus
from weights.synthetic.random_weights import mini_config, random_model, retrieval_config

POSTS, USERS, K = 1500, 40, 20

Upserts = list[tuple[int, int]]
"""Post and author ids."""


@dataclass(frozen=True, slots=True)
class Edit:
    """One change of a corpus."""

    delete: list[int]
    upsert: Upserts

    def body(self) -> dict[str, Any]:
        """The body for `POST /admin/posts`."""
        return {
            "delete": self.delete,
            "upsert": [{"post_id": post_id, "author_id": author} for post_id, author in self.upsert],
        }


@dataclass
class Oracle:
    """One corpus with its expected answers. `name` is the version of corpus and towers. `edits`: all edits sent, in order."""

    name: str
    root: Path
    seed: int
    edits: list[Edit] = field(default_factory=list)
    live: dict[int, int] = field(default_factory=dict)
    """Post → author after all edits, in the order of equal scores."""
    _first: dict[int, int] = field(default_factory=dict)
    _rows: dict[int, np.ndarray[Any, Any]] = field(default_factory=dict)
    _replayed: int = 0

    def __post_init__(self) -> None:
        small = {"width": 32, "layers": 1, "query_heads": 2, "kv_heads": 1, "head_width": 16, "history_length": 8}
        shape = mini_config(self.seed, (50, 4001, 600))
        towers = random_model(retrieval_config(type(shape).from_dict(shape.to_dict() | small)), self.seed)
        assert isinstance(towers, Towers)
        save_checkpoint(self.towers, towers, name="towers", action_names=STANDARD_ACTIONS, version=self.name)
        self._encoder = load_encoder(self.towers)
        ids = np.arange(1, POSTS + 1, dtype=np.uint64)
        authors = np.random.default_rng(self.seed).integers(1, 600, POSTS).astype(np.uint64)
        columns = {"post_ids": ids.view(np.int64), "author_ids": authors.view(np.int64)}
        vectors = encode(self._encoder, ids, authors)

        def chunks(name: str) -> Iterable[Tensor]:
            return [vectors if name == "vectors" else torch.from_numpy(columns[name])]

        write_corpus(self.corpus, CorpusLabels("posts", self.name), self._encoder, POSTS, list(columns), chunks)
        self._first = dict(zip(ids.tolist(), authors.tolist(), strict=True))
        self.forget_after(0)
        self._rows = dict(zip(ids.tolist(), vectors.numpy(), strict=True))
        engine = RetrievalEngine(towers, load_corpus(self.corpus).corpus, RetrievalOptions(threads=1))
        self._users = engine.tower.encode([_context(user, towers.config.actions) for user in range(USERS)])
        engine.close()

    @property
    def settings(self) -> dict[str, object]:
        """Settings of a server that serves it."""
        return {"retrieval__checkpoint": self.towers, "retrieval__corpus": self.corpus}

    @property
    def towers(self) -> Path:
        """The retrieval checkpoint."""
        return self.root / f"towers-{self.name}"

    @property
    def corpus(self) -> Path:
        """The corpus directory."""
        return self.root / f"posts-{self.name}"

    def add(self, edit: Edit) -> None:
        """Record an edit that is about to be sent."""
        self.edits.append(edit)
        self._make_live(edit)

    def forget_after(self, edits: int) -> None:
        """Forget all but the first `edits` edits."""
        del self.edits[edits:]
        self.live = dict(self._first)
        for edit in self.edits:
            self._make_live(edit)

    def lose_half(self) -> None:
        """Cut each change log to half its length, as a crash without syncs would."""
        for log in self.corpus.glob("changes-*.log"):
            os.truncate(log, log.stat().st_size // 2)

    def _make_live(self, edit: Edit) -> None:
        for post_id in (*edit.delete, *(post_id for post_id, _ in edit.upsert)):
            self.live.pop(post_id, None)
        self.live |= dict(edit.upsert)

    def expected(self, user: int, edits: int) -> tuple[list[int], bytes]:
        """The best posts and their float32 scores after the first `edits` edits. Calls must not go back to fewer edits."""
        for edit in self.edits[self._replayed : edits]:
            for post_id in (*edit.delete, *(post_id for post_id, _ in edit.upsert)):
                self._rows.pop(post_id, None)
            if edit.upsert:
                ids, authors = (np.array(column, np.uint64) for column in zip(*edit.upsert, strict=True))
                self._rows |= dict(zip(ids.tolist(), encode(self._encoder, ids, authors).numpy(), strict=True))
        self._replayed = max(self._replayed, edits)
        seen = set(_history(user))
        ids = np.array([post_id for post_id in self._rows if post_id not in seen], np.uint64)
        rows = np.stack([vector for post_id, vector in self._rows.items() if post_id not in seen])
        scores = score_rows(torch.from_numpy(rows), torch.from_numpy(self._users[user])).numpy()
        order = np.lexsort((np.arange(len(ids)), -scores))[:K]
        return ids[order].tolist(), scores[order].tobytes()


@contextmanager
def corpora(*names: str) -> Iterator[dict[str, Oracle]]:
    """Corpora in one temporary directory, by name, each with other posts."""
    with tempfile.TemporaryDirectory() as directory:
        yield {name: Oracle(name, Path(directory), seed) for seed, name in enumerate(names)}


def _history(user: int) -> list[int]:
    return [1 + (user * 37 + event * 11) % POSTS for event in range(1 + user % 6)]


def _context(user: int, actions: int) -> Context:
    posts = np.array(_history(user), np.uint64)
    done = np.zeros((len(posts), actions), np.float32)
    done[:, STANDARD_ACTIONS.index("favorite")] = 1
    nothing = np.zeros(len(posts), np.int64)
    return Context(user + 1, posts, posts % np.uint64(50) + np.uint64(1), done, nothing, nothing.astype(np.float32))


def search_request(user: int, path: str) -> bytes:
    """A user's request to `/retrieve` or `/recommend`, as bytes ready to send."""
    past = _history(user)
    history = {
        "post_id": past,
        "author_id": [post_id % 50 + 1 for post_id in past],
        "actions": [["favorite"]] * len(past),
    }
    return post("localhost", path, orjson.dumps({"user_id": user + 1, "history": history, "k": K}))
