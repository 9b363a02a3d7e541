"""Small random towers and a corpus of theirs on disk, and requests for its posts. Not a test itself."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from starlette.testclient import TestClient
from torch import Tensor

from app.settings import Retrieval
from model.retrieval.corpus import packed
from model.retrieval.towers import Towers
from tests.support.random_models import random_model, retrieval_config
from weights.checkpoint import load_encoder, save_checkpoint
from weights.corpus.importer import encode
from weights.corpus.store import CorpusLabels, write_corpus
from weights.synthetic.random_weights import mini_config
from weights.text_ids import IdKind, text_ids

ACTIONS = ("favorite", "reply", "report")
POSTS = 300
TOPICS = ("sport", "news", "art")
NOW = 1_780_000_000


def towers(seed: int = 0, **changes: Any) -> Towers:
    """Two random towers with the fake ranker's actions and a window of eight."""
    small = {
        "width": 32,
        "layers": 1,
        "query_heads": 2,
        "kv_heads": 1,
        "head_width": 16,
        "history_length": 8,
        "actions": 3,
    }
    config = retrieval_config(mini_config(seed, (50, 401, 60)))
    made = random_model(type(config).from_dict(config.to_dict() | small | changes), seed)
    assert isinstance(made, Towers)
    return made


def columns(seed: int = 0) -> dict[str, np.ndarray[Any, Any]]:
    """Post ids from 1, some above 2^63; authors, times and topics. Post 7 comes twice."""
    rng = np.random.default_rng(seed)
    posts = np.arange(1, POSTS + 1, dtype=np.uint64)
    posts[100:120] += np.uint64(2**63)
    posts[50] = 7
    return {
        "post_ids": posts.view(np.int64),
        "author_ids": rng.integers(1, 40, POSTS),
        "created_at": NOW - rng.integers(0, 72 * 3600, POSTS),
        "topics": rng.integers(-1, len(TOPICS), POSTS).astype(np.int32),
    }


def written(
    directory: Path,
    seed: int = 0,
    version: str = "v1",
    leave_out: Iterable[str] = (),
    actions: Sequence[str] = ACTIONS,
    ids: IdKind = "uint64",
) -> tuple[Path, Path]:
    """The directories of a retrieval checkpoint and a corpus; with texts, post 9's is `post:9` and author 5's `author:5`."""
    names = f"towers-{version}", f"corpus-{version}"
    made = _made(seed, version, tuple(leave_out), tuple(actions), ids)
    for name in names:
        shutil.copytree(made / name, directory / name)
    return directory / names[0], directory / names[1]


@cache
def _made(seed: int, version: str, leave_out: tuple[str, ...], actions: tuple[str, ...], ids: IdKind) -> Path:
    """A directory with both, which is written once a process."""
    directory = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, directory)
    checkpoint, corpus = directory / f"towers-{version}", directory / f"corpus-{version}"
    made = towers(seed, actions=len(actions))
    save_checkpoint(checkpoint, made, name="towers", action_names=actions, version=version, ids=ids)
    encoder = load_encoder(checkpoint)
    values = {name: column for name, column in columns(seed).items() if name not in leave_out}
    width = 0
    if ids == "text":
        texts = [
            (f"post:{post}", f"author:{author}")
            for post, author in zip(values["post_ids"], values["author_ids"], strict=True)
        ]
        for place, name in enumerate(("post_ids", "author_ids")):
            values[name] = text_ids(pair[place] for pair in texts).view(np.int64)
        values["texts"] = packed(texts).copy()
        width = values["texts"].shape[2]
    vectors = encode(encoder, values["post_ids"].view(np.uint64), values["author_ids"].view(np.uint64))

    def pieces(name: str) -> list[Tensor]:
        return [vectors if name == "vectors" else torch.from_numpy(values[name])]

    topics = TOPICS if "topics" in values else ()
    write_corpus(
        corpus, CorpusLabels("posts", version), encoder, POSTS, list(values), pieces, lambda: topics, text_width=width
    )
    return directory


def setting(directory: Path, **options: Any) -> Retrieval:
    """The settings that serve what `written` writes."""
    checkpoint, corpus = written(directory, **options)
    return Retrieval(checkpoint=checkpoint, corpus=corpus)


EVENT = {"post_id": 17, "author_id": 5, "actions": ["favorite", "2"], "product_surface": 3, "dwell_time": 12.5}
ASKED: dict[str, Any] = {
    "user_id": "77",
    "history": [EVENT, {"post_id": "18", "author_id": 6, "actions": {"reply": 0.5}}],
}


def asked(**changes: Any) -> dict[str, Any]:
    """A valid request for posts; `...` takes a field out."""
    return {name: value for name, value in (ASKED | changes).items() if value is not ...}


def posts_of(client: TestClient, **changes: Any) -> list[dict[str, Any]]:
    """The posts that /retrieve returns for `asked(**changes)`."""
    reply = client.post("/retrieve", json=asked(**changes))
    assert reply.status_code == 200, reply.text
    posts: list[dict[str, Any]] = reply.json()["posts"]
    return posts
