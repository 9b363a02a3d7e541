"""A request for posts → checked columns and what the search is asked; its reply as bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import orjson
from numpy.typing import NDArray

from app.errors import InvalidRequest, ServiceError
from app.request import features, reply
from app.request.body import Body, decode_posts, retrieval_rule
from app.request.codec import Viewed
from app.request.ids import echo_of, read_ids
from app.request.rules import check
from app.request.validate import NO_HISTORY, Posts, Request, viewer_of, wishes_of
from app.request.vocabulary import Vocabulary
from app.settings import Limits
from model.config import ModelConfig
from model.inputs import Candidates, Context, Ids, age_bucket, created_within
from model.retrieval.inputs import Filters, Query, Retrieved
from weights.corpus.manifest import CorpusManifest
from weights.format.manifest import Manifest

NO_IDS = np.empty(0, np.uint64)


class Reading(NamedTuple):
    """How one model reads a request."""

    vocabulary: Vocabulary
    config: ModelConfig

    def reads_as(self, other: Reading) -> bool:
        """Whether both models read any user and history the same way."""
        ours, theirs = self.vocabulary, other.vocabulary
        return (
            ours.ids == theirs.ids
            and ours.action_names == theirs.action_names
            and ours.product_surfaces == theirs.product_surfaces
            and self.config.history_length == other.config.history_length
        )


Models = Sequence[Reading]
"""The retrieval model, then the ranker if the posts are to be ranked."""


@dataclass(slots=True, eq=False)
class PostsRequest:
    """A valid request for posts. Where they are to be ranked: `context`, what the ranker reads of the user, and `weights` (float64
    `[A]`), `top_k` and the `wanted` columns of its reply.

    If `handle` names a context, the contexts in here are empty, and with `excludes_history` the posts of that context's history must
    still be excluded."""

    query: Query
    history_length: int
    impression_ts: int
    request_id: str | None
    context: Context | None = None
    weights: NDArray[np.float64] | None = None
    top_k: int | None = None
    wanted: list[int] | None = None
    has_offset: bool = False
    handle: str | None = None
    excludes_history: bool = False

    @property
    def user_id(self) -> int:
        """The user that the posts are for."""
        return self.query.context.user_id

    @property
    def posts(self) -> int:
        """How many posts to retrieve."""
        return self.query.k

    def candidates(self, posts: Retrieved, config: ModelConfig) -> Candidates:
        """These posts as the ranker reads them: what `features.candidates_of` makes of `ranking`."""
        ages = age_bucket(self.impression_ts, posts.created_at, config)
        return Candidates(posts.post_ids, posts.author_ids, np.zeros(len(posts.post_ids), np.int64), ages)

    def ranking(self, posts: Retrieved) -> Request:
        """The request to rank these posts, best first, as a caller would send it after /retrieve."""
        assert self.weights is not None
        count = len(posts.post_ids)
        sent = [post for post, _ in posts.texts] if posts.texts else list(map(str, posts.post_ids.tolist()))
        return Request(
            self.user_id,
            *NO_HISTORY,
            self.history_length,
            Posts(posts.post_ids, posts.author_ids, np.zeros(count, np.int64), echo_of(sent) if sent else None),
            self.weights,
            min(self.top_k or count, count),
            self.wanted,
            self.request_id,
            has_offset=self.has_offset,
            numbers={"created_at": posts.created_at},
            impression_ts=self.impression_ts,
        )


def read_posts(body: bytes | bytearray, limits: Limits, models: Models) -> PostsRequest | Body:
    """The request, or where the codec declines it the body, which is still to be checked. Raises MalformedJson or TooLarge."""
    return read_compiled(body, limits, models) or decode_posts(body, limits)


def check_posts(asked: PostsRequest | Body, models: Models) -> PostsRequest:
    """The request in every model's vocabulary. Raises InvalidRequest."""
    if isinstance(asked, PostsRequest):
        return asked
    check(asked.value, retrieval_rule([model.vocabulary for model in models]))
    viewers = [viewer_of(asked.value, model.vocabulary) for model in models]
    contexts = [features.context_of(viewer, model.config) for viewer, model in zip(viewers, models, strict=True)]
    return _request_of(asked.value, contexts, viewers[0].history.post_ids, models)


def read_compiled(body: bytes | bytearray, limits: Limits, models: Models) -> PostsRequest | None:
    """The request as the codec reads it; None if the codec declines it or it is invalid."""
    viewers: list[Viewed] = []
    for model in models:
        codec = model.vocabulary.codec
        if viewers and model.reads_as(models[0]):
            viewers.append(viewers[0])
        elif codec is None or (viewer := codec.read_viewer(body)) is None:
            return None
        else:
            viewers.append(viewer)
    first = viewers[0]
    try:
        wishes = decode_posts(first.rest, limits).value
        check(wishes, retrieval_rule([model.vocabulary for model in models], "user_id", "history"))
        return _request_of(wishes, [viewer.context for viewer in viewers], first.posts, models)
    except ServiceError:
        return None


def _request_of(wishes: Mapping[str, Any], contexts: Sequence[Context], history: Ids, models: Models) -> PostsRequest:
    """Make the request from valid wishes, each model's context and the history's post ids. Raises InvalidRequest for user 0 without
    history: with no valid token every post scores 0."""
    handle = wishes.get("context")
    if handle is None and contexts[0].user_id == 0 and not contexts[0].post_ids.any():
        raise InvalidRequest([("user_id", "is 0 and the history has no posts, so nothing is known about this user")])
    excluded = read_ids(wishes["exclude"], models[0].vocabulary.ids) if wishes.get("exclude") else NO_IDS
    excludes_history = wishes.get("exclude_history", True)
    if excludes_history and handle is None:
        excluded = np.concatenate((excluded, history)) if len(excluded) else history
    impression_ts, age = wishes.get("impression_ts", 0), wishes.get("max_age_seconds")
    topics = tuple(wishes["topics"]) if "topics" in wishes else None
    created = (None, None) if age is None else created_within(impression_ts, age)
    filters = Filters(excluded, topics, *created)
    query = Query(contexts[0], wishes["k"], filters, float(wishes.get("min_score", -np.inf)))
    request = PostsRequest(query, len(history), impression_ts, wishes.get("request_id"), handle=handle)
    request.excludes_history = excludes_history and handle is not None
    if len(models) > 1:
        request.context = contexts[1]
        ranking = wishes_of(wishes, models[1].vocabulary)
        request.weights, request.top_k, request.wanted = ranking.weights, ranking.top_k, ranking.wanted
        request.has_offset = ranking.has_offset
    return request


def render(
    posts: Retrieved,
    request: PostsRequest,
    manifest: Manifest,
    corpus: CorpusManifest,
    *,
    history_used: int,
    timings_ms: dict[str, float],
) -> bytes:
    """The JSON reply of /retrieve. `timings_ms` is written as it is."""
    topics = {topic: b"[]" if topic is None else orjson.dumps([topic]) for topic in posts.topics}
    ids, authors = zip(*posts.texts, strict=True) if posts.texts else (posts.post_ids, posts.author_ids)
    columns: list[tuple[bytes, list[bytes]]] = [  # ids are strings, which every JSON reader keeps exactly
        (b'{"post_id":"', reply.column(ids)),
        (b'","author_id":"', reply.column(authors)),
        (b'","score":', reply.column(posts.scores)),
        (b',"rank":', reply.column(np.arange(1, len(posts) + 1))),
        (b',"created_at":', reply.column(posts.created_at)),
        (b',"topics":', [topics[topic] for topic in posts.topics]),
    ]
    rows = reply.weave(columns, end=b"},")[:-1] if len(posts) else b""
    head = orjson.dumps({"model": _name_of(manifest), "corpus": corpus_of(corpus, posts)})
    tail = reply.tail_of(request, history_used, timings_ms, visible=posts.visible)
    return b'%b,"posts":[%b]%b' % (head[:-1], rows, tail)


def joined(
    posts: Retrieved, manifest: Manifest, corpus: CorpusManifest, ranker: Manifest, names: Sequence[str]
) -> reply.Joined:
    """What the reply of /recommend adds to that of /rank. `names`: of the actions in it."""
    models = {"retrieval": _name_of(manifest), "ranker": _name_of(ranker)}
    head = reply.head_of(names, models=models, corpus=corpus_of(corpus, posts))
    return reply.Joined(head, {"visible": posts.visible}, posts.scores)


def _name_of(manifest: Manifest) -> dict[str, str]:
    return {"name": manifest.name, "version": manifest.version}


def corpus_of(corpus: CorpusManifest, searched: Retrieved) -> dict[str, Any]:
    """The reply's description of the corpus, as it was when it was searched."""
    said = {"name": corpus.name, "version": corpus.version, "posts": searched.posts, "changes": searched.changes}
    return said | {"sequence": searched.mark.sequence}
