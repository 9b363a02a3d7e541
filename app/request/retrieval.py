"""A typed request for posts → checked columns and what the search is asked; its reply as bytes. Not for HTTP."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import numpy as np
import orjson
from msgspec import UNSET
from numpy.typing import NDArray

from app.errors import InvalidRequest
from app.interface import ServedRetrieval
from app.request import features, reply
from app.request.contract import MAX_ID, is_request_id
from app.request.explain import explain, retrieval_rule
from app.request.ids import read_ids
from app.request.posts_body import DEFAULT_K, RecommendBody, RetrieveBody
from app.request.strict_json import parse
from app.request.validate import Posts, Request, Viewer, viewer_of, wishes_of
from app.request.vocabulary import Vocabulary
from model.config import ModelConfig
from model.inputs import Ids
from model.retrieval.inputs import Filters, Query, Retrieved
from weights.format.manifest import Manifest

NO_IDS = np.empty(0, np.uint64)


@dataclass(frozen=True, slots=True)
class RetrievalRequest:
    """A valid request for posts. `ranker` is the same viewer in the ranker's words, with the `weights` (float64 `[A]`) and `wanted`
    columns of its reply, where the posts are to be ranked."""

    viewer: Viewer
    history_length: int
    k: int
    filters: Filters
    least: float
    impression_ts: int
    request_id: str | None
    ranker: Viewer | None = None
    weights: NDArray[np.float64] | None = None
    top_k: int | None = None
    wanted: list[int] | None = None

    def query(self, config: ModelConfig) -> Query:
        """What the search is asked. Raises InvalidRequest for nobody: without any valid token every post scores 0."""
        context = features.context_of(self.viewer, config)
        if context.user_id == 0 and not context.post_ids.any():
            raise InvalidRequest([("user_id", "is 0 and the history holds no post: nothing is known of this user")])
        return Query(context, self.k, self.filters, self.least)

    def without_history(self) -> RetrievalRequest:
        """All that the reply needs, so that neither a long history nor a long exclusion is kept twice while the request waits."""
        nothing = np.empty(0)
        viewer = Viewer(self.viewer.user_id, Posts(nothing, nothing, nothing), nothing, nothing)  # type: ignore[arg-type]
        return replace(self, viewer=viewer, ranker=None if self.ranker is None else viewer, filters=Filters(NO_IDS))

    def ranking(self, posts: Retrieved) -> Request:
        """The request to rank these posts, best first: the one that a caller would send who got them from /retrieve."""
        assert self.ranker is not None
        assert self.weights is not None
        surfaces = np.zeros(len(posts), np.int64)
        return Request(
            user_id=self.ranker.user_id,
            history_length=self.history_length,
            history=self.ranker.history,
            actions=self.ranker.actions,
            dwell_seconds=self.ranker.dwell_seconds,
            candidates=Posts(posts.post_ids, posts.author_ids, surfaces),
            created_at=posts.created_at,
            quoted=np.ones(len(posts), bool),
            impression_ts=self.impression_ts,
            weights=self.weights,
            top_k=min(self.top_k or len(posts), len(posts)),
            wanted=self.wanted,
            request_id=self.request_id,
        )


def check_retrieve(body: RetrieveBody, vocabulary: Vocabulary) -> RetrievalRequest:
    """Check what the types leave open. Raises InvalidRequest."""
    with suppress(ValueError, OverflowError, KeyError):
        return _checked(body, vocabulary)
    raise explain(parse(msgspec.json.encode(body)), retrieval_rule([vocabulary], ranks=False))


def check_recommend(body: RecommendBody, vocabularies: Sequence[Vocabulary]) -> RetrievalRequest:
    """The same in the words of both models: retrieval, then ranker. Raises InvalidRequest."""
    retrieval, ranker = vocabularies
    with suppress(ValueError, OverflowError, KeyError):
        checked = _checked(body, retrieval)
        weights, wanted = wishes_of(body.weights, body.actions_wanted, ranker)
        top_k = body.top_k or None
        if top_k is not None and top_k > MAX_ID:
            raise ValueError
        viewer = viewer_of(body.user_id, body.history, ranker)
        return RetrievalRequest(
            checked.viewer, checked.history_length, checked.k, checked.filters, checked.least, checked.impression_ts, checked.request_id,
            viewer, weights, top_k, wanted,
        )  # fmt: skip
    raise explain(parse(msgspec.json.encode(body)), retrieval_rule(vocabularies, ranks=True))


def _checked(body: RetrieveBody, vocabulary: Vocabulary) -> RetrievalRequest:
    """Raises ValueError, OverflowError or KeyError where the body is not right."""
    viewer = viewer_of(body.user_id, body.history, vocabulary)
    excluded = read_ids(body.exclude) if body.exclude else NO_IDS
    if body.exclude_history is not False:
        excluded = np.concatenate((excluded, viewer.history.post_ids))
    impression_ts, after = body.impression_ts or 0, None
    if body.max_age_seconds is not UNSET:
        if not impression_ts:
            raise ValueError
        after = impression_ts - body.max_age_seconds
    if body.request_id is not UNSET and not is_request_id(body.request_id):
        raise ValueError
    topics = None if body.topics is UNSET else tuple(body.topics)
    least = -np.inf if body.min_score is UNSET else body.min_score
    filters = Filters(excluded, topics, after)
    return RetrievalRequest(
        viewer, len(viewer.history), body.k or DEFAULT_K, filters, least, impression_ts, body.request_id or None
    )


def render(
    posts: Retrieved,
    request: RetrievalRequest,
    served: ServedRetrieval,
    *,
    history_used: int,
    timings_ms: dict[str, float],
) -> bytes:
    """The JSON reply of /retrieve. `timings_ms` is written as it is."""
    columns: list[tuple[bytes, list[bytes]]] = [
        (b'{"post_id":', reply.column(_texts(posts.post_ids))),
        (b',"author_id":', reply.column(_texts(posts.author_ids))),
        (b',"score":', reply.column(posts.scores)),
        (b',"rank":', reply.column(np.arange(1, len(posts) + 1))),
        (b',"created_at":', reply.column(posts.created_at)),
        (b',"topics":', [b"[]" if topic is None else orjson.dumps([topic]) for topic in posts.topics]),
    ]
    rows = reply.weave(columns, end=b"},")[:-1] if len(posts) else b""
    head = orjson.dumps({"model": _name_of(served.manifest), "corpus": corpus_of(served, posts)})
    tail = reply.tail_of(request, history_used, timings_ms, visible=posts.visible)
    return b'%b,"posts":[%b]%b' % (head[:-1], rows, tail)


def joined(posts: Retrieved, served: ServedRetrieval, ranker: Manifest) -> reply.Joined:
    """What the reply of /recommend adds to that of /rank."""
    models = {"retrieval": _name_of(served.manifest), "ranker": _name_of(ranker)}
    scores, ranks = (b',"retrieval_score":', posts.scores), (b',"retrieval_rank":', np.arange(1, len(posts) + 1))
    return reply.Joined(
        {"models": models, "corpus": corpus_of(served, posts)}, {"visible": posts.visible}, [scores, ranks]
    )


def _name_of(manifest: Manifest) -> dict[str, str]:
    return {"name": manifest.name, "version": manifest.version}


def corpus_of(served: ServedRetrieval, searched: Retrieved) -> dict[str, Any]:
    """What a reply says about the corpus, as it was when it was searched."""
    corpus = served.corpus
    return {"name": corpus.name, "version": corpus.version, "posts": searched.posts, "changes": searched.changes}


def _texts(ids: Ids) -> list[int | str]:
    """Ids as decimal strings, which every JSON reader keeps exactly."""
    return list(map(str, ids.tolist()))
