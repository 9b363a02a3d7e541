"""What requests and replies look like, declared once: the decoders, the checks and FastAPI's document all come from these types.

A request is checked in two steps. `decode` checks what holds for every checkpoint: JSON, types, required fields, sizes. `app.columns`
then checks what one checkpoint knows: its actions, its surfaces, its kind of ids, and the bounds of every value.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from contextlib import suppress
from functools import cache
from typing import Annotated, Any, Literal, Protocol, TypeVar

import msgspec
import orjson
from msgspec import UNSET, Meta, Struct, UnsetType, inspect

from app.errors import InvalidRequest, MalformedJson, TooLarge
from weights.text_ids import MAX_TEXT_BYTES
from weights.values import MAX_ACTION_VALUE, MAX_ID, MAX_SCORE_WEIGHT, MAX_TIME, time_problem

DEFAULT_K = 200
MAX_COUNT = 2**63 - 1
REQUEST_ID_PATTERN = r"^[A-Za-z0-9_.:@/+=-]{1,128}$"
REQUEST_ID_RULE = "must be 1 to 128 letters, digits or any of _ . : @ / + = -"
HANDLE_PATTERN = r"^[0-9a-f]{32}$"
HANDLE_RULE = "must be a handle as POST /context and replies give it: 32 lower-case hexadecimal digits"
NO_USER = "is required, or context in its place"
TWO_USERS = "stands in place of user_id and history, which must not be there as well"

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


class HistoryColumns(Strict):
    """History items in arrays of equal length, one entry an item: the fast form. The fields mean what they mean in `HistoryItem`."""

    post_id: list[PostId]
    author_id: list[AuthorId]
    product_surface: list[Surface] | UnsetType = UNSET
    actions: list[ActionsTaken] | UnsetType = UNSET
    dwell_time: list[Dwell] | UnsetType = UNSET


class CandidateColumns(Strict):
    """Candidates in arrays of equal length, one entry a candidate: the fast form. The fields mean what they mean in `Candidate`."""

    post_id: list[PostId]
    author_id: list[AuthorId]
    product_surface: list[Surface] | UnsetType = UNSET
    created_at: list[CreatedAt] | UnsetType = UNSET


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


# --- Open Inference Protocol (begin) ---------------------------------------------------------------------------------------------------
# --- Open Inference Protocol (end) -----------------------------------------------------------------------------------------------------


# --- Reading a body --------------------------------------------------------------------------------------------------------------------

T = TypeVar("T")
R = TypeVar("R", bound=Request)


class Limits(Protocol):
    """The settings that bound one request."""

    @property
    def max_values(self) -> int:
        """JSON values in a body."""

    @property
    def max_candidates(self) -> int:
        """Candidates."""

    @property
    def max_history(self) -> int:
        """History items."""

    @property
    def max_excluded(self) -> int:
        """Excluded posts."""


def read(decoder: msgspec.json.Decoder[R], body: bytes | bytearray, limits: Limits, actions: Collection[str] = ()) -> R:
    """Decode and check a request of bounded size; `actions` as in `decode`.

    Raises TooLarge before it decodes a body that would be slow to read, and for more items than the limits allow; MalformedJson;
    InvalidRequest.
    """
    check_cost(body, limits.max_values)
    asked = decode(decoder, body, actions)
    most = {"candidates": limits.max_candidates, "history": limits.max_history, "exclude": limits.max_excluded}
    for name, count in asked.sizes().items():
        if count > most[name]:
            raise TooLarge(f"{name}: {count} items, and at most {most[name]} are taken.")
    asked.check()
    return asked


def check_cost(body: bytes | bytearray, max_values: int) -> None:
    """Raise TooLarge for a body that is slow to read: its values are estimated from the bytes that begin, separate or escape them."""
    if len(body) > max_values and len(body) - len(body.translate(None, b",[{\\")) > max_values:
        raise TooLarge(f"The body holds more than {max_values} values.")


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
_UNKNOWN, _MISSING, _NO_CHOICE = "Object contains unknown field", "Object missing required field `", "Invalid enum value"


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
