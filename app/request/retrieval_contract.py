"""What requests for posts and their replies are, as pydantic models. `contract` is what they share with a request to rank."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, model_validator

from app.request.bounds import MAX_TIME, MAX_WEIGHT, REQUEST_ID_PATTERN
from app.request.contract import (
    Count,
    HistoryItem,
    HistoryItemColumns,
    Id,
    ModelVersion,
    Number,
    RankedCandidate,
    Reply,
    Seconds,
    Strict,
    Text,
    absent,
)


class RetrieveRequest(Strict):
    """One user, that user's history, and which posts of the corpus may come back."""

    user_id: Id = Field(examples=["1868434417286410240"])
    """Unsigned 64-bit id, as an integer or a decimal string. 0 means anonymous, and then the history must hold a post."""
    history: list[HistoryItem] | HistoryItemColumns = Field(default=[])
    """As in /rank. Beyond the retrieval model's window the newest are kept; dwell times are checked and ignored."""
    k: Annotated[int, Field(strict=True, ge=1)] = 200
    """How many posts to return at most; fewer where the filters leave fewer."""
    exclude: list[Id] = Field(default=[])
    """Posts that must not come back."""
    exclude_history: Annotated[bool, Field(strict=True)] = True
    """Whether the posts of the history are excluded as well."""
    topics: Annotated[list[Annotated[Text, Field(max_length=100)]], Field(max_length=1000)] = absent()
    """Posts of any of these topics alone. A name that the corpus does not have matches nothing."""
    min_score: Annotated[Number, Field(ge=-1, le=1)] = absent()
    """Posts with this score or a higher one alone."""
    max_age_seconds: Annotated[int, Field(strict=True, ge=1, le=MAX_TIME)] = absent()
    """Posts that were created at most this long before `impression_ts`, which it needs. Posts of an unknown time are left out."""
    impression_ts: Seconds = Field(default=0, examples=[1780000000])
    """Unix seconds of the impression. 0 or missing: unknown, so a reply never depends on the server's clock."""
    request_id: Annotated[str, Field(strict=True, pattern=REQUEST_ID_PATTERN)] = absent()
    """A name for this request, echoed in the reply and used in logs."""

    @model_validator(mode="after")
    def _ages_have_a_time(self) -> Self:
        if self.max_age_seconds and not self.impression_ts:
            raise ValueError("max_age_seconds needs impression_ts")
        return self


class RecommendRequest(RetrieveRequest):
    """What to retrieve, and how the posts are then scored."""

    weights: dict[Text, Annotated[Number, Field(ge=-MAX_WEIGHT, le=MAX_WEIGHT)]] = absent()
    """Weights of the combined score by action, in place of the ranking checkpoint's own."""
    top_k: Count = absent()
    """Return this many of the retrieved posts; all of them when missing."""
    actions_wanted: list[Text] = absent()
    """Which actions' probabilities to return, in this order; all of them when missing."""


class CorpusVersion(Strict):
    """The corpus that was searched."""

    name: str
    """Name of the corpus."""
    version: str
    """Version of the corpus."""
    posts: int
    """How many posts a search without filters can return."""
    changes: int
    """How often it was changed since it was written."""


class RetrievedPost(Strict):
    """One post of the corpus. Its score depends on the user, the history and this post, on nothing else."""

    post_id: str
    """Decimal id."""
    author_id: str
    """Decimal id."""
    score: float
    """Cosine of the user's and the post's vectors."""
    rank: int
    """1 is best; equal scores go by the order of the corpus."""
    created_at: int
    """Unix seconds; 0 where unknown."""
    topics: list[str]
    """The post's topic, if it has one."""


class RetrieveTimings(Strict):
    """Where the time went, in milliseconds."""

    parse: float
    """Reading JSON, checks, features."""
    queue: float
    """Waiting for the scan."""
    encode: float
    """Computing the vectors of the users who share the scan."""
    search: float
    """Scanning the corpus."""


class RetrieveReply(Reply):
    """The best posts."""

    model: ModelVersion
    """The retrieval checkpoint."""
    corpus: CorpusVersion
    """What was searched."""
    posts: list[RetrievedPost]
    """Best first; none where the filters leave none."""
    visible: int
    """Posts that the filters left."""
    timings_ms: RetrieveTimings
    """Where the time went."""


class BothModels(Strict):
    """The checkpoints that answered."""

    retrieval: ModelVersion
    """What retrieved the posts."""
    ranker: ModelVersion
    """What scored them."""


class RecommendedPost(RankedCandidate):
    """One candidate's scores, and how it was retrieved."""

    retrieval_score: float
    """Its score in /retrieve."""
    retrieval_rank: int
    """Its rank in /retrieve."""


class RecommendTimings(RetrieveTimings):
    """Where the time went, in milliseconds. `queue` is that of both stages."""

    forward: float
    """The ranking model."""


class RecommendReply(Reply):
    """The best posts, ranked: what /rank says of what /retrieve returns."""

    models: BothModels
    """What computed it."""
    corpus: CorpusVersion
    """What was searched."""
    actions: list[str]
    """Names of the probability columns."""
    candidates: list[RecommendedPost]
    """Best first."""
    visible: int
    """Posts that the filters left."""
    timings_ms: RecommendTimings
    """Where the time went."""
