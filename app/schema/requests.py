"""Bodies of the endpoints that rank and retrieve, and of changes of posts. `app.features` checks what depends on the checkpoint.

The bounds of an optional field stand on the type inside: `Annotated[str, Meta(max_length=128)] | UnsetType`.
"""

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
    ActionsWanted,
    AuthorId,
    ContentCodes,
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
    Weights,
    about,
    is_handle,
    is_request_id,
)
from model.exploration import MAX_TEMPERATURE, MIN_TEMPERATURE
from weights.values import MAX_TIME, time_problem

DEFAULT_K = 200
NO_USER = "is required, unless context is given"
TWO_USERS = "replaces user_id and history, so they must not be given too"


class Post(Strict, gc=False):
    """What a history item and a candidate have in common."""

    post_id: PostId
    author_id: AuthorId
    product_surface: Surface = 0
    codes: ContentCodes | UnsetType = UNSET


class HistoryItem(Post, gc=False):
    """A post that the user has seen, and what the user did."""

    actions: ActionsTaken = 0
    dwell_time: Dwell = 0.0


class Candidate(Post, gc=False):
    """A post to score."""

    created_at: CreatedAt = 0


_ONE_A_POST = about("One entry for each post, in the same order as the other arrays.")


class HistoryColumns(Strict):
    """The history as arrays of equal length, one entry for each item: shorter and faster to read. The fields are those of `HistoryItem`."""

    post_id: Annotated[list[PostId], _ONE_A_POST]
    author_id: Annotated[list[AuthorId], _ONE_A_POST]
    product_surface: Annotated[list[Surface] | UnsetType, _ONE_A_POST] = UNSET
    codes: Annotated[list[ContentCodes] | UnsetType, _ONE_A_POST] = UNSET
    actions: Annotated[list[ActionsTaken] | UnsetType, _ONE_A_POST] = UNSET
    dwell_time: Annotated[list[Dwell] | UnsetType, _ONE_A_POST] = UNSET


class CandidateColumns(Strict):
    """The candidates as arrays of equal length, one entry for each: shorter and faster to read. The fields are those of `Candidate`."""

    post_id: Annotated[list[PostId], _ONE_A_POST]
    author_id: Annotated[list[AuthorId], _ONE_A_POST]
    product_surface: Annotated[list[Surface] | UnsetType, _ONE_A_POST] = UNSET
    codes: Annotated[list[ContentCodes] | UnsetType, _ONE_A_POST] = UNSET
    created_at: Annotated[list[CreatedAt] | UnsetType, _ONE_A_POST] = UNSET


History = Annotated[
    list[HistoryItem] | HistoryColumns,
    about(
        "What the user did, oldest first: a list of objects, or one object of equal-length arrays. If it is longer than the model's "
        "window, the newest items are used."
    ),
]
Candidates = Annotated[
    list[Candidate] | CandidateColumns,
    about("The posts to score, at least one: a list of objects or one object of equal-length arrays."),
]
Items = list[HistoryItem] | list[Candidate] | HistoryColumns | CandidateColumns


def count_of(items: Items) -> int:
    """The number of posts, in either form."""
    return len(items) if isinstance(items, list) else len(items.post_id)


class Exploration(Strict):
    """How to draw the order of the candidates instead of sorting them by score."""

    temperature: Annotated[
        float,
        Meta(ge=MIN_TEMPERATURE, le=MAX_TEMPERATURE),
        about(
            "In units of the score. The rank is drawn: the first place goes to a candidate with a probability proportional to "
            "exp(score / temperature), the next one in the same way to one of the others. The smaller the temperature, the closer the "
            "order is to that of the scores.",
            0.1,
        ),
    ]


Explore = Annotated[
    Exploration | UnsetType,
    about(
        "Draw the ranks at random, so that a log of what was served can say how another order would have done. The draw depends on the "
        "name of the request (`request_id`, or `X-Request-ID`) and the post ids alone. Scores and probabilities stay as they are. Default: "
        "rank by score."
    ),
]


class Request(Strict, kw_only=True):
    """A body that `schema.read` reads. `sizes` counts its items by the names of the limits on them. `check` makes the checks that types
    cannot express. Each kind of body has its own."""

    def sizes(self) -> dict[str, int]:
        """The numbers of items by field."""
        raise NotImplementedError

    def check(self) -> None:
        """Raise InvalidRequest for the first fault that does not depend on the checkpoint."""
        raise NotImplementedError


class ContextRequest(Request, kw_only=True):
    """A user and that user's history, whose context is computed in advance. Later requests name it by a handle."""

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
            "The handle of a context, in place of `user_id` and `history`. It comes from `POST /context` or an earlier reply.",
            "0" * 32,
            pattern=HANDLE_PATTERN,
        ),
    ] = UNSET
    impression_ts: Annotated[
        Time,
        about(
            "When the posts are shown, in Unix seconds: their ages are counted from it. If it is 0 or missing, every age is unknown.",
            1780000000,
        ),
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
        about("Form of the reply's `candidates`: `objects`, or `columns`, which are shorter and faster to read."),
    ] = "objects"
    weights: Weights = UNSET
    score: Score = "sum"
    top_k: Annotated[Count | UnsetType, about("Sort the reply by rank, best first, and keep this many.")] = UNSET
    actions_wanted: ActionsWanted = UNSET
    explore: Explore = UNSET

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
    """A body of /rank, and which of its candidates to explain."""

    explain: Annotated[
        list[Id],
        Meta(min_length=1),
        about("Post ids of candidates. If several candidates have the same id, the first one is explained.", [90]),
    ]

    def check(self) -> None:
        """Raise InvalidRequest also for a drawn order, of which there is nothing to explain."""
        RankRequest.check(self)
        if self.explore is not UNSET:
            raise InvalidRequest(
                "explore", "must be left out: an explanation is of scores, which exploration does not change"
            )


class BatchRequest(Strict):
    """Several rankings in one call."""

    requests: Annotated[
        list[RankRequest],
        Meta(min_length=1),
        about("The bodies of /rank. If you send a plain array of them instead, you get a plain array back."),
    ]


class RetrieveRequest(UserRequest, kw_only=True):
    """One user, that user's history, and which posts of the corpus may be returned."""

    k: Annotated[
        Annotated[int, Meta(ge=1)] | UnsetType,
        about(
            f"How many posts to return at most. If the filters leave fewer, you get fewer. The default is {DEFAULT_K}, or the server's "
            "limit if that is lower.",
            default=DEFAULT_K,
        ),
    ] = UNSET
    exclude: Annotated[list[Id], about("Posts that must not be returned.", ["18"])] = msgspec.field(
        default_factory=list
    )
    exclude_history: Annotated[bool, about("Whether to exclude the posts of the history too.")] = True
    topics: Annotated[
        Annotated[list[Topic], Meta(max_length=1000)] | UnsetType,
        about("Only posts of any of these topics. A name that the corpus does not have matches nothing."),
    ] = UNSET
    min_score: Annotated[
        Annotated[float, Meta(ge=-1, le=1)] | UnsetType, about("Only posts with at least this score.")
    ] = UNSET
    max_age_seconds: Annotated[
        Annotated[int, Meta(ge=1, le=MAX_TIME)] | UnsetType,
        about(
            "Only posts created at most this long before `impression_ts`, which is then required. Posts of unknown age are left out."
        ),
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
    """Which posts to retrieve, and how to score them."""

    weights: Weights = UNSET
    score: Score = "sum"
    top_k: Annotated[
        Count | UnsetType, about("Return only this many of the retrieved posts, best first. Default: all.")
    ] = UNSET
    actions_wanted: ActionsWanted = UNSET
    explore: Explore = UNSET


class PostUpsert(Strict):
    """A post to add to a corpus, or to replace in it."""

    post_id: PostId
    author_id: AuthorId
    created_at: CreatedAt = 0
    topic: Annotated[str, Meta(min_length=1, max_length=100)] | UnsetType = UNSET
    codes: ContentCodes | UnsetType = UNSET


class PostsChange(Strict, kw_only=True):
    """A change of a corpus: posts to add or replace, and ids of posts to delete."""

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
