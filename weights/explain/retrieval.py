"""Computes where the user's vector lies in a corpus, which posts are near it, and how the ranker orders them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from model.batch import collate
from model.inputs import Candidates, age_bucket
from model.ranker import Ranker
from model.retrieval.corpus import Corpus
from model.retrieval.towers import Towers
from weights.explain.request import Request

Array = NDArray[Any]
DRAWN_POSTS = 20_000
BINS = 100


@dataclass(frozen=True, slots=True)
class RetrievalFigures:
    """`posts` float32 `[d, 2]` and `user` `[2]`: in two principal components of the corpus; every n-th post of a large one is drawn.
    `topics` int32 `[d]`, indexing `topic_names`, -1 for none. `explained`: the share of variance in both components. `best`,
    `best_cosines` `[k]`: post ids as callers write them, best first, without those of the history; `near` `[k, 2]`: their
    places. `counts` over `edges`: histogram of all cosines. `final_ranks` `[k]`: ranks of the same posts by the ranker's
    score, from 1.
    """

    posts: Array
    user: Array
    topics: Array
    topic_names: tuple[str, ...]
    explained: float
    best: list[str]
    best_cosines: Array
    near: Array
    counts: Array
    edges: Array
    final_ranks: Array


@torch.inference_mode()
def retrieval_of(towers: Towers, corpus: Corpus, ranker: Ranker, request: Request, k: int = 200) -> RetrievalFigures:
    """Compute the figures for one request. The search is exhaustive: the product with every row."""
    context = request.context
    user = towers.encode_users([context.last(towers.config.history_length)])[0].numpy()
    shown = np.flatnonzero(~corpus.hidden)
    cosines = corpus.vectors[shown] @ user
    counts, edges = np.histogram(cosines, BINS)
    allowed = ~np.isin(corpus.post_ids[shown], context.post_ids)
    order = np.argsort(-np.where(allowed, cosines, -np.inf), kind="stable")[: min(k, int(allowed.sum()))]
    rows = shown[order]
    centre = corpus.vectors[shown].mean(0)
    values, axes = np.linalg.eigh(np.cov(corpus.vectors[shown].T))
    plane = axes[:, [-1, -2]]
    drawn = shown[:: -(-len(shown) // DRAWN_POSTS)]
    nothing = np.full(len(corpus), -1, np.int32)
    return RetrievalFigures(
        posts=(corpus.vectors[drawn] - centre) @ plane,
        user=(user - centre) @ plane,
        topics=(nothing if corpus.topics is None else corpus.topics)[drawn],
        topic_names=corpus.topic_names,
        explained=float(values[-2:].sum() / values.sum()),
        best=[post for post, _ in corpus.texts_of(rows)] or corpus.post_ids[rows].astype(str).tolist(),
        best_cosines=cosines[order],
        near=(corpus.vectors[rows] - centre) @ plane,
        counts=counts,
        edges=edges,
        final_ranks=_final_ranks(ranker, corpus, rows, request),
    )


def _final_ranks(ranker: Ranker, corpus: Corpus, rows: NDArray[np.int64], request: Request) -> Array:
    created = np.zeros(len(corpus), np.int64) if corpus.created_at is None else corpus.created_at
    ages = age_bucket(request.impression_ts, created[rows], ranker.config)
    posts = Candidates(corpus.post_ids[rows], corpus.author_ids[rows], np.zeros(len(rows), np.int64), ages)
    logits = ranker(collate([(request.context, posts)], ranker.config))[0][0]
    scores = torch.sigmoid(logits).double().numpy() @ request.weights
    ranks = np.empty(len(rows), np.int64)
    ranks[np.argsort(-scores, kind="stable")] = np.arange(1, len(rows) + 1)
    return ranks
