"""Posts of a corpus for a user over HTTP: found by `/retrieve`, found and then ranked by `/recommend`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import orjson
from fastapi import APIRouter
from msgspec import UNSET
from msgspec.json import Decoder
from numpy.typing import NDArray
from starlette.datastructures import State
from starlette.requests import Request
from starlette.responses import Response

from app import columns, replies, schema
from app.api.caller import Caller, CallerInfo, cancelled_with
from app.api.rank import JSON, CheckedRequest, admitted, note
from app.api.route import Route
from app.columns import Vocabulary, Wishes
from app.errors import (
    CorpusBehind,
    CorpusNotLoaded,
    Draining,
    EngineDown,
    InvalidRequest,
    NoCorpus,
    NotReady,
    TooLarge,
)
from app.interface import Corpus, Found, Job, Ranked, Ranker, ServedCorpus, ServedModel
from app.replies import Placement
from app.schema import DEFAULT_K, PROBLEMS, RecommendReply, RecommendRequest, RetrieveReply, RetrieveRequest
from app.settings import Deadline, Limits
from model.config import ModelConfig
from model.inputs import Candidates, Context, Scores, age_bucket, codes_fitting, created_within
from model.retrieval.inputs import AT_LEAST, Filters, Query, Retrieved
from weights.format.manifest import Manifest

RETRIEVE, RECOMMEND = Decoder(RetrieveRequest), Decoder(RecommendRequest)
AT_LEAST_HEADER, VERSION_HEADER = "X-Corpus-At-Least", "X-Corpus-Version"
HEADERS = {
    AT_LEAST_HEADER: "A change that the corpus must already have, by its sequence or its position in the feed; otherwise 503."
}
NO_CORPUS = PROBLEMS | schema.problems_of(NoCorpus, NotReady, Draining, EngineDown, CorpusNotLoaded, CorpusBehind)
NOBODY = "is 0 and the history has no posts, so nothing is known about this user"

router = APIRouter(tags=["retrieval"], route_class=Route)


@router.post(
    "/retrieve",
    openapi_extra=schema.body_of(RetrieveRequest, HEADERS),
    response_class=Response,
    responses=schema.reply_of(RetrieveReply, "The best posts.") | NO_CORPUS,
)
async def retrieve(request: Request, caller: Caller) -> Response:
    """Find the best posts of the corpus for one user. A post's score depends only on the user, the history and the post."""
    state, exchange = request.app.state, caller.exchange
    corpus: Corpus = state.ranker.corpus
    served = corpus.served
    vocabulary: Vocabulary = state.vocabularies.of(served.manifest)
    with exchange.measured("parse"):
        asked = schema.read(RETRIEVE, caller.body, state.settings.limits, vocabulary.index)
        query = _query(asked, _at_least(caller), vocabulary, served.manifest.config, state.settings.limits)
        note(state, exchange, query.context, _request_id(asked))
    exchange.candidates, exchange.history = query.k, asked.sizes()["history"]
    search = corpus.search(served, query, _deadline(state, caller), caller.key, leaves_at=caller.leaves_at)
    found = await cancelled_with(request, search)
    _count(caller, found)
    with exchange.measured("serialize"):
        body = _reply(asked, found, served, replies.timings_of(exchange.stages))
    fields = replies.headers(served.manifest.version, "hit" if found.posts.cached else "miss", exchange)
    return Response(body, media_type=JSON, headers=fields | {VERSION_HEADER: _label(served, found)})


@router.post(
    "/recommend",
    openapi_extra=schema.body_of(RecommendRequest, HEADERS),
    response_class=Response,
    responses=schema.reply_of(RecommendReply, "The best posts, ranked.") | NO_CORPUS,
)
async def recommend(request: Request, caller: Caller) -> Response:
    """Find posts as `/retrieve` does and rank them as `/rank` does, in one call. The scores have the same bits as from the two calls."""
    state, exchange = request.app.state, caller.exchange
    ranker: Ranker = state.ranker
    model, served = ranker.model(), ranker.corpus.served
    if served.manifest.ids != model.manifest.ids:
        raise NoCorpus("The posts cannot be ranked: the corpus has ids of another kind than the ranking model.")
    caller = replace(caller, deadline=_deadline(state, caller))  # one for both stages
    with exchange.measured("parse"):
        asked = schema.read(RECOMMEND, caller.body, state.settings.limits, state.vocabularies.of(model.manifest).index)
    exchange.candidates, exchange.history = _k(asked, state.settings.limits), asked.sizes()["history"]
    # Before the search: a request that the ranker would refuse costs none, and one that is admitted ends even in a drain.
    with admitted(state, caller, model, candidates=exchange.candidates, history=exchange.history) as job:
        with exchange.measured("parse"):
            work = _recommendation(state, caller, asked, model, served)
        found, ranked, wishes = await cancelled_with(request, _ranked(ranker, caller, job, work))
    exchange.scored.append((work.vocabulary.action_names, ranked.scores.probabilities))
    with exchange.measured("serialize"):
        candidates = _candidates(work, found.posts)
        placement = replies.placement_of(candidates, ranked.scores, wishes, work.vocabulary)
        body = _recommended(work, found, ranked, placement, wishes, replies.timings_of(exchange.stages))
        if state.served is not None and len(candidates):
            checked = CheckedRequest(
                model,
                work.vocabulary,
                work.context,
                candidates,
                post_ids=(),
                wishes=wishes,
                impression_ts=asked.impression_ts,
                created_at=found.posts.created_at,
                endpoint="/recommend",
            )
            state.served.record(checked, ranked, placement, exchange.key)
    fields = replies.headers_of(model, ranked, exchange)
    return Response(body, media_type=JSON, headers=fields | {VERSION_HEADER: _label(served, found)})


class Recommendation(NamedTuple):
    """A request for ranked posts that has been checked against both checkpoints. `vocabulary`: of the ranking model; `context`: what it
    reads of the user, or its handle."""

    asked: RecommendRequest
    served: ServedCorpus
    query: Query
    vocabulary: Vocabulary
    config: ModelConfig
    context: Context | str
    wishes: Wishes


def _recommendation(
    state: State, caller: CallerInfo, asked: RecommendRequest, model: ServedModel, served: ServedCorpus
) -> Recommendation:
    """Check a request against both checkpoints. Raises InvalidRequest."""
    ours, theirs = model.manifest, served.manifest
    vocabulary: Vocabulary = state.vocabularies.of(ours)
    query = _query(asked, _at_least(caller), state.vocabularies.of(theirs), theirs.config, state.settings.limits)
    context: Context | str = query.handle
    if not query.handle:
        context = query.context if _read_alike(ours, theirs) else columns.context_of(asked, vocabulary, ours.config)
    wishes = columns.wishes_of(asked, vocabulary)
    note(state, caller.exchange, context, wishes.request_id)
    wishes.name = wishes.request_id or caller.exchange.request_id
    if wishes.warnings:
        state.vocabularies.log_once(vocabulary, wishes.warnings)
    return Recommendation(asked, served, query, vocabulary, ours.config, context, wishes)


def _read_alike(ours: Manifest, theirs: Manifest) -> bool:
    """Whether both checkpoints read any user and history the same way."""
    return _reading(ours) == _reading(theirs)


def _reading(manifest: Manifest) -> tuple[object, ...]:
    config = manifest.config
    codes = config.code_levels, config.code_values
    return manifest.action_names, config.product_surfaces, config.history_length, codes


async def _ranked(ranker: Ranker, caller: CallerInfo, job: Job, work: Recommendation) -> tuple[Found, Ranked, Wishes]:
    """Find the posts and rank them, best first."""
    assert caller.deadline is not None
    await ranker.reserve(job)
    found = await ranker.corpus.search(work.served, work.query, caller.deadline, caller.key, is_admitted=True)
    _count(caller, found)
    posts, count, stages = found.posts, len(found.posts), caller.exchange.stages
    wishes = replace(work.wishes, top_k=min(work.wishes.top_k or count, count))
    if not count:
        ranked = _nothing(found, work)
    else:
        ranked = await ranker.rank(job, work.context, _candidates(work, posts))
    stages["queue"] += ranked.queue_seconds
    stages["forward"] = ranked.forward_seconds
    return found, ranked, wishes


def _candidates(work: Recommendation, posts: Retrieved) -> Candidates:
    """The posts as the ranking model reads them."""
    ages = age_bucket(work.asked.impression_ts, posts.created_at, work.config)
    codes = codes_fitting(posts.codes, len(posts), work.config)
    return Candidates(posts.post_ids, posts.author_ids, np.zeros(len(posts), np.int64), ages, codes=codes)


def _nothing(found: Found, work: Recommendation) -> Ranked:
    """The ranking of no posts, which takes no time."""
    actions, outputs = work.config.actions, work.config.continuous_actions
    scores = Scores(*(np.empty((0, width), np.float32) for width in (actions, actions, outputs)))
    events = found.history_used + found.history_dropped
    used = min(events, work.config.history_length)
    return Ranked(scores, "miss", 0.0, 0.0, work.query.handle, used, events - used)


# --- What both endpoints share ---------------------------------------------------------------------------------------------------------


def _k(asked: RetrieveRequest, limits: Limits) -> int:
    """How many posts to find at most. Raises TooLarge."""
    k = min(DEFAULT_K, limits.max_retrieved) if asked.k is UNSET else asked.k
    if k > limits.max_retrieved:
        raise TooLarge(f"k: at most {limits.max_retrieved} posts are retrieved.")
    return k


def _query(asked: RetrieveRequest, at_least: str, vocabulary: Vocabulary, config: ModelConfig, limits: Limits) -> Query:
    """What the search is asked. Raises InvalidRequest, also where nothing is known of the user: then every post would score 0; TooLarge."""
    k, context = _k(asked, limits), columns.context_of(asked, vocabulary, config)
    handle = "" if asked.context is UNSET else asked.context
    if not handle and not context.user_id and not context.post_ids.any():
        raise InvalidRequest("user_id", NOBODY)
    excluded = columns.ids_of(asked.exclude, vocabulary.ids, "exclude")
    if asked.exclude_history and not handle:
        excluded = np.concatenate((excluded, _history_ids(asked, context, vocabulary)))
    first, last = None, None
    if asked.max_age_seconds is not UNSET:
        first, last = created_within(asked.impression_ts, asked.max_age_seconds)
    topics = None if asked.topics is UNSET else tuple(asked.topics)
    return Query(
        context,
        k,
        Filters(excluded, topics, first, last),
        -np.inf if asked.min_score is UNSET else asked.min_score,
        at_least,
        handle,
        excludes_history=asked.exclude_history and bool(handle),
    )


def _history_ids(asked: RetrieveRequest, context: Context, vocabulary: Vocabulary) -> NDArray[np.uint64]:
    """The posts of the whole history, those beyond the model's window included."""
    if not context.dropped:
        return context.post_ids
    return columns.ids_of(columns.sent_history_ids(asked), vocabulary.ids, "history.post_id")


def _at_least(caller: CallerInfo) -> str:
    """The change that the corpus must have had: a sequence, or a position of the feed; "" for any. Raises InvalidRequest."""
    sent = caller.headers.get(AT_LEAST_HEADER.lower().encode(), b"").decode("latin-1")
    if sent and not AT_LEAST.fullmatch(sent):
        message = "must be a sequence or a position of the feed, such as 12 or 1764000000000-0"
        raise InvalidRequest(AT_LEAST_HEADER, message)
    return sent


def _deadline(state: State, caller: CallerInfo) -> float:
    settings: Deadline = state.settings.deadline
    now: float = state.ranker.clock()
    return min(
        now + settings.default_seconds if caller.deadline is None else caller.deadline, now + settings.max_seconds
    )


def _request_id(asked: RetrieveRequest) -> str | None:
    return None if asked.request_id is UNSET else asked.request_id


def _count(caller: CallerInfo, found: Found) -> None:
    """Note where a search's time went."""
    caller.exchange.stages |= {
        "queue": found.queue_seconds,
        "encode": found.encode_seconds,
        "search": found.search_seconds,
    }


# --- Replies ---------------------------------------------------------------------------------------------------------------------------


def _reply(asked: RetrieveRequest, found: Found, served: ServedCorpus, timings_ms: dict[str, float]) -> bytes:
    """The reply of /retrieve: ids are strings, which every JSON reader keeps exactly."""
    posts = found.posts
    topics = {topic: b"[]" if topic is None else orjson.dumps([topic]) for topic in posts.topics}
    ids, authors = zip(*posts.texts, strict=True) if posts.texts else (posts.post_ids, posts.author_ids)
    rows = b""
    if len(posts):
        codes = orjson.dumps(posts.codes, option=orjson.OPT_SERIALIZE_NUMPY)[1:-1] if posts.codes.any() else b""
        woven = replies.weave(
            [
                (b'{"post_id":"', replies.column(ids)),
                (b'","author_id":"', replies.column(authors)),
                (b'","score":', replies.column(posts.scores)),
                (b',"rank":', replies.column(np.arange(1, len(posts) + 1))),
                (b',"created_at":', replies.column(posts.created_at)),
                (b',"topics":', [topics[topic] for topic in posts.topics]),
                *([(b',"codes":[', [b"%b]" % row for row in codes[1:-1].split(b"],[")])] if codes else []),
            ],
            end=b"},",
        )
        rows = woven[:-1]
    head = orjson.dumps({"model": _name_of(served.manifest), "corpus": _corpus_of(served, posts)})
    end: dict[str, Any] = {
        "visible": posts.visible,
        "history_used": found.history_used,
        "history_dropped": found.history_dropped,
        "timings_ms": timings_ms,
    }
    if asked.context is not UNSET:
        end["context"] = asked.context
    if asked.request_id is not UNSET:
        end["request_id"] = asked.request_id
    return b'%b,"posts":[%b],%b' % (head[:-1], rows, orjson.dumps(end)[1:])


def _recommended(
    work: Recommendation,
    found: Found,
    ranked: Ranked,
    placement: Placement,
    wishes: Wishes,
    timings_ms: dict[str, float],
) -> bytes:
    """The reply of /recommend: what /rank says of the posts, best first, with their scores and ranks in /retrieve."""
    posts, vocabulary = found.posts, work.vocabulary
    ids = [post for post, _ in posts.texts] if posts.texts else [*map(str, posts.post_ids.tolist())]
    rows = replies.rows_of(ids, ranked.scores, placement, wishes, vocabulary)
    best = placement.order[: wishes.top_k]
    further: list[tuple[bytes, NDArray[Any]]] = [
        (b',"retrieval_score":', posts.scores[best]),
        (b',"retrieval_rank":', best + 1),
    ]
    models = {"retrieval": _name_of(work.served.manifest), "ranker": vocabulary.model}
    head = replies.head_of(replies.names_of(wishes, vocabulary), models=models, corpus=_corpus_of(work.served, posts))
    end = replies.tail_of(ranked, wishes, timings_ms, visible=posts.visible)
    return head + replies.objects(rows, vocabulary, further) + end


def _name_of(manifest: Manifest) -> dict[str, str]:
    return {"name": manifest.name, "version": manifest.version}


def _corpus_of(served: ServedCorpus, searched: Retrieved) -> dict[str, Any]:
    """The reply's description of the corpus, as it was when it was searched."""
    said = {"name": served.corpus.name, "version": served.corpus.version}
    return said | {"posts": searched.posts, "changes": searched.changes, "sequence": searched.mark.sequence}


def _label(served: ServedCorpus, found: Found) -> str:
    """The corpus's version with the changes that it had."""
    mark, corpus = found.posts.mark, served.corpus
    return f"{corpus.label(mark)}.{mark.digest[:8]}" if mark.sequence else corpus.version
