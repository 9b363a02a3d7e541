"""What requests may say, declared once: name, type, bounds, default, description and example of every field.

msgspec makes the JSON Schema for `/docs` from these types, `rules` checks bodies by them, `tensors` takes its names and bounds from them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal, get_args, get_type_hints

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType
from msgspec.json import schema_components

from app.request import rules
from app.request.ids import ID_RULES, MAX_ID, are_ids
from app.request.vocabulary import Vocabulary
from weights.text_ids import MAX_TEXT_BYTES

MAX_TIME = 253_402_300_799  # the last second of the year 9999: milliseconds do not fit
MAX_WEIGHT = 1e9
MAX_ACTION_VALUE = 1e6
MAX_SIZE = 2**63 - 1
DEFAULT_K = 200
REQUEST_ID_PATTERN = r"^[A-Za-z0-9_.:@/+=-]{1,128}$"
REQUEST_ID_RULE = "must be 1 to 128 letters, digits or any of _ . : @ / + = -"
HANDLE_PATTERN = r"^[0-9a-f]{32}$"
HANDLE_RULE = "must be a handle as POST /context and replies give it: 32 lower-case hexadecimal digits"
NOBODY = "is required, or context in its place"
TWICE = {"user_id", "history"}
TWO_USERS = "stands in place of user_id and history, which must not be there as well"

_REQUEST_ID, _HANDLE = re.compile(REQUEST_ID_PATTERN, re.ASCII), re.compile(HANDLE_PATTERN, re.ASCII)


def is_request_id(value: Any) -> bool:
    """Whether a value may name a request. The name goes into headers and logs unchanged."""
    return type(value) is str and _REQUEST_ID.fullmatch(value) is not None


def is_handle(value: Any) -> bool:
    """Whether a value has the form of a context handle."""
    return type(value) is str and _HANDLE.fullmatch(value) is not None


NAME_RULE = rules.fulfils(is_request_id, REQUEST_ID_RULE)
_HANDLE_RULE = rules.fulfils(is_handle, HANDLE_RULE)
_ONE_USER = rules.then(
    rules.fulfils(lambda value: "user_id" in value or "context" in value, NOBODY, ".user_id"),
    rules.fulfils(lambda value: not ("context" in value and value.keys() & TWICE), TWO_USERS, ".context"),
)


def about(description: str, example: Any = None, default: Any = None, *examples: Any) -> Meta:
    """A field's description, examples and default for `/docs`."""
    return Meta(
        description=description,
        examples=None if example is None else [example, *examples],
        extra_json_schema=None if default is None else {"default": default},
    )


def checked(rule: Any, *tensor: str, **bounds: Any) -> Meta:
    """How a type is checked. `rule` makes the rule for a vocabulary; without one the bounds are the whole check. `tensor`: the datatype of
    these values as a tensor, then the name of the extra last axis if they have one."""
    extra = {"rule": rule, "tensor": tensor}
    return Meta(extra={name: value for name, value in extra.items() if value}, **bounds)


WeightSet = Literal["default", "x-2026-09"]
"""Names of `weights.actions.SCORE_WEIGHT_SETS`."""

_Integer = Annotated[int, Meta(extra_json_schema={"minimum": 0, "maximum": MAX_ID})]
_Text = Annotated[
    str,
    Meta(
        min_length=1,
        max_length=MAX_TEXT_BYTES,
        extra_json_schema={
            "description": "Decimal without leading zeros, or where ids are texts 1 to 128 bytes of UTF-8."
        },
    ),
]


def _id_rule(vocabulary: Vocabulary) -> rules.Rule:
    ids = vocabulary.ids
    return rules.rule((lambda values: are_ids(values, ids), ID_RULES[ids]))


Id = Annotated[_Integer | _Text, checked(_id_rule, "UINT64")]
ID_TEXT = "An integer of 64 bits without sign or its decimal string; a text where the ids of `/info` are texts."
Surface = Annotated[
    int, checked(lambda vocabulary: rules.number(0, vocabulary.product_surfaces - 1, whole=True), "INT64", ge=0)
]
Time = Annotated[int, checked(None, "INT64", ge=0, le=MAX_TIME)]
Count = Annotated[int, Meta(ge=1, extra_json_schema={"maximum": MAX_ID})]
Size = Annotated[int, Meta(ge=0, le=MAX_SIZE)]
Dwell = Annotated[float, checked(None, "FP32", ge=0)]
Actions = Annotated[
    list[str] | dict[str, Annotated[float, Meta(ge=0, le=MAX_ACTION_VALUE)]] | _Integer,
    checked(rules.actions_taken(MAX_ACTION_VALUE), "FP32", "A"),
]
Weights = Annotated[
    dict[str, Annotated[float, Meta(ge=-MAX_WEIGHT, le=MAX_WEIGHT)]] | WeightSet,
    checked(rules.weights_given(-MAX_WEIGHT, MAX_WEIGHT, get_args(WeightSet)), "FP64", "A"),
]
Names = Annotated[list[str], checked(rules.known_names)]
OwnWeights = Annotated[
    Weights | UnsetType,
    about("Weights of the combined score by action, in place of the checkpoint's own; or the name of published ones."),
]
Score = Annotated[
    Literal["sum", "offset"] | UnsetType,
    about(
        "What the combined score is: the weighted sum s, or with its published offset, which lifts it above 0: s + 0.001, and where s is "
        "negative (s + N) / T · 0.001, with the sums N of the negative weights' and T of all weights' magnitudes.",
        default="sum",
    ),
]
Wanted = Annotated[
    Names | UnsetType, about("Which actions' probabilities to return, in this order; all of them when missing.")
]
Name = Annotated[str, checked(lambda _: NAME_RULE, max_length=128, extra_json_schema={"pattern": REQUEST_ID_PATTERN})]
_NAME_OR_NONE = rules.fulfils(lambda value: value == "" or is_request_id(value), REQUEST_ID_RULE)
OptionalName = Annotated[str, checked(lambda _: _NAME_OR_NONE)]
Handle = Annotated[
    Annotated[str, checked(lambda _: _HANDLE_RULE, extra_json_schema={"pattern": HANDLE_PATTERN})] | UnsetType,
    about(
        "The handle of a context, in place of `user_id` and `history`: `POST /context` and replies give it.", "0" * 32
    ),
]


def _short_text(least: int) -> Meta:
    sentence = "must be a short text" + (" that is not empty" if least else "")
    fits = rules.fulfils(lambda name: type(name) is str and least <= len(name) <= 100, sentence)
    return checked(lambda _: fits, min_length=least or None, max_length=100)


Topic = Annotated[str, _short_text(0)]
NewTopic = Annotated[str, _short_text(1)]


class Strict(Struct, forbid_unknown_fields=True):
    """Unknown fields are errors, and so is `null`. `whole`, where a struct has it: the rule that holds between the fields."""


class Post(Strict):
    """What a history item and a candidate have in common."""

    post_id: Annotated[
        Id,
        about(
            f"{ID_TEXT} Echoed as it came. 0 is padding and carries no embedding.", 90, None, "64f1c0ffee0ddba11ab1e042"
        ),
    ]
    author_id: Annotated[Id, about(f"{ID_TEXT} 0 means unknown.", 7, None, "author:7")]
    product_surface: Annotated[
        Surface | UnsetType,
        about("Where the post is or was shown: an index below the checkpoint's number of surfaces.", 0, 0),
    ] = UNSET


class HistoryItem(Post):
    """A post that the user has met before, and what the user did."""

    actions: Annotated[
        Actions | UnsetType,
        about(
            "Names of the actions taken, or name → value; a decimal string is an index. Or one integer: bit a is action a.",
            ["favorite", "dwell"],
            [],
        ),
    ] = UNSET
    dwell_time: Annotated[
        Dwell | UnsetType,
        about("Seconds spent on the post; 0 where unknown. Checked and ignored without a dwell input.", 12.5, 0),
    ] = UNSET


class Candidate(Post):
    """A post to score."""

    created_at: Annotated[
        Time | UnsetType,
        about("Unix seconds; 0 where unknown. Checked and ignored without a post-age input.", 1779990000, 0),
    ] = UNSET


def _columns(item: type[Post]) -> Any:
    """The columns form of a post: the same fields in the same order, each a list. An optional column may be left out."""
    columns: list[Any] = []
    required, many = rules.required_of(item), _any(list)
    for name, hint in get_type_hints(item, include_extras=True).items():
        *own, said = hint.__metadata__
        kind = Annotated[(hint.__origin__, *own)] if own else get_args(hint.__origin__)[0]
        entries = about(f"One entry per item. {said.description}", [said.examples[0]])
        if name in required:
            columns.append((name, Annotated[many[kind], entries]))
        else:
            columns.append((name, Annotated[many[kind] | UnsetType, entries], UNSET))
    doc = {"__doc__": f"{item.__name__} in arrays of equal length: the fast form."}
    return msgspec.defstruct(f"{item.__name__}Columns", columns, bases=(Strict,), namespace=doc)


def _any(value: Any) -> Any:
    return value


HistoryColumns, CandidateColumns = _columns(HistoryItem), _columns(Candidate)
History = Annotated[list[HistoryItem] | HistoryColumns, checked(rules.posts(HistoryItem, 0))]  # type: ignore[valid-type]
Candidates = Annotated[
    Annotated[list[Candidate], Meta(extra_json_schema={"minItems": 1})] | CandidateColumns,  # type: ignore[valid-type]
    checked(rules.posts(Candidate, 1)),
]


_USER = about(f"{ID_TEXT} 0 means anonymous.", "1868434417286410240", None, "user:b7e2")
OwnHistory = Annotated[
    History | UnsetType,
    about("Oldest → newest, in either form. Beyond the model's window the newest are kept.", default=[]),
]
RequestName = Annotated[Name | UnsetType, about("A name for this request, echoed and used in logs.")]


_BY_HANDLE: dict[str, Any] = {
    "anyOf": [
        {"required": ["user_id"], "properties": {"context": False}},
        {"required": ["context"], "properties": {"user_id": False, "history": False}},
    ]
}


def published(kinds: Sequence[type[Struct]], template: str) -> tuple[Sequence[dict[str, Any]], dict[str, Any]]:
    """A JSON Schema reference for each type, made with this template, and the schemas they refer to."""
    references, found = schema_components(kinds, ref_template=template)
    for kind in kinds:
        found[kind.__name__] |= _BY_HANDLE if issubclass(kind, UserRequest) else {}
    return references, found


class ContextRequest(Strict, kw_only=True):
    """A user and that user's history, to be computed ahead of requests that name them by a handle."""

    user_id: Annotated[Id, _USER]
    history: OwnHistory = UNSET
    request_id: RequestName = UNSET


class UserRequest(Strict, kw_only=True):
    """Whom a request is for: `user_id` with `history`, or `context`."""

    whole: ClassVar[rules.Rule] = _ONE_USER

    user_id: Annotated[Id | UnsetType, _USER] = UNSET
    history: OwnHistory = UNSET
    context: Handle = UNSET
    impression_ts: Annotated[
        Time | UnsetType,
        about("Unix seconds from which ages are counted; 0 or missing: every age is unknown.", 1780000000, 0),
    ] = UNSET
    request_id: RequestName = UNSET


class RankRequest(UserRequest, kw_only=True):
    """One user, that user's history, and the candidates to score."""

    candidates: Annotated[
        Candidates, about("The posts to score, at least one: a list of objects or one object of equal-length arrays.")
    ]
    reply: Annotated[
        Literal["objects", "columns"] | UnsetType,
        about("Form of the reply's `candidates`: objects, or arrays, which are shorter and faster.", default="objects"),
    ] = UNSET
    weights: OwnWeights = UNSET
    score: Score = UNSET
    top_k: Annotated[Count | UnsetType, about("Sort the reply by score, best first, and keep this many.")] = UNSET
    actions_wanted: Wanted = UNSET


class ExplainRequest(RankRequest, kw_only=True):
    """A request of /rank, and which of its candidates to explain."""

    explain: Annotated[
        list[Id],
        Meta(min_length=1),
        about("Post ids of candidates; where several have the same one, the first is meant.", [90]),
    ]


class RankBatch(Strict):
    """Requests that are ranked together, each on its own terms."""

    requests: Annotated[
        list[RankRequest], Meta(min_length=1), about("A bare array of them is taken as well, and answered by one.")
    ]


class RetrieveRequest(UserRequest, kw_only=True):
    """One user, that user's history, and which posts of the corpus may come back."""

    k: Annotated[
        Annotated[int, Meta(ge=1)] | UnsetType,
        about(
            "How many posts to return at most (fewer by default where the server allows fewer, or the filters leave fewer).",
            default=DEFAULT_K,
        ),
    ] = UNSET
    exclude: Annotated[list[Id] | UnsetType, about("Posts that must not come back.", default=[])] = UNSET
    exclude_history: Annotated[
        bool | UnsetType, about("Whether the posts of the history are excluded as well.", default=True)
    ] = UNSET
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


class RecommendRequest(RetrieveRequest, kw_only=True):
    """What to retrieve, and how the posts are then scored."""

    weights: OwnWeights = UNSET
    score: Score = UNSET
    top_k: Annotated[Count | UnsetType, about("Return this many of the retrieved posts; all when missing.")] = UNSET
    actions_wanted: Wanted = UNSET


class Upsert(Strict):
    """A post that comes into a corpus."""

    post_id: Id
    author_id: Id
    created_at: Time | UnsetType = UNSET
    topic: NewTopic | UnsetType = UNSET


class Change(Strict):
    """A change of a corpus."""

    upsert: list[Upsert] | UnsetType = UNSET
    delete: list[Id] | UnsetType = UNSET
