"""What a request to rank and its reply are, as pydantic models: the plain definition behind `/docs`. Not on the path of a request.

`body` and `validate` check requests by the same bounds; tests hold them to the same verdict.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, create_model, model_validator

from app.request.bounds import ID_PATTERN, MAX_ACTION_VALUE, MAX_ID, MAX_TIME, MAX_WEIGHT, REQUEST_ID_PATTERN


def _fits(text: str) -> str:
    if int(text) > MAX_ID:
        raise ValueError("must be below 2^64")
    return text


DecimalId = Annotated[str, Field(strict=True, pattern=ID_PATTERN, description="decimal"), AfterValidator(_fits)]
Id = Annotated[int, Field(strict=True, ge=0, le=MAX_ID)] | DecimalId
Count = Annotated[int, Field(strict=True, ge=1, le=MAX_ID)]
Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]
Seconds = Annotated[int, Field(strict=True, ge=0, le=MAX_TIME)]
Text = Annotated[str, Field(strict=True)]
Actions = list[Text] | dict[Text, Annotated[Number, Field(ge=0, le=MAX_ACTION_VALUE)]]


class Strict(BaseModel):
    """Unknown fields are errors; descriptions are the docstrings of the fields."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)


class Post(Strict):
    """What a history item and a candidate have in common."""

    post_id: Id = Field(examples=[90])
    """Unsigned 64-bit id, as an integer or a decimal string; echoed as it came. 0 is padding and carries no embedding."""
    author_id: Id = Field(examples=[7])
    """Unsigned 64-bit id, as an integer or a decimal string. 0 means unknown."""
    product_surface: Annotated[int, Field(strict=True, ge=0)] = Field(default=0, examples=[0])
    """Where the post is or was shown: an index below the checkpoint's number of surfaces."""


class HistoryItem(Post):
    """A post that the user has met before, and what the user did."""

    actions: Actions = Field(default=[], examples=[["favorite", "dwell"]])
    """Names of the actions taken, or name → value. A decimal string is an action's index."""
    dwell_time: Annotated[Number, Field(ge=0)] = Field(default=0, examples=[12.5])
    """Seconds spent on the post; 0 where unknown. Checked and ignored by a checkpoint without a dwell input."""


class Candidate(Post):
    """A post to score."""

    created_at: Seconds = Field(default=0, examples=[1779990000])
    """Unix seconds; 0 where unknown. Checked and ignored by a checkpoint without a post-age input."""


class _Columns(Strict):
    @model_validator(mode="after")
    def _equally_long(self) -> Self:
        if len({len(getattr(self, name)) for name in self.model_fields_set}) > 1:
            raise ValueError("arrays must be equally long")
        return self


def _columns(item: type[Post]) -> Any:
    """The array form of an item: the same fields, each a list. Optional ones may be left out whole."""
    fields: dict[str, Any] = {}
    for name, field in item.model_fields.items():
        kind: Any = Annotated[field.annotation, *field.metadata] if field.metadata else field.annotation
        description = f"One entry an item. {field.description}"
        example = [[field.examples[0]]] if field.examples else None
        default: dict[str, Any] = {} if field.is_required() else {"default_factory": list}
        fields[name] = (list[kind], Field(description=description, examples=example, **default))
    about = f"{item.__name__} in arrays of equal length: the fast form."
    return create_model(f"{item.__name__}Columns", __base__=_Columns, __doc__=about, **fields)


def absent() -> Any:
    """A field that may be left out, and whose default is not one value: `null` is no way to leave it out."""

    def drop(schema: dict[str, Any]) -> None:
        schema.pop("default", None)

    return Field(default=None, json_schema_extra=drop)


HistoryItemColumns = _columns(HistoryItem)
CandidateColumns = _columns(Candidate)


class RankRequest(Strict):
    """One user, that user's history, and the candidates to score."""

    user_id: Id = Field(examples=["1868434417286410240"])
    """Unsigned 64-bit id, as an integer or a decimal string. 0 means anonymous."""
    history: list[HistoryItem] | HistoryItemColumns = []  # type: ignore[valid-type]
    """Oldest → newest, as a list of objects or one object of equal-length arrays. Beyond the model's window the newest are kept."""
    candidates: Annotated[list[Candidate], Field(min_length=1)] | CandidateColumns  # type: ignore[valid-type]
    """The posts to score, at least one, as a list of objects or one object of equal-length arrays."""
    impression_ts: Seconds = Field(default=0, examples=[1780000000])
    """Unix seconds of the impression; ages are counted from it. 0 or missing: every age is unknown, so a reply never depends on
    the server's clock."""
    weights: dict[Text, Annotated[Number, Field(ge=-MAX_WEIGHT, le=MAX_WEIGHT)]] = absent()
    """Weights of the combined score by action, in place of the checkpoint's own."""
    top_k: Count = absent()
    """Sort the reply by score, best first, and keep this many."""
    actions_wanted: list[Text] = absent()
    """Which actions' probabilities to return, in this order; all of them when missing."""
    request_id: Annotated[str, Field(strict=True, pattern=REQUEST_ID_PATTERN)] = absent()
    """A name for this request, echoed in the reply and used in logs."""
    reply: Literal["objects", "columns"] = "objects"
    """Form of the reply's `candidates`: a list of objects, or one object of arrays, which is shorter and faster."""

    @model_validator(mode="after")
    def _not_empty(self) -> Self:
        if isinstance(self.candidates, _Columns) and not self.candidates.post_id:
            raise ValueError("candidates must not be empty")
        return self


class RankBatch(Strict):
    """Requests that are ranked together, each on its own terms."""

    requests: list[RankRequest] = Field(min_length=1)
    """The requests. A bare array of them is taken as well, and answered by a bare array."""


class ModelVersion(Strict):
    """The checkpoint that computed the scores."""

    name: str
    """Name of the checkpoint."""
    version: str
    """Version of the checkpoint."""


class RankedCandidate(Strict):
    """One candidate's scores. They depend on the user, the history and this candidate, on nothing else."""

    post_id: Id
    """As it was sent."""
    score: float
    """Σ weight × probability over the weights in force."""
    rank: int
    """1 is best; equal scores keep the order of the request."""
    probabilities: list[float]
    """One for each of the reply's `actions`."""
    continuous: dict[str, float]
    """Predicted quantities by name, such as `dwell_time` in seconds; empty where the checkpoint predicts none."""


class RankedColumns(Strict):
    """All candidates' scores in arrays, one entry a candidate; the fields mean what they mean in `RankedCandidate`."""

    post_id: list[Id]
    """As they were sent."""
    score: list[float]
    """Σ weight × probability over the weights in force."""
    rank: list[int]
    """1 is best."""
    probabilities: list[list[float]]
    """A row a candidate; a row has one for each of the reply's `actions`."""
    continuous: dict[str, list[float]]
    """Predicted quantities by name."""


class Timings(Strict):
    """Where the time went, in milliseconds."""

    parse: float
    """Reading JSON, checks, features."""
    queue: float
    """Waiting for the engine."""
    forward: float
    """The model."""


class Reply(Strict):
    """What is said beside scores."""

    history_used: int
    """History items that the model saw: the ranking model, where there are two."""
    history_dropped: int
    """Older items that did not fit the model's window."""
    request_id: str = absent()
    """The request's own, if it had one."""


class RankReply(Reply):
    """The ranking."""

    model: ModelVersion
    """What computed it."""
    actions: list[str]
    """Names of the probability columns."""
    candidates: list[RankedCandidate] | RankedColumns
    """In the order of the request, or best first with `top_k`; in the form that the request's `reply` names."""
    timings_ms: Timings
    """Where the time went."""


class FieldError(Strict):
    """One thing that is wrong."""

    field: str
    """Where, such as `candidates[3].post_id`."""
    message: str
    """What is wrong; never the value itself."""


class Problem(Strict):
    """Why there are no scores (RFC 9457)."""

    type: str
    """A URI that names the kind of problem."""
    title: str
    """The kind of problem, for people."""
    status: int
    """The HTTP status."""
    code: str
    """The kind of problem, for programs: stable."""
    detail: str
    """What went wrong this time."""
    error: str = absent()
    """The same as `detail`, under `/v2` alone: clients of that protocol look for it."""
    errors: list[FieldError] = absent()
    """The first ten things that are wrong with the request."""
    request_id: str = absent()
    """The value of X-Request-ID."""


class Failed(Strict):
    """A request of a batch that got no scores."""

    error: Problem
    """Why there are no scores."""


class BatchReply(Strict):
    """One entry a request, in their order."""

    results: list[RankReply | Failed]
    """Scores, or why there are none."""
