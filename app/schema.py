"""What requests and replies look like, declared once: the decoders, the checks and FastAPI's document all come from these types.

A request is checked in two steps. `decode` checks what holds for every checkpoint: JSON, types, required fields, sizes. `app.columns`
then checks what one checkpoint knows: its actions, its surfaces, its kind of ids, and the bounds of every value.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from functools import cache
from typing import Annotated, Any, Literal, Protocol, TypeVar

import msgspec
import orjson
from msgspec import UNSET, Meta, Struct, UnsetType, inspect

from app import errors
from app.errors import InvalidRequest, MalformedJson, TooLarge
from weights.text_ids import MAX_TEXT_BYTES
from weights.values import MAX_ACTION_VALUE, MAX_ID, MAX_SCORE_WEIGHT, MAX_TIME, time_problem

DEFAULT_K = 200
MAX_COUNT = 2**63 - 1
MAX_VALUES = 30_000
"""JSON values in one request, more where more candidates are allowed; it bounds the time of reading one to some milliseconds."""
REQUEST_ID_PATTERN = r"^[A-Za-z0-9_.:@/+=-]{1,128}$"
REQUEST_ID_RULE = "must be 1 to 128 letters, digits or any of _ . : @ / + = -"
HANDLE_PATTERN = r"^[0-9a-f]{32}$"
HANDLE_RULE = "must be a handle as POST /context and replies give it: 32 lower-case hexadecimal digits"
LONG_BODY_BYTES = 256 * 1024
MAX_DIGITS = 512
"""Digits of one number in a body longer than `LONG_BODY_BYTES`; in a shorter one long numbers take no time worth a look."""
NO_REQUESTS = "must be a list of at least one request, with no other fields"
NO_USER = "is required, or context in its place"
TWO_USERS = "stands in place of user_id and history, which must not be there as well"

_REF = "#/components/schemas/{name}"

# Python's `$` also matches before a last line feed, so these are matched as a whole here and never by msgspec.
_REQUEST_ID, _HANDLE = re.compile(REQUEST_ID_PATTERN, re.ASCII), re.compile(HANDLE_PATTERN, re.ASCII)


def is_request_id(value: str) -> bool:
    """Whether this text may name a request. The name goes into headers and logs unchanged."""
    return _REQUEST_ID.fullmatch(value) is not None


def is_handle(value: str) -> bool:
    """Whether this text has the form of a context handle."""
    return _HANDLE.fullmatch(value) is not None


def about(description: str, *examples: Any, **schema: Any) -> Meta:
    """A field's description and examples for the document; `schema` adds keywords of JSON Schema that msgspec does not check."""
    return Meta(description=description, examples=[*examples] or None, extra_json_schema=schema or None)


# --- Values that several requests have -------------------------------------------------------------------------------------------------

WeightSet = Literal["default", "x-2026-09"]
"""Names of `weights.actions.SCORE_WEIGHT_SETS`."""

_IntegerId = Annotated[int, Meta(extra_json_schema={"minimum": 0, "maximum": MAX_ID})]
_TextId = Annotated[str, Meta(extra_json_schema={"minLength": 1, "maxLength": MAX_TEXT_BYTES})]
Id = _IntegerId | _TextId
_ID = "A 64-bit integer without sign or its decimal string; a text of 1 to 128 bytes where `ids` in `/info` is `text`."
Time = Annotated[int, Meta(extra_json_schema={"minimum": 0, "maximum": MAX_TIME})]
Count = Annotated[int, Meta(ge=1, le=MAX_COUNT)]
ActionValue = Annotated[float, Meta(extra_json_schema={"minimum": 0, "maximum": MAX_ACTION_VALUE})]
ScoreWeight = Annotated[float, Meta(extra_json_schema={"minimum": -MAX_SCORE_WEIGHT, "maximum": MAX_SCORE_WEIGHT})]
Actions = list[str] | dict[str, ActionValue] | _IntegerId

PostId = Annotated[Id, about(f"{_ID} Echoed as it came. 0 is padding and carries no embedding.", 90)]
AuthorId = Annotated[Id, about(f"{_ID} 0 means unknown.", 7)]
Surface = Annotated[int, about("Where the post is or was shown: an index below `product_surfaces`.", 0, minimum=0)]
ActionsTaken = Annotated[
    Actions,
    about(
        "Names of the actions taken, or name → value; a decimal string is an index. Or one integer: bit a is action a.",
        ["favorite", "dwell"],
    ),
]
Dwell = Annotated[
    float,
    about("Seconds spent on the post; 0 where unknown. Checked and ignored without a dwell input.", 12.5, minimum=0),
]
CreatedAt = Annotated[
    Time, about("Unix seconds; 0 where unknown. Checked and ignored without a post-age input.", 1779990000)
]
UserId = Annotated[Id, about(f"{_ID} 0 means anonymous.", "1868434417286410240")]
RequestName = Annotated[
    str | UnsetType,
    about("A name for this request, echoed and used in logs.", "feed-17", pattern=REQUEST_ID_PATTERN),
]
Weights = Annotated[
    dict[str, ScoreWeight] | WeightSet | UnsetType,
    about("Weights of the combined score by action, in place of the checkpoint's own; or the name of published ones."),
]
Score = Annotated[
    Literal["sum", "offset"],
    about(
        "What the combined score is: the weighted sum s, or with its published offset, which lifts it above 0: s + 0.001, and where s is "
        "negative (s + N) / T · 0.001, with the sums N of the negative weights' and T of all weights' magnitudes."
    ),
]
Wanted = Annotated[
    list[str] | UnsetType,
    about("Which actions' probabilities to return, in this order; all of them when missing.", ["favorite"]),
]
Topic = Annotated[str, Meta(max_length=100)]


# --- Requests --------------------------------------------------------------------------------------------------------------------------


class Strict(Struct, forbid_unknown_fields=True):
    """Unknown fields are errors, and so is `null`."""


class Post(Strict, gc=False):
    """What a history item and a candidate have in common."""

    post_id: PostId
    author_id: AuthorId
    product_surface: Surface = 0


class HistoryItem(Post, gc=False):
    """A post that the user has met before, and what the user did."""

    actions: ActionsTaken = 0
    dwell_time: Dwell = 0.0


class Candidate(Post, gc=False):
    """A post to score."""

    created_at: CreatedAt = 0


_EACH = about("One entry a post, in the order of the other arrays.")


class HistoryColumns(Strict):
    """History items in arrays of equal length, one entry an item: the fast form. The fields mean what they mean in `HistoryItem`."""

    post_id: Annotated[list[PostId], _EACH]
    author_id: Annotated[list[AuthorId], _EACH]
    product_surface: Annotated[list[Surface] | UnsetType, _EACH] = UNSET
    actions: Annotated[list[ActionsTaken] | UnsetType, _EACH] = UNSET
    dwell_time: Annotated[list[Dwell] | UnsetType, _EACH] = UNSET


class CandidateColumns(Strict):
    """Candidates in arrays of equal length, one entry a candidate: the fast form. The fields mean what they mean in `Candidate`."""

    post_id: Annotated[list[PostId], _EACH]
    author_id: Annotated[list[AuthorId], _EACH]
    product_surface: Annotated[list[Surface] | UnsetType, _EACH] = UNSET
    created_at: Annotated[list[CreatedAt] | UnsetType, _EACH] = UNSET


History = Annotated[
    list[HistoryItem] | HistoryColumns,
    about("Oldest → newest, in either form. Beyond the model's window the newest are kept."),
]
Candidates = Annotated[
    list[Candidate] | CandidateColumns,
    about("The posts to score, at least one: a list of objects or one object of equal-length arrays."),
]
Items = list[HistoryItem] | list[Candidate] | HistoryColumns | CandidateColumns


def count_of(items: Items) -> int:
    """The number of posts, in either form."""
    return len(items) if isinstance(items, list) else len(items.post_id)


class Request(Strict, kw_only=True):
    """A body. `sizes` counts what a limit of the same name bounds, and `check` raises InvalidRequest for what types cannot say."""

    def sizes(self) -> dict[str, int]:
        """The numbers of items by field."""
        return {}

    def check(self) -> None:
        """Raise InvalidRequest for the first thing that is wrong, for whatever checkpoint."""


class ContextRequest(Request, kw_only=True):
    """A user and that user's history, to be computed ahead of requests that name them by a handle."""

    user_id: UserId
    history: History = []
    request_id: RequestName = UNSET

    def sizes(self) -> dict[str, int]:
        """As `Request.sizes`."""
        return {"history": count_of(self.history)}

    def check(self) -> None:
        """As `Request.check`."""
        _check_posts("history", self.history)
        _check_name(self.request_id)


class UserRequest(Request, kw_only=True):
    """Whom a request is for: `user_id` with `history`, or `context`."""

    user_id: UserId | UnsetType = UNSET
    history: History | UnsetType = UNSET
    context: Annotated[
        str | UnsetType,
        about(
            "The handle of a context, in place of `user_id` and `history`: `POST /context` and replies give it.",
            "0" * 32,
            pattern=HANDLE_PATTERN,
        ),
    ] = UNSET
    impression_ts: Annotated[
        Time, about("Unix seconds from which ages are counted; 0 or missing: every age is unknown.", 1780000000)
    ] = 0
    request_id: RequestName = UNSET

    def sizes(self) -> dict[str, int]:
        """As `Request.sizes`."""
        return {"history": 0 if self.history is UNSET else count_of(self.history)}

    def check(self) -> None:
        """As `Request.check`."""
        if self.context is UNSET:
            if self.user_id is UNSET:
                raise InvalidRequest("user_id", NO_USER)
        elif self.user_id is not UNSET or self.history is not UNSET:
            raise InvalidRequest("context", TWO_USERS)
        elif not is_handle(self.context):
            raise InvalidRequest("context", HANDLE_RULE)
        if self.history is not UNSET:
            _check_posts("history", self.history)
        if (problem := time_problem(self.impression_ts)) is not None:
            raise InvalidRequest("impression_ts", problem)
        _check_name(self.request_id)


class RankRequest(UserRequest, kw_only=True):
    """One user, that user's history, and the candidates to score."""

    candidates: Candidates
    reply: Annotated[
        Literal["objects", "columns"],
        about("Form of the reply's `candidates`: objects, or arrays, which are shorter and faster."),
    ] = "objects"
    weights: Weights = UNSET
    score: Score = "sum"
    top_k: Annotated[Count | UnsetType, about("Sort the reply by score, best first, and keep this many.")] = UNSET
    actions_wanted: Wanted = UNSET

    def sizes(self) -> dict[str, int]:
        """As `Request.sizes`."""
        history = 0 if self.history is UNSET else count_of(self.history)
        return {"candidates": count_of(self.candidates), "history": history}

    def check(self) -> None:
        """As `Request.check`."""
        UserRequest.check(self)
        _check_posts("candidates", self.candidates)
        if not count_of(self.candidates):
            raise InvalidRequest("candidates", "must not be empty")


class ExplainRequest(RankRequest, kw_only=True):
    """A request of /rank, and which of its candidates to explain."""

    explain: Annotated[
        list[Id],
        Meta(min_length=1),
        about("Post ids of candidates; where several have the same one, the first is meant.", [90]),
    ]


class BatchRequest(Strict):
    """Requests that are ranked together, each on its own terms."""

    requests: Annotated[
        list[RankRequest], Meta(min_length=1), about("A bare array of them is taken as well, and answered by one.")
    ]


class RetrieveRequest(UserRequest, kw_only=True):
    """One user, that user's history, and which posts of the corpus may come back."""

    k: Annotated[
        Annotated[int, Meta(ge=1)] | UnsetType,
        about(
            "How many posts to return at most; fewer where the server allows fewer, or the filters leave fewer.",
            default=DEFAULT_K,
        ),
    ] = UNSET
    exclude: Annotated[list[Id], about("Posts that must not come back.", ["18"])] = []
    exclude_history: Annotated[bool, about("Whether the posts of the history are excluded as well.")] = True
    topics: Annotated[
        Annotated[list[Topic], Meta(max_length=1000)] | UnsetType,
        about("Posts of any of these topics alone. A name that the corpus does not have matches nothing."),
    ] = UNSET
    min_score: Annotated[
        Annotated[float, Meta(ge=-1, le=1)] | UnsetType, about("Posts with this score or a higher one alone.")
    ] = UNSET
    max_age_seconds: Annotated[
        Annotated[int, Meta(ge=1, le=MAX_TIME)] | UnsetType,
        about("Posts created at most this long before `impression_ts`, which it needs; none of an unknown time."),
    ] = UNSET

    def sizes(self) -> dict[str, int]:
        """As `Request.sizes`."""
        return {"history": 0 if self.history is UNSET else count_of(self.history), "exclude": len(self.exclude)}

    def check(self) -> None:
        """As `Request.check`."""
        UserRequest.check(self)
        if self.max_age_seconds is not UNSET and not self.impression_ts:
            raise InvalidRequest("max_age_seconds", "needs impression_ts, from which ages are counted")


class RecommendRequest(RetrieveRequest, kw_only=True):
    """What to retrieve, and how the posts are then scored."""

    weights: Weights = UNSET
    score: Score = "sum"
    top_k: Annotated[Count | UnsetType, about("Return this many of the retrieved posts; all when missing.")] = UNSET
    actions_wanted: Wanted = UNSET


class PostUpsert(Strict):
    """A post that comes into a corpus."""

    post_id: PostId
    author_id: AuthorId
    created_at: CreatedAt = 0
    topic: Annotated[str, Meta(min_length=1, max_length=100)] | UnsetType = UNSET


class PostsChange(Request, kw_only=True):
    """A change of a corpus: posts that come or are replaced, and ids of posts that go."""

    upsert: list[PostUpsert] = []
    delete: list[Id] = []


def _check_posts(name: str, items: Items) -> None:
    """Raise InvalidRequest for arrays of different lengths."""
    if not isinstance(items, list):
        columns = [column for column in msgspec.structs.astuple(items) if column is not UNSET]
        if len({*map(len, columns)}) > 1:
            raise InvalidRequest(name, "must hold arrays of equal length")


def _check_name(request_id: str | UnsetType) -> None:
    if request_id is not UNSET and not is_request_id(request_id):
        raise InvalidRequest("request_id", REQUEST_ID_RULE)


# --- Replies, for the document: `app.replies` and the endpoints write them ------------------------------------------------------------

Numbers = list[float]
Rows = list[list[float]]


class ModelVersion(Strict):
    """The checkpoint that computed the scores."""

    name: Annotated[str, about("Name of the checkpoint.")]
    version: Annotated[str, about("Version of the checkpoint.")]


class Scored(Strict):
    """The fields of every scored candidate."""

    post_id: Annotated[Id, about("As it was sent.")]
    score: Annotated[float, about("Σ weight × probability over the weights in force.")]
    rank: Annotated[int, about("Among all candidates; 1 is best, and equal scores keep the order of the request.")]
    probabilities: Annotated[Numbers, about("One for each of the reply's `actions`.")]


class RankedCandidate(Scored):
    """One candidate's scores. They depend on the user, the history and this candidate, on nothing else."""

    continuous: Annotated[dict[str, float], about("Predicted quantities by name, such as `dwell_time` in seconds.")]


class RankedColumns(Strict):
    """All candidates' scores in arrays, one entry a candidate; the fields mean what they mean in `RankedCandidate`."""

    post_id: Annotated[list[Id], about("As they were sent.")]
    score: Annotated[Numbers, about("Σ weight × probability over the weights in force.")]
    rank: Annotated[list[int], about("1 is best.")]
    probabilities: Annotated[Rows, about("A row a candidate; a row has one for each of the reply's `actions`.")]
    continuous: Annotated[dict[str, Numbers], about("Predicted quantities by name.")]


class Timings(Strict):
    """Where the time went, in milliseconds."""

    parse: Annotated[float, about("Reading JSON, checks, features.")]
    queue: Annotated[float, about("Waiting for the engine.")]
    forward: Annotated[float, about("The model.")]


class Reply(Strict, kw_only=True):
    """The fields beside the scores."""

    history_used: Annotated[int, about("History items that the model saw: the ranking model, where there are two.")]
    history_dropped: Annotated[int, about("Older items that did not fit the model's window.")]
    context: Annotated[
        str | UnsetType,
        about("The handle of the ranking model's context, for later requests; only as long as its cache keeps it."),
    ] = UNSET
    request_id: Annotated[str | UnsetType, about("The request's own, if it had one.")] = UNSET


class ContextReply(Reply, kw_only=True):
    """A context that the cache has now. Without `context` it keeps none of this size: send requests whole then."""

    model: Annotated[ModelVersion, about("What computed it.")]
    timings_ms: Annotated[Timings, about("Where the time went.")]


class ScoresReply(Reply, kw_only=True):
    """The fields beside the scores of one model."""

    model: Annotated[ModelVersion, about("What computed it.")]
    actions: Annotated[list[str], about("Names of the probability columns.")]


class RankReply(ScoresReply, kw_only=True):
    """The ranking."""

    candidates: Annotated[
        list[RankedCandidate] | RankedColumns,
        about("In the order of the request, or best first with `top_k`; in the form that the request's `reply` names."),
    ]
    timings_ms: Annotated[Timings, about("Where the time went.")]
    warnings: Annotated[
        list[str] | UnsetType, about("What is likely a mistake of set-up, such as weights that are all 0.")
    ] = UNSET


class FieldError(Strict):
    """What is wrong with a request."""

    field: Annotated[str, about("Where, such as `candidates[3].post_id`; empty for the whole body.")]
    message: Annotated[str, about("What is wrong; never the value itself.")]


class Problem(Strict):
    """Why there are no scores (RFC 9457)."""

    type: Annotated[str, about("A URI that names the kind of problem.")]
    title: Annotated[str, about("The kind of problem, for people.")]
    status: Annotated[int, about("The HTTP status.")]
    code: Annotated[str, about("The kind of problem, for programs: stable.")]
    detail: Annotated[str, about("What went wrong this time.")]
    error: Annotated[str | UnsetType, about("The same as `detail`, under `/v2` alone.")] = UNSET
    errors: Annotated[list[FieldError] | UnsetType, about("The first thing that is wrong with the request.")] = UNSET
    request_id: Annotated[str | UnsetType, about("The value of X-Request-ID.")] = UNSET


class Failed(Strict):
    """A request of a batch that got no scores."""

    error: Annotated[Problem, about("Why there are no scores.")]


class BatchReply(Strict):
    """One entry a request, in order."""

    results: Annotated[
        list[Any],  # msgspec has no union of two structs without tags
        Meta(
            extra_json_schema={
                "items": {"anyOf": [{"$ref": _REF.format(name="RankReply")}, {"$ref": _REF.format(name="Failed")}]}
            }
        ),
        about("Scores, or why there are none."),
    ]


class LeftOut(Strict):
    """The history items that were left out one by one, oldest first; one entry an item."""

    place: Annotated[list[int], about("Their places in the request's history, from 0.")]
    post_id: Annotated[list[str], about("Their post ids as strings.")]


class Difference(Strict):
    """What one thing changes: the numbers with it less those without it."""

    score: Annotated[float, about("Of the combined score.")]
    probabilities: Annotated[Numbers, about("One for each of the reply's `actions`.")]


class Differences(Strict):
    """What each of several things changes; one entry a thing."""

    score: Annotated[Numbers, about("Of the combined score.")]
    probabilities: Annotated[Rows, about("A row a thing; a row has one for each of the reply's `actions`.")]


class CandidateChanges(Strict):
    """What /rank says of a candidate, less what it says of the request without one thing."""

    events: Annotated[Differences, about("Without one history item, for each of the reply's `events`.")]
    user: Annotated[Difference, about("Without the user: `user_id` 0.")]
    everything: Annotated[Difference, about("With neither user nor history.")]
    not_covered: Annotated[
        Difference, about("`everything` less `user` and all `events`: how far the changes are from adding up.")
    ]


class AttentionShares(Strict):
    """Shares of a candidate's attention. Those on user, history and itself add up to 1 for each head."""

    user: Annotated[Rows, about("On the user: a row a layer, an entry a head.")]
    history: Annotated[Rows, about("On all of the history that the model sees: a row a layer, an entry a head.")]
    itself: Annotated[Rows, about("On the candidate: a row a layer, an entry a head.")]
    events: Annotated[Rows, about("On each of the reply's `events`, the mean over heads: a row a layer.")]
    heads: Annotated[
        list[Rows] | UnsetType,
        about("On each of the reply's `events`, by layer and head; only where `explain` names one candidate."),
    ] = UNSET


class ExplainedCandidate(Scored):
    """One candidate: what /rank says of it, what would change it, and what it attends to."""

    change: Annotated[CandidateChanges, about("What each thing changes: positive where it raises the number.")]
    attention: Annotated[AttentionShares, about("What the model looks at, which is no explanation by itself.")]


class ExplainTimings(Timings):
    """Where the time went, in milliseconds. `queue` is that of the request itself, `forward` that of all contexts together."""

    attention: Annotated[float, about("The plain path.")]


class ExplainReply(ScoresReply, kw_only=True):
    """Why candidates have their ranks."""

    events: Annotated[LeftOut, about("What was left out one by one.")]
    candidates: Annotated[list[ExplainedCandidate], about("In the order of the request's `explain`.")]
    timings_ms: Annotated[ExplainTimings, about("Where the time went.")]


class CorpusVersion(Strict):
    """The corpus that was searched."""

    name: Annotated[str, about("Name of the corpus.")]
    version: Annotated[str, about("Version of the corpus.")]
    posts: Annotated[int, about("How many posts a search without filters can return.")]
    changes: Annotated[int, about("How often it was changed since it was written.")]
    sequence: Annotated[
        int, about("The last change in it, counted since it was first built; equal on replicas of one feed.")
    ]


class RetrievedPost(Strict):
    """One post of the corpus. Its score depends on the user, the history and this post, on nothing else."""

    post_id: Annotated[str, about("Its id, in decimal where ids are integers.")]
    author_id: Annotated[str, about("Its author's id likewise.")]
    score: Annotated[float, about("Cosine of the user's and the post's vectors.")]
    rank: Annotated[int, about("1 is best; equal scores go by the order of the corpus.")]
    created_at: Annotated[int, about("Unix seconds; 0 where unknown.")]
    topics: Annotated[list[str], about("The post's topic, if it has one.")]


class RetrieveTimings(Strict):
    """Where the time went, in milliseconds."""

    parse: Annotated[float, about("Reading JSON, checks, features.")]
    queue: Annotated[float, about("Waiting for the scan.")]
    encode: Annotated[float, about("Computing the vectors of the users who share the scan.")]
    search: Annotated[float, about("Scanning the corpus.")]


class RetrieveReply(Reply, kw_only=True):
    """The best posts."""

    model: Annotated[ModelVersion, about("The retrieval checkpoint.")]
    corpus: Annotated[CorpusVersion, about("What was searched.")]
    posts: Annotated[list[RetrievedPost], about("Best first; none where the filters leave none.")]
    visible: Annotated[int, about("Posts that the filters left, but for `min_score`.")]
    timings_ms: Annotated[RetrieveTimings, about("Where the time went.")]


class BothModels(Strict):
    """The checkpoints that answered."""

    retrieval: Annotated[ModelVersion, about("What retrieved the posts.")]
    ranker: Annotated[ModelVersion, about("What scored them.")]


class RecommendedPost(RankedCandidate):
    """One candidate's scores, and how it was retrieved."""

    retrieval_score: Annotated[float, about("Its score in /retrieve.")]
    retrieval_rank: Annotated[int, about("Its rank in /retrieve.")]


class RecommendTimings(RetrieveTimings):
    """Where the time went, in milliseconds. `queue` is that of both stages."""

    forward: Annotated[float, about("The ranking model.")]


class RecommendReply(Reply, kw_only=True):
    """The best posts, ranked: what /rank says of what /retrieve returns."""

    models: Annotated[BothModels, about("What computed it.")]
    corpus: Annotated[CorpusVersion, about("What was searched.")]
    actions: Annotated[list[str], about("Names of the probability columns.")]
    candidates: Annotated[list[RecommendedPost], about("Best first.")]
    visible: Annotated[int, about("Posts that the filters left, but for `min_score`.")]
    timings_ms: Annotated[RecommendTimings, about("Where the time went.")]
    warnings: Annotated[list[str] | UnsetType, about("As in `RankReply`.")] = UNSET


# --- Open Inference Protocol (begin) ---------------------------------------------------------------------------------------------------

MOST_INPUTS = 22
"""Twice as many as there are, so that an unknown tensor is told by its place."""
MOST_OUTPUTS = 10

Size = Annotated[int, Meta(ge=0, le=MAX_COUNT)]


class InputParameters(Struct):
    """Others, such as `content_type`, are passed over."""

    binary_data_size: Annotated[
        Size | None,
        about("Bytes of this tensor's data behind the JSON: see `Inference-Header-Content-Length`. Not with `data`."),
    ] = None


class InputTensor(Struct):
    """One tensor of a request, by the name of its field in the columns form of `/rank`."""

    name: Annotated[str, about("Which one: `GET /v2/models/{name}` lists them.", "candidates.post_id")]
    datatype: Annotated[str, about("`UINT64`, `BYTES`, `INT64`, `FP32` or `FP64`, as the metadata says.", "UINT64")]
    shape: Annotated[
        list[Size],
        Meta(max_length=8),
        about("As the metadata says, with this request's sizes; `[n, 1]` is `[n]`.", [2]),
    ]
    parameters: Annotated[InputParameters | None, about("How its data is sent.")] = None
    data: Annotated[
        msgspec.Raw,
        about("The values in row-major order, flat or nested; not with binary data.", type="array", items={}),
    ] = msgspec.field(default_factory=msgspec.Raw)


class OutputParameters(Struct):
    """Others are passed over."""

    binary_data: Annotated[bool | None, about("Whether its data is to be binary, whatever the request says.")] = None


class WantedOutput(Struct):
    """One tensor that the caller wants."""

    name: Annotated[str, about("`post_id`, `score`, `rank`, `probabilities` or `continuous`.", "score")]
    parameters: Annotated[OutputParameters | None, about("How it is to be sent.")] = None


class InferParameters(Strict):
    """Fields of `/rank` that are not tensors, under the same names; action names are separated by commas. A parameter that nobody knows
    is an error here, since a misspelt one would change numbers."""

    actions: Annotated[
        str | None, about("What the columns of `history.actions` and `weights` are; the checkpoint's when missing.")
    ] = None
    actions_wanted: Annotated[
        str | None, about("Which actions' probabilities to return; all of them when missing.")
    ] = None
    weights: Annotated[WeightSet | None, about("The name of published weights; not with the tensor `weights`.")] = None
    score: Score = "sum"
    top_k: Annotated[Count | None, about("Sort the reply by score, best first, and keep this many.")] = None
    context: Annotated[
        str | None, about("The handle of a context, in place of `user_id` and history.", pattern=HANDLE_PATTERN)
    ] = None
    impression_ts: Annotated[Time, about("Unix seconds from which ages are counted.")] = 0
    timeout: Annotated[Size | None, about("Microseconds that the caller waits.")] = None
    binary_data_output: Annotated[bool | None, about("Whether outputs are binary that do not say.")] = None
    content_type: Annotated[Any, about("Has no effect.")] = None
    headers: Annotated[Any, about("Has no effect.")] = None
    priority: Annotated[Any, about("Has no effect.")] = None
    sequence_id: Annotated[Any, about("Has no effect.")] = None
    sequence_start: Annotated[Any, about("Has no effect.")] = None
    sequence_end: Annotated[Any, about("Has no effect.")] = None


class InferRequest(Request, forbid_unknown_fields=False, kw_only=True):
    """A ranking as tensors. Fields that are not listed are passed over, as other servers of the protocol do."""

    inputs: Annotated[
        list[InputTensor],
        Meta(max_length=MOST_INPUTS),
        about("`user_id`, `candidates.post_id` and `candidates.author_id` are required; no `user_id` with `context`."),
    ]
    outputs: Annotated[
        Annotated[list[WantedOutput], Meta(max_length=MOST_OUTPUTS)] | None, about("All of them when missing.")
    ] = None
    id: Annotated[str | None, about("A name for this request, echoed and used in logs.", "feed-17")] = None
    model_name: Annotated[str | None, about("Must be the path's.")] = None
    parameters: Annotated[InferParameters | None, about("Fields that are not tensors.")] = None

    def sizes(self) -> dict[str, int]:
        """As `Request.sizes`, by the shapes."""
        counts = {tensor.name: tensor.shape[0] for tensor in self.inputs if tensor.shape}
        return {field: counts.get(f"{field}.post_id", 0) for field in ("candidates", "history")}

    def check(self) -> None:
        """As `Request.check`."""
        if self.id and not is_request_id(self.id):
            raise InvalidRequest("id", REQUEST_ID_RULE)
        parameters = self.parameters or InferParameters()
        if parameters.context is not None and not is_handle(parameters.context):
            raise InvalidRequest("parameters.context", HANDLE_RULE)
        if (problem := time_problem(parameters.impression_ts)) is not None:
            raise InvalidRequest("parameters.impression_ts", problem)


class OutputTensor(Strict):
    """One tensor of a reply, a row a candidate."""

    name: Annotated[str, about("As it was wanted.")]
    datatype: Annotated[str, about("As the metadata says.")]
    shape: Annotated[list[int], about("As the metadata says, with this request's sizes.")]
    parameters: Annotated[InputParameters | UnsetType, about("Only with binary data.")] = UNSET
    data: Annotated[
        list[float | str] | UnsetType, about("The values, flat and row-major; only without binary data.")
    ] = UNSET


class InferReply(Strict, kw_only=True):
    """The ranking as tensors."""

    model_name: Annotated[str, about("Name of the checkpoint.")]
    model_version: Annotated[str, about("Version of the checkpoint.")]
    id: Annotated[str | UnsetType, about("The request's own, if it had one.")] = UNSET
    parameters: Annotated[
        dict[str, str | int | float],
        about("Names of the columns, `history_used`, `history_dropped`, and milliseconds by stage."),
    ]
    outputs: Annotated[list[OutputTensor], about("In the order in which they were wanted.")]


# --- Open Inference Protocol (end) -----------------------------------------------------------------------------------------------------


# --- Reading a body --------------------------------------------------------------------------------------------------------------------

T = TypeVar("T")
R = TypeVar("R", bound=Request)


class Limits(Protocol):
    """The settings that bound one request."""

    @property
    def max_candidates(self) -> int:
        """Candidates."""

    @property
    def max_history(self) -> int:
        """History items."""

    @property
    def max_excluded(self) -> int:
        """Excluded posts."""


_DIGITS = bytes.maketrans(b"123456789", b"0" * 9)


def read(decoder: msgspec.json.Decoder[R], body: bytes | bytearray, limits: Limits, actions: Collection[str] = ()) -> R:
    """Decode and check a request of bounded size; `actions` as in `decode`.

    Raises TooLarge before it decodes a body that would be slow to read, and for more items than the limits allow; MalformedJson;
    InvalidRequest.
    """
    check_cost(body, max(MAX_VALUES, 7 * limits.max_candidates))
    asked = decode(decoder, body, actions)
    most = {"candidates": limits.max_candidates, "history": limits.max_history, "exclude": limits.max_excluded}
    for name, count in asked.sizes().items():
        if count > most[name]:
            raise TooLarge(f"{name}: {count} items, and at most {most[name]} are taken.")
    asked.check()
    return asked


def check_cost(body: bytes | bytearray, max_values: int) -> None:
    """Raise TooLarge for a body that is slow to read: its values are estimated from the bytes that begin, separate or escape them, and the
    time that Python takes for a whole number grows with the square of its digits."""
    if len(body) > max_values and len(body) - len(body.translate(None, b",[{\\")) > max_values:
        raise TooLarge(f"The body holds more than {max_values} values.")
    if len(body) > LONG_BODY_BYTES and b"0" * MAX_DIGITS in body.translate(_DIGITS):
        raise TooLarge(f"The body holds a number of {MAX_DIGITS} digits or more.")


def decode(decoder: msgspec.json.Decoder[T], body: bytes | bytearray, actions: Collection[str] = ()) -> T:
    """Decode one JSON document in UTF-8; nothing that the types do not say is checked.

    Raises MalformedJson, or InvalidRequest with the path of the first problem, such as `candidates[3].post_id`. The key of a map's entry
    is in the path where it is one of `actions`; else nothing that the caller sent is repeated. `-0` is read as 0, and of two equal keys
    in one object the last one counts.
    """
    try:
        return decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        value = _parsed(body)  # a type error may stand before a syntax error
        if isinstance(error, msgspec.ValidationError):
            raise _invalid(str(error), decoder.type, value, actions) from None
        raise MalformedJson("The body is nested too deeply.") from None


def split_batch(body: bytes | bytearray, most: int) -> tuple[list[bytes], bool]:
    """Return the JSON of each request in a body of /rank/batch, and whether they came as a bare array.

    Raises MalformedJson where the body as a whole is no JSON, InvalidRequest, or TooLarge for more than `most` requests.
    """
    named, bare = _batch_decoders(most)
    is_bare = body.lstrip()[:1] == b"["
    try:
        body.decode()  # msgspec passes over what it does not decode
        items = bare.decode(body) if is_bare else named.decode(body).requests
    except msgspec.ValidationError:
        _parsed(body)
        raise InvalidRequest("requests", NO_REQUESTS) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        _parsed(body)
        raise MalformedJson("The body is nested too deeply.") from None
    found = [bytes(item) for item in msgspec.structs.astuple(items) if item is not UNSET]
    if not found:
        raise InvalidRequest("requests", NO_REQUESTS)
    if len(found) > most:
        raise TooLarge(f"requests: at most {most} are taken.")
    return found, is_bare


@cache
def _batch_decoders(most: int) -> tuple[msgspec.json.Decoder[Any], msgspec.json.Decoder[Any]]:
    """Decoders of both forms of a batch. They skip what comes after one item more than `most`, so a million items make no objects."""
    fields = [(f"item_{place}", msgspec.Raw, UNSET) for place in range(most + 1)]
    items = msgspec.defstruct("Items", fields, array_like=True)
    named = msgspec.defstruct("Named", [("requests", items)], forbid_unknown_fields=True)
    return msgspec.json.Decoder(named), msgspec.json.Decoder(items)


def _parsed(body: bytes | bytearray) -> Any:
    """The value of a body that was refused. Raises MalformedJson with the place of what is no JSON."""
    try:
        body.decode()
        return orjson.loads(body)
    except UnicodeDecodeError as error:
        raise MalformedJson(f"The body is not valid JSON: not UTF-8 at byte {error.start}.") from None
    except orjson.JSONDecodeError as error:
        place = f"line {error.lineno}, column {error.colno}"
        raise MalformedJson(f"The body is not valid JSON: {error.msg} ({place}).") from None


_MESSAGE = re.compile(r"(.*?)(?: - at `\$([A-Za-z0-9_.\[\]]*)`)?", re.DOTALL)
_STEPS = re.compile(r"\[(\d+)\]|\.(\w+)|(\[\.\.\.\])")
_UNKNOWN, _MISSING, _NO_CHOICE = (
    "Object contains unknown field",
    "Object missing required field `",
    "Invalid enum value",
)


def _invalid(message: str, kind: Any, value: Any, actions: Collection[str]) -> InvalidRequest:
    """msgspec's sentence as a problem of ours. `value`: the whole body."""
    found = _MESSAGE.fullmatch(message)
    assert found is not None
    sentence, path, types = found[1], found[2] or "", _flat([_type_of(kind)])
    if sentence.startswith(_UNKNOWN) and type(value) is dict and not {*value} <= {*_known(types)}:
        path = ""  # what looks like one may be the end of the field's name
    for index, name, entry in _STEPS.findall(path):
        types = _below(types, name, is_index=bool(index))
        if entry:
            path = path.replace(entry, _entry_path(path, value, actions))
    path = path.removeprefix(".")
    if sentence.startswith(_MISSING):
        name = sentence[len(_MISSING) : -1]
        return InvalidRequest(f"{path}.{name}" if path else name, "is required")
    if sentence.startswith(_UNKNOWN):
        return InvalidRequest(path, f"has an unknown field; known are {', '.join(_known(types))}")
    if sentence.startswith(_NO_CHOICE):
        choices = [str(choice) for each in types if isinstance(each, inspect.LiteralType) for choice in each.values]
        return InvalidRequest(path, f"must be one of {', '.join(choices)}")
    return InvalidRequest(path, sentence[:1].lower() + sentence[1:])


@cache
def _type_of(kind: Any) -> inspect.Type:
    return inspect.type_info(kind)


def _known(types: Sequence[inspect.Type]) -> list[str]:
    return [field.encode_name for each in types if isinstance(each, inspect.StructType) for field in each.fields]


def _entry_path(path: str, value: Any, actions: Collection[str]) -> str:
    """The path from a map, at the end of `path`, to its first entry that is no number: empty where its key is none of `actions`."""
    with suppress(AttributeError, LookupError, TypeError):  # of equal keys the value has the last one alone
        for index, name, entry in _STEPS.findall(path):
            if not entry:
                value = value[int(index) if index else name]
        key = next((key for key, number in value.items() if type(number) not in (int, float)), None)
        if key in actions:
            return f".{key}"
    return ""


def _below(types: list[inspect.Type], name: str, *, is_index: bool) -> list[inspect.Type]:
    """The types of an entry of a list or a map, or of this field, whose parent has one of these types; unions are taken apart."""
    found: list[inspect.Type] = []
    for each in types:
        if isinstance(each, inspect.ListType) and is_index:
            found.append(each.item_type)
        elif isinstance(each, inspect.StructType) and name:
            found += [field.type for field in each.fields if field.encode_name == name]
        elif isinstance(each, inspect.DictType) and not is_index and not name:
            found.append(each.value_type)
    return _flat(found)


def _flat(types: list[inspect.Type]) -> list[inspect.Type]:
    found: list[inspect.Type] = []
    for each in types:
        if isinstance(each, inspect.Metadata):
            found += _flat([each.type])
        elif isinstance(each, inspect.UnionType):
            found += _flat([*each.types])
        else:
            found.append(each)
    return found


# --- What FastAPI's document says of them ----------------------------------------------------------------------------------------------

_ITEM = {"post_id": 17, "author_id": 5, "actions": ["favorite", "dwell"], "product_surface": 0, "dwell_time": 12.5}
_USER = {"user_id": "1868434417286410240", "history": [_ITEM]}
_OBJECTS: dict[str, Any] = _USER | {
    "candidates": [
        {"post_id": 90, "author_id": 7, "product_surface": 0, "created_at": 1779990000},
        {"post_id": "9223372036854775808", "author_id": "5", "created_at": 1779900000},
    ],
    "impression_ts": 1780000000,
    "weights": {"favorite": 1.0, "reply": 5.0},
}
_COLUMNS: dict[str, Any] = {
    "user_id": "1868434417286410240",
    "history": {"post_id": [17, 18], "author_id": [5, 6], "actions": [["favorite", "dwell"], ["reply"]]},
    "candidates": {"post_id": [90, 91, 92], "author_id": [7, 5, 6], "created_at": [1779990000, 1779900000, 0]},
    "impression_ts": 1780000000,
    "top_k": 2,
    "actions_wanted": ["favorite"],
}
_TENSORS: dict[str, Any] = {
    "inputs": [
        {"name": "user_id", "datatype": "UINT64", "shape": [1], "data": [1868434417286410240]},
        {"name": "candidates.post_id", "datatype": "UINT64", "shape": [2], "data": [90, 9223372036854775808]},
        {"name": "candidates.author_id", "datatype": "UINT64", "shape": [2], "data": [7, 5]},
        {"name": "history.post_id", "datatype": "UINT64", "shape": [1], "data": [17]},
        {"name": "history.author_id", "datatype": "UINT64", "shape": [1], "data": [5]},
        {"name": "history.actions", "datatype": "FP32", "shape": [1, 2], "data": [1.0, 1.0]},
    ],
    "outputs": [{"name": "post_id"}, {"name": "score"}],
    "parameters": {"actions": "favorite,dwell", "impression_ts": 1780000000},
}
EXAMPLES: dict[type[Struct], dict[str, dict[str, Any]]] = {
    ContextRequest: {"user and history": _USER},
    RankRequest: {"objects": _OBJECTS, "columns": _COLUMNS},
    BatchRequest: {"two requests": {"requests": [_OBJECTS, _COLUMNS]}},
    ExplainRequest: {"objects": _OBJECTS | {"explain": [90]}},
    RetrieveRequest: {"posts": _USER | {"k": 20, "exclude": ["18"], "min_score": -0.5}},
    RecommendRequest: {"posts": _USER | {"k": 50, "top_k": 5, "actions_wanted": ["favorite"]}},
    InferRequest: {"tensors": _TENSORS},
}
"""Bodies for `/docs`, by the kind of request; the demo checkpoint takes all of them."""

REPLIES = (
    RankReply, ContextReply, BatchReply, ExplainReply, RetrieveReply, RecommendReply, InferReply, Problem, Failed,
)  # fmt: skip
PROBLEM_TYPE = "application/problem+json"
_PROBLEM_KINDS: tuple[type[errors.ServiceError], ...] = (
    errors.MalformedJson,
    errors.BadRequest,
    errors.Unauthorized,
    errors.NotFound,
    errors.ContextUnknown,
    errors.TooLarge,
    errors.UnsupportedMediaType,
    errors.InvalidRequest,
    errors.Overloaded,
    errors.NonFiniteScores,
    errors.NotReady,
    errors.Draining,
    errors.EngineDown,
    errors.DeadlineExceeded,
)
_HEADERS_IN = {
    "X-Request-ID": "A name for this call, echoed; made when it is missing or may not go into a header.",
    "X-Request-Timeout-Ms": "How long the caller waits, in whole milliseconds; then 504. `x-envoy-expected-rq-timeout-ms` is read too.",
    "traceparent": "W3C trace context.",
}
_HEADERS_OUT = {
    "X-Request-ID": "The call's name.",
    "X-Model-Version": "Version of the checkpoint.",
    "X-Context": "The handle of the context in the cache, where one was ranked for.",
    "X-Context-Cache": "`hit` when the user's context came whole from the cache, else `miss`.",
    "Server-Timing": "Milliseconds of parse, queue, forward and serialize.",
}


def components() -> dict[str, Any]:
    """The JSON Schemas of all bodies and replies by name, for `components.schemas` of the document."""
    _, found = msgspec.json.schema_components([*EXAMPLES, *REPLIES], ref_template=_REF)
    _type_choices(found)
    return found


def _type_choices(schema: Any) -> None:
    """Say of every choice that it is a string; generators of clients want to know."""
    if isinstance(schema, dict) and isinstance(schema.get("enum"), list):
        schema["type"] = "string"
    for inner in schema.values() if isinstance(schema, dict) else schema if isinstance(schema, list) else ():
        _type_choices(inner)


def body_of(kind: type[Struct], further: Mapping[str, str] | None = None) -> dict[str, Any]:
    """`openapi_extra` of a route that takes this request: its schema, examples and headers. `further`: headers with their descriptions."""
    examples = {name: {"summary": name.capitalize(), "value": value} for name, value in EXAMPLES[kind].items()}
    content = {"schema": {"$ref": _REF.format(name=kind.__name__)}, "examples": examples}
    headers = [
        {"name": name, "in": "header", "required": False, "schema": {"type": "string"}, "description": text}
        for name, text in (_HEADERS_IN | dict(further or {})).items()
    ]
    return {"requestBody": {"required": True, "content": {"application/json": content}}, "parameters": headers}


def reply_of(kind: type[Struct], description: str) -> dict[int | str, dict[str, Any]]:
    """`responses` of a route that answers 200 with this reply."""
    headers = {name: {"schema": {"type": "string"}, "description": text} for name, text in _HEADERS_OUT.items()}
    content = {"application/json": {"schema": {"$ref": _REF.format(name=kind.__name__)}}}
    return {200: {"description": description, "content": content, "headers": headers}}


def problems_of(*kinds: type[errors.ServiceError]) -> dict[int | str, dict[str, Any]]:
    """`responses` of a route that answers with these problems."""
    content = {PROBLEM_TYPE: {"schema": {"$ref": _REF.format(name="Problem")}}}
    found: dict[int | str, dict[str, Any]] = {}
    for kind in sorted(kinds, key=lambda kind: kind.status):
        text = f"`{kind.code}`: {(kind.__doc__ or '').splitlines()[0]}"
        before = found.get(kind.status)
        found[kind.status] = {"description": f"{before['description']} {text}" if before else text, "content": content}
    return found


PROBLEMS = problems_of(*_PROBLEM_KINDS)
"""`responses` of every route that ranks."""
