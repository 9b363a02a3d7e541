"""A typed request for posts → checked columns and what the search is asked; its reply as bytes. Not for HTTP."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec
import numpy as np
import orjson
from msgspec import UNSET
from numpy.typing import NDArray

from app.errors import InvalidRequest, ServiceError
from app.request import features, reply
from app.request.body import check_cost, decode_posts, refuse_many, retrieval_rule
from app.request.codec import Viewed
from app.request.explain import explain
from app.request.ids import MAX_ID, read_ids
from app.request.schema import DEFAULT_K, RecommendRequest, RetrieveRequest, is_request_id, rest_of
from app.request.strict_json import parse, refuse_duplicates
from app.request.validate import NO_POSTS, NOTHING, Posts, Request, viewer_of, wishes_of
from app.request.vocabulary import Vocabulary
from app.settings import Limits
from model.config import ModelConfig
from model.inputs import Candidates, Context, Ids, age_bucket
from model.retrieval.inputs import Filters, Query, Retrieved
from weights.corpus.manifest import CorpusManifest
from weights.format.manifest import Manifest

NO_IDS = np.empty(0, np.uint64)
_WISHES: list[Any] = [
    msgspec.json.Decoder(rest_of(request, "user_id", "history")) for request in (RetrieveRequest, RecommendRequest)
]


class Reading(NamedTuple):
    """How one model reads a request."""

    vocabulary: Vocabulary
    config: ModelConfig

    def reads_as(self, other: Reading) -> bool:
        """Whether both make the same of any user and history."""
        ours, theirs = self.vocabulary, other.vocabulary
        return (
            ours.action_names == theirs.action_names
            and ours.product_surfaces == theirs.product_surfaces
            and self.config.history_length == other.config.history_length
        )


Models = Sequence[Reading]
"""The retrieval model, and the ranker where the posts are to be ranked."""


@dataclass(slots=True, eq=False)
class PostsRequest:
    """A valid request for posts. Where they are to be ranked: `context`, what the ranker reads of the user, and `weights` (float64
    `[A]`), `top_k` and the `wanted` columns of its reply."""

    query: Query
    history_length: int
    impression_ts: int
    request_id: str | None
    context: Context | None = None
    weights: NDArray[np.float64] | None = None
    top_k: int | None = None
    wanted: list[int] | None = None

    def candidates(self, posts: Retrieved, config: ModelConfig) -> Candidates:
        """These posts as the ranker reads them: what `features.candidates_of` makes of `ranking`."""
        ages = age_bucket(self.impression_ts, posts.created_at, config)
        return Candidates(posts.post_ids, posts.author_ids, np.zeros(len(posts), np.int64), ages)

    def ranking(self, posts: Retrieved) -> Request:
        """The request to rank these posts, best first: the one that a caller would send who got them from /retrieve."""
        assert self.weights is not None
        return Request(
            user_id=self.query.context.user_id,
            history_length=self.history_length,
            history=NO_POSTS,
            actions=NOTHING,
            dwell_seconds=NOTHING,
            candidates=Posts(posts.post_ids, posts.author_ids, np.zeros(len(posts), np.int64)),
            numbers={"created_at": posts.created_at},
            quoted=np.ones(len(posts), bool),
            impression_ts=self.impression_ts,
            weights=self.weights,
            top_k=min(self.top_k or len(posts), len(posts)),
            wanted=self.wanted,
            request_id=self.request_id,
        )


def read_posts(body: bytes | bytearray, limits: Limits, models: Models) -> PostsRequest | RetrieveRequest:
    """The request, or where the codec declines it the typed body, which is still to be checked. Raises as `decode_posts`."""
    found = read_compiled(body, limits, models)
    return decode_posts(body, limits, [model.vocabulary for model in models]) if found is None else found


def work_of(asked: PostsRequest | RetrieveRequest) -> tuple[int, int]:
    """How many posts it asks for, and items of its history."""
    if isinstance(asked, PostsRequest):
        return asked.query.k, asked.history_length
    return asked.k or DEFAULT_K, asked.count("history")


def user_of(asked: PostsRequest | RetrieveRequest) -> int | str:
    """As it was sent: it may still be none."""
    return asked.query.context.user_id if isinstance(asked, PostsRequest) else asked.user_id


def check_posts(asked: PostsRequest | RetrieveRequest, models: Models) -> PostsRequest:
    """Check what the types leave open, in the words of all models. Raises InvalidRequest."""
    if isinstance(asked, PostsRequest):
        return asked
    with suppress(ValueError, OverflowError, KeyError):
        viewers = [viewer_of(asked.user_id, asked.history, model.vocabulary) for model in models]
        contexts = [features.context_of(viewer, model.config) for viewer, model in zip(viewers, models, strict=True)]
        return _checked(asked, contexts, viewers[0].history.post_ids, models)
    vocabularies = [model.vocabulary for model in models]
    raise explain(parse(msgspec.json.encode(asked)), retrieval_rule(vocabularies))


def read_compiled(body: bytes | bytearray, limits: Limits, models: Models) -> PostsRequest | None:
    """What the codec makes of it; None for what it declines, and for what is not valid."""
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
        check_cost(first.rest, limits.max_values)
        wishes = _WISHES[len(models) > 1].decode(first.rest)
        refuse_duplicates(first.rest, msgspec.json.encode(wishes))
        refuse_many(wishes, len(first.posts), limits)
        return _checked(wishes, [viewer.context for viewer in viewers], first.posts, models)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, ServiceError, ValueError, OverflowError, KeyError):
        return None


def _checked(wishes: Any, contexts: Sequence[Context], history: Ids, models: Models) -> PostsRequest:
    """Of a valid user and a valid history. Raises ValueError, OverflowError or KeyError where the rest is not right, and InvalidRequest
    for nobody: without any valid token every post scores 0."""
    excluded = read_ids(wishes.exclude) if wishes.exclude else NO_IDS
    if wishes.exclude_history is not False:
        excluded = np.concatenate((excluded, history)) if len(excluded) else history
    impression_ts, after = wishes.impression_ts or 0, None
    if wishes.max_age_seconds is not UNSET:
        if not impression_ts:
            raise ValueError
        after = impression_ts - wishes.max_age_seconds
    if wishes.request_id is not UNSET and not is_request_id(wishes.request_id):
        raise ValueError
    topics = None if wishes.topics is UNSET else tuple(wishes.topics)
    least = -np.inf if wishes.min_score is UNSET else wishes.min_score
    ranking: dict[str, Any] = {}
    if len(models) > 1:
        weights, wanted = wishes_of(wishes.weights, wishes.actions_wanted, models[1].vocabulary)
        top_k = wishes.top_k or None
        if top_k is not None and top_k > MAX_ID:
            raise ValueError
        ranking = {"context": contexts[1], "weights": weights, "top_k": top_k, "wanted": wanted}
    if contexts[0].user_id == 0 and not contexts[0].post_ids.any():
        raise InvalidRequest([("user_id", "is 0 and the history holds no post: nothing is known of this user")])
    query = Query(contexts[0], wishes.k or DEFAULT_K, Filters(excluded, topics, after), least)
    return PostsRequest(query, len(history), impression_ts, wishes.request_id or None, **ranking)


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
    columns: list[tuple[bytes, list[bytes]]] = [  # ids are text, which every JSON reader keeps exactly
        (b'{"post_id":"', reply.column(posts.post_ids)),
        (b'","author_id":"', reply.column(posts.author_ids)),
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
    """What a reply says about the corpus, as it was when it was searched."""
    return {"name": corpus.name, "version": corpus.version, "posts": searched.posts, "changes": searched.changes}
