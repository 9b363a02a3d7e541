"""Bodies of the endpoints that rank and retrieve, and of changes of posts. `app.columns` checks what one checkpoint knows."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from app.errors import InvalidRequest
from app.schema.fields import (
    HANDLE_PATTERN,
    HANDLE_RULE,
    REQUEST_ID_RULE,
    ActionsTaken,
    AuthorId,
    Count,
    CreatedAt,
    Dwell,
    Id,
    PostId,
    RequestName,
    Score,
    Strict,
    Surface,
    Time,
    Topic,
    UserId,
    Wanted,
    Weights,
    about,
    is_handle,
    is_request_id,
)
from weights.values import MAX_TIME, time_problem

DEFAULT_K = 200
NO_USER = "is required, or context in its place"
TWO_USERS = "stands in place of user_id and history, which must not be there as well"


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
    history: History = msgspec.field(default_factory=list)
    request_id: RequestName = UNSET

    def sizes(self) -> dict[str, int]:
        """How many history items there are."""
        return {"history": count_of(self.history)}

    def check(self) -> None:
        """Raise InvalidRequest for columns of different lengths or a bad name."""
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
        """How many history items there are; none where a context is named."""
        return {"history": 0 if self.history is UNSET else count_of(self.history)}

    def check(self) -> None:
        """Raise InvalidRequest unless it names one user in one way, in columns of equal length, at a time that can be."""
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
        """How many candidates and history items there are."""
        history = 0 if self.history is UNSET else count_of(self.history)
        return {"candidates": count_of(self.candidates), "history": history}

    def check(self) -> None:
        """Raise InvalidRequest also for candidates in columns of different lengths, or for none."""
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
    exclude: Annotated[list[Id], about("Posts that must not come back.", ["18"])] = msgspec.field(default_factory=list)
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
        """How many history items and excluded posts there are."""
        return {"history": 0 if self.history is UNSET else count_of(self.history), "exclude": len(self.exclude)}

    def check(self) -> None:
        """Raise InvalidRequest also for a limit of age without a time to count from."""
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

    upsert: list[PostUpsert] = msgspec.field(default_factory=list)
    delete: list[Id] = msgspec.field(default_factory=list)


def _check_posts(name: str, items: Items) -> None:
    """Raise InvalidRequest for arrays of different lengths."""
    if not isinstance(items, list):
        columns = [column for column in msgspec.structs.astuple(items) if column is not UNSET]
        if len({*map(len, columns)}) > 1:
            raise InvalidRequest(name, "must hold arrays of equal length")


def _check_name(request_id: str | UnsetType) -> None:
    if request_id is not UNSET and not is_request_id(request_id):
        raise InvalidRequest("request_id", REQUEST_ID_RULE)
