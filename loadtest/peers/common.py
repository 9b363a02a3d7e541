"""Shared by all peers: the request as pydantic models, the model, the reply as a dict. No HTTP."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from pydantic import BaseModel

from model.batch import collate
from model.create import EngineOptions, create_engine
from model.engine import Item
from model.inputs import Candidates, Context, Scores, age_bucket
from weights.actions import weight_vector
from weights.checkpoint import load_checkpoint


class History(BaseModel):
    """Past events as arrays."""

    post_id: list[int] = []
    author_id: list[int] = []
    actions: list[list[str]] = []
    product_surface: list[int] = []
    dwell_time: list[float] = []


class Posts(BaseModel):
    """Candidates as arrays."""

    post_id: list[int]
    author_id: list[int]
    product_surface: list[int]
    created_at: list[int]


class RankBody(BaseModel):
    """The part of the contract that the peers' traffic uses: arrays."""

    user_id: str
    history: History
    candidates: Posts
    impression_ts: int


class PeerModel:
    """A checkpoint and its scoring. PEER_ENGINE `dense`: the plain definition on one padded batch; `auto`: this project's engine.

    Settings come from the environment, because each stack starts its own processes: PEER_CHECKPOINT, PEER_ENGINE,
    PEER_DTYPE, PEER_THREADS.
    """

    def __init__(self) -> None:
        checkpoint = load_checkpoint(Path(os.environ["PEER_CHECKPOINT"]))
        self.manifest, self._ranker = checkpoint.manifest, checkpoint.ranker
        self.config = checkpoint.manifest.config
        is_half = os.environ["PEER_DTYPE"] == "bfloat16"
        self._dtype: Literal["bfloat16", "float32"] = "bfloat16" if is_half else "float32"
        self._lock = threading.Lock()
        threads = int(os.environ["PEER_THREADS"])
        torch.set_num_threads(threads)
        self._engine = None
        if os.environ["PEER_ENGINE"] == "auto":
            options = EngineOptions(device="cpu", dtype=self._dtype, threads=threads, cache_bytes=0)
            self._engine = create_engine(self._ranker, options)
            self._engine.warm_up()
        names = self.manifest.action_names
        self._columns = {str(index): index for index in range(len(names))} | {name: i for i, name in enumerate(names)}
        self._weights = weight_vector(self.manifest.score_weights, names)

    def features(self, body: RankBody) -> tuple[Context, Candidates]:
        """A request as the model's inputs."""
        history, posts = body.history, body.candidates
        newest = slice(max(0, len(history.post_id) - self.config.history_length), None)
        past = [np.array(ids[newest], np.uint64) for ids in (history.post_id, history.author_id)]
        actions = np.zeros((len(past[0]), self.config.actions), np.float32)
        for row, names in enumerate(history.actions[newest]):
            actions[row, [self._columns[name] for name in names]] = 1.0
        surfaces, dwell = (
            np.array(history.product_surface[newest], np.int64),
            np.array(history.dwell_time[newest], np.float32),
        )
        shown, authors = (np.array(ids, np.uint64) for ids in (posts.post_id, posts.author_id))
        ages = age_bucket(body.impression_ts, np.array(posts.created_at, np.int64), self.config)
        candidates = Candidates(shown, authors, np.array(posts.product_surface, np.int64), ages)
        return Context(int(body.user_id), past[0], past[1], actions, surfaces, dwell), candidates

    def score(self, requests: Sequence[tuple[Context, Candidates]]) -> list[Scores]:
        """Score a batch. Takes one caller at a time, since two forwards at once would only share the same cores."""
        with self._lock:
            if self._engine is not None:
                outcomes = self._engine.forward([Item(context, candidates) for context, candidates in requests])
                return [outcome.scores for outcome in outcomes]
            return self._dense(requests)

    @torch.inference_mode()
    def _dense(self, requests: Sequence[tuple[Context, Candidates]]) -> list[Scores]:
        batch = collate(requests, self.config, "shared")
        logits, continuous = self._ranker(batch, getattr(torch, self._dtype))
        outputs = (logits, torch.sigmoid(logits), continuous)
        counts = [len(candidates) for _, candidates in requests]
        return [Scores(*(tensor[row, :count].numpy() for tensor in outputs)) for row, count in enumerate(counts)]

    def reply(self, posts: Sequence[int], scores: Scores) -> dict[str, Any]:
        """The reply of the contract, without fields that only this project's server knows."""
        combined = scores.probabilities.astype(np.float64) @ self._weights
        ranks = np.empty(len(combined), np.int64)
        ranks[np.argsort(-combined, kind="stable")] = np.arange(1, len(combined) + 1)
        columns = (posts, combined.tolist(), ranks.tolist(), scores.probabilities.tolist(), scores.continuous.tolist())
        names = ("post_id", "score", "rank", "probabilities", "continuous")
        return {
            "model": {"name": self.manifest.name, "version": self.manifest.version},
            "actions": list(self.manifest.action_names),
            "candidates": [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)],
        }

    def rank(self, body: RankBody) -> dict[str, Any]:
        """Answer one request."""
        context, candidates = self.features(body)
        return self.reply(candidates.post_ids.tolist(), self.score([(context, candidates)])[0])
