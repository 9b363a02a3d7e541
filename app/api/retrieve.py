"""Posts of a corpus for a user over HTTP: found by `/retrieve`, found and then ranked by `/recommend`."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import orjson
from fastapi import APIRouter
from msgspec import UNSET
from msgspec.json import Decoder
from numpy.typing import NDArray
from starlette.responses import Response

from app import features, replies, schema
from app.api.caller import Caller, CallerInfo
from app.api.route import JsonReply, Route
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
from app.features import CheckedRequest
from app.interface import Job, Ranked, RankingService, SearchRequest, SearchResult, ServedCorpus, ServedModel
from app.replies import Placement
from app.schema import DEFAULT_K, PROBLEMS, RecommendReply, RecommendRequest, RetrieveReply, RetrieveRequest
from app.settings import Limits
from app.vocabulary import Vocabulary
from model.config import ModelConfig
from model.inputs import NO_CANDIDATES, Candidates, Context, Scores, age_bucket, codes_fitting, created_within
from model.retrieval.inputs import AT_LEAST, Filters, Query, Retrieved
from weights.format.manifest import Manifest

RETRIEVE, RECOMMEND = Decoder(RetrieveRequest), Decoder(RecommendRequest)
AT_LEAST_HEADER, VERSION_HEADER = "X-Corpus-At-Least", "X-Corpus-Version"
HEADERS = {
    AT_LEAST_HEADER: "A change that the corpus must have, by its sequence or position in the feed. 503 if it lacks it for half a second."
}
HEADERS_OUT = {VERSION_HEADER: "The corpus that was searched, and its last change."}
NO_CORPUS = PROBLEMS | schema.problems_of(NoCorpus, NotReady, Draining, EngineDown, CorpusNotLoaded, CorpusBehind)
NOBODY = "is 0 and the history has no posts, so nothing is known about this user"

router = APIRouter(tags=["retrieval"], route_class=Route)


@router.post(
    "/retrieve",
    openapi_extra=schema.body_of(RetrieveRequest, HEADERS),
    response_class=Response,
    responses=schema.reply_of(RetrieveReply, "The best posts.", HEADERS_OUT) | NO_CORPUS,
)
async def retrieve(caller: Caller) -> Response:
    """Find the best posts of the corpus for one user. A post's score depends only on the user, the history and the post."""
    state, exchange = caller.state, caller.exchange
    corpus = state.ranker.corpus
    served = corpus.served
    limits = state.settings.limits
    with exchange.measured("parse"):
        retrieve_request = schema.read(RETRIEVE, caller.body, limits, served.vocabulary.index)
        k, history = _k(retrieve_request, limits), retrieve_request.sizes()["history"]
        caller.note(retrieve_request.request_id, served.manifest.config, candidates=k, history=history)
    if at_least := _at_least(caller):
        await _reach(caller, at_least)
        served = corpus.served  # another one may serve by now
    with exchange.measured("parse"):
        query = _query(retrieve_request, k, at_least, served.vocabulary, served.manifest.config)
    search = SearchRequest(query, caller.deadline, caller.key, caller.leaves_at)
    asked_at = time.perf_counter()
    search_result = await corpus.search(served, search)
    _count(caller, search_result, asked_at)
    with exchange.measured("serialize"):
        body = _reply(retrieve_request, search_result, served, replies.work_timings(exchange))
    fields = replies.headers(served.manifest.version, "hit" if search_result.posts.cached else "miss", exchange)
    return JsonReply(body, fields | {VERSION_HEADER: _label(served, search_result)})


@router.post(
    "/recommend",
    openapi_extra=schema.body_of(RecommendRequest, HEADERS),
    response_class=Response,
    responses=schema.reply_of(RecommendReply, "The best posts, ranked.", HEADERS_OUT) | NO_CORPUS,
)
async def recommend(caller: Caller) -> Response:
    """Find posts as `/retrieve` does and rank them as `/rank` does, in one call. The scores have the same bits as from the two calls."""
    state, exchange = caller.state, caller.exchange
    ranker = state.ranker
    model, served = _served_now(ranker)
    limits = state.settings.limits
    with exchange.measured("parse"):
        recommend_request = schema.read(RECOMMEND, caller.body, limits, model.vocabulary.index)
    k, history = _k(recommend_request, limits), recommend_request.sizes()["history"]
    caller.note(recommend_request.request_id, model.manifest.config, candidates=k, history=history)
    if at_least := _at_least(caller):  # before it has a place, which others could use while it waits
        await _reach(caller, at_least)
        model, served = _served_now(ranker)  # others may serve by now
    # Before the search: a request that the ranker would refuse costs none, and one that is admitted ends even in a drain.
    with ranker.admit(model, caller.place_request(candidates=k, history=history)) as job:
        with exchange.measured("parse"):
            query, checked = _check(caller, recommend_request, k, model, served)
        search_result, ranked = await _search_and_rank(caller, job, served, query, checked)
    with exchange.measured("serialize"):
        placement = replies.placement_of(checked, ranked.scores)
        body = _recommended(served, search_result, checked, ranked, placement, replies.work_timings(exchange))
        caller.note_served(checked, ranked, placement)
    fields = replies.headers_of(model, ranked, exchange)
    return JsonReply(body, fields | {VERSION_HEADER: _label(served, search_result)})


async def _reach(caller: CallerInfo, at_least: str) -> None:
    """Wait until the corpus has had this change. The time is no part of how long replies take. Raises CorpusBehind."""
    with caller.exchange.measured("corpus"):
        await caller.state.ranker.corpus.reach(at_least, caller.key, caller.deadline)
    caller.exchange.turn_at = time.perf_counter()


def _served_now(ranker: RankingService) -> tuple[ServedModel, ServedCorpus]:
    """What serves. Raises NoCorpus where the model cannot rank posts of the corpus."""
    model, served = ranker.model(), ranker.corpus.served
    if served.manifest.ids != model.manifest.ids:
        raise NoCorpus("The posts cannot be ranked: the corpus has ids of another kind than the ranking model.")
    return model, served


def _check(
    caller: CallerInfo, request: RecommendRequest, k: int, model: ServedModel, served: ServedCorpus
) -> tuple[Query, CheckedRequest]:
    """Check a request for `k` posts against both checkpoints. What is to be ranked has no candidates yet. Raises InvalidRequest."""
    manifest, towers, vocabulary = model.manifest, served.manifest, model.vocabulary
    query = _query(request, k, _at_least(caller), served.vocabulary, towers.config)
    context: Context | str = query.handle
    if not query.handle:
        is_alike = _read_alike(manifest, towers)
        context = query.context if is_alike else features.context_of(request, vocabulary, manifest.config)
    options = features.options_of(request, vocabulary, caller.exchange.request_id)
    return query, CheckedRequest(
        vocabulary,
        context,
        NO_CANDIDATES,
        (),
        NO_CANDIDATES.surfaces,
        request.impression_ts,
        options,
    )


def _read_alike(ours: Manifest, theirs: Manifest) -> bool:
    """Whether both checkpoints read any user and history the same way."""
    return _reading(ours) == _reading(theirs)


def _reading(manifest: Manifest) -> tuple[object, ...]:
    config = manifest.config
    codes = config.code_levels, config.code_values
    return manifest.action_names, config.product_surfaces, config.history_length, codes


async def _search_and_rank(
    caller: CallerInfo, job: Job, served: ServedCorpus, query: Query, checked: CheckedRequest
) -> tuple[SearchResult, Ranked]:
    """Find posts, make them the candidates of the checked request, and rank them, best first."""
    ranker, config = caller.state.ranker, job.model.manifest.config
    asked_at = time.perf_counter()
    await ranker.reserve(job)
    search = SearchRequest(query, caller.deadline, caller.key, has_place=True)
    search_result = await ranker.corpus.search(served, search)
    _count(caller, search_result, asked_at)
    posts, count, stages = search_result.posts, len(search_result.posts), caller.exchange.stages
    ages = age_bucket(checked.impression_ts, posts.created_at, config)
    codes = codes_fitting(posts.codes, count, config)
    surfaces = np.zeros(count, np.int64)
    checked.candidates = Candidates(posts.post_ids, posts.author_ids, surfaces, ages, codes=codes)
    checked.post_ids = [post for post, _ in posts.texts] if posts.texts else [*map(str, posts.post_ids.tolist())]
    checked.created_at = posts.created_at
    checked.options.top_k = min(checked.options.top_k or count, count)
    asked_at = time.perf_counter()
    if count:
        ranked = await ranker.rank(job, checked.context, checked.candidates)
    else:
        ranked = _nothing(search_result, query, config)
    stages["queue"] += caller.exchange.passed(asked_at, {"forward": ranked.forward_seconds})
    stages["forward"] = ranked.forward_seconds
    return search_result, ranked


def _nothing(search_result: SearchResult, query: Query, config: ModelConfig) -> Ranked:
    """The ranking of no posts, which takes no time."""
    actions, outputs = config.actions, config.continuous_actions
    scores = Scores(*(np.empty((0, width), np.float32) for width in (actions, actions, outputs)))
    events = search_result.history_used + search_result.history_dropped
    used = min(events, config.history_length)
    return Ranked(scores, "miss", 0.0, query.handle, used, events - used)


# --- What both endpoints share ---------------------------------------------------------------------------------------------------------


def _k(request: RetrieveRequest, limits: Limits) -> int:
    """How many posts to find at most. Raises TooLarge."""
    k = min(DEFAULT_K, limits.max_retrieved) if request.k is UNSET else request.k
    if k > limits.max_retrieved:
        raise TooLarge(f"k: at most {limits.max_retrieved} posts are retrieved.")
    return k


def _query(request: RetrieveRequest, k: int, at_least: str, vocabulary: Vocabulary, config: ModelConfig) -> Query:
    """What a search for `k` posts is asked. Raises InvalidRequest, also for a user of whom nothing is known: every post would score 0."""
    context = features.context_of(request, vocabulary, config)
    handle = "" if request.context is UNSET else request.context
    if not handle and not context.user_id and not context.post_ids.any():
        raise InvalidRequest("user_id", NOBODY)
    excluded = features.ids_of(request.exclude, vocabulary.ids, "exclude")
    if request.exclude_history and not handle:
        excluded = np.concatenate((excluded, _history_ids(request, context, vocabulary)))
    first, last = None, None
    if request.max_age_seconds is not UNSET:
        first, last = created_within(request.impression_ts, request.max_age_seconds)
    topics = None if request.topics is UNSET else tuple(request.topics)
    return Query(
        context,
        k,
        Filters(excluded, topics, first, last),
        -np.inf if request.min_score is UNSET else request.min_score,
        at_least,
        handle,
        excludes_history=request.exclude_history and bool(handle),
    )


def _history_ids(request: RetrieveRequest, context: Context, vocabulary: Vocabulary) -> NDArray[np.uint64]:
    """The posts of the whole history, those beyond the model's window included."""
    if not context.dropped:
        return context.post_ids
    return features.ids_of(features.sent_history_ids(request), vocabulary.ids, "history.post_id")


def _at_least(caller: CallerInfo) -> str:
    """The change that the corpus must have had: a sequence, or a position of the feed; "" for any. Raises InvalidRequest."""
    sent = caller.headers.get(AT_LEAST_HEADER.lower().encode(), b"").decode("latin-1")
    if sent and not AT_LEAST.fullmatch(sent):
        message = "must be a sequence or a position of the feed, such as 12 or 1764000000000-0"
        raise InvalidRequest(AT_LEAST_HEADER, message)
    return sent


def _count(caller: CallerInfo, search_result: SearchResult, asked_at: float) -> None:
    """Note where the time of a search went that was asked for at `asked_at`, and has ended just now."""
    computed = {"encode": search_result.encode_seconds, "search": search_result.search_seconds}
    caller.exchange.stages |= {"queue": caller.exchange.passed(asked_at, computed)} | computed


# --- Replies ---------------------------------------------------------------------------------------------------------------------------


def _reply(
    request: RetrieveRequest, search_result: SearchResult, served: ServedCorpus, timings_ms: dict[str, float]
) -> bytes:
    """The reply of /retrieve: ids are strings, which every JSON reader keeps exactly."""
    posts = search_result.posts
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
        "history_used": search_result.history_used,
        "history_dropped": search_result.history_dropped,
        "timings_ms": timings_ms,
    }
    if request.context is not UNSET:
        end["context"] = request.context
    if request.request_id is not UNSET:
        end["request_id"] = request.request_id
    return b'%b,"posts":[%b],%b' % (head[:-1], rows, orjson.dumps(end)[1:])


def _recommended(
    served: ServedCorpus,
    search_result: SearchResult,
    checked: CheckedRequest,
    ranked: Ranked,
    placement: Placement,
    timings_ms: dict[str, float],
) -> bytes:
    """The reply of /recommend: what /rank says of the posts, best first, with their scores and ranks in /retrieve."""
    posts, vocabulary = search_result.posts, checked.vocabulary
    rows = replies.rows_of(checked, ranked.scores, placement)
    best = placement.order[: checked.options.top_k]
    further: list[tuple[bytes, NDArray[Any]]] = [
        (b',"retrieval_score":', posts.scores[best]),
        (b',"retrieval_rank":', best + 1),
    ]
    models = {"retrieval": _name_of(served.manifest), "ranker": vocabulary.model}
    head = replies.head_of(replies.names_of(checked), models=models, corpus=_corpus_of(served, posts))
    end = replies.tail_of(ranked, checked, timings_ms, visible=posts.visible)
    return head + replies.objects(rows, vocabulary, further) + end


def _name_of(manifest: Manifest) -> dict[str, str]:
    return {"name": manifest.name, "version": manifest.version}


def _corpus_of(served: ServedCorpus, searched: Retrieved) -> dict[str, Any]:
    """The reply's description of the corpus, as it was when it was searched."""
    description = {"name": served.corpus.name, "version": served.corpus.version}
    return description | {"posts": searched.posts, "changes": searched.changes, "sequence": searched.mark.sequence}


def _label(served: ServedCorpus, search_result: SearchResult) -> str:
    """The corpus's version with the changes that it had."""
    mark, corpus = search_result.posts.mark, served.corpus
    return f"{corpus.label(mark)}.{mark.digest[:8]}" if mark.sequence else corpus.version
