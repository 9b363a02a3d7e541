"""Types of the fields that several requests and replies share: what JSON may hold there, and how `/docs` describes it."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct, UnsetType

from model.bounds import MAX_CODE, MAX_CODE_LEVELS
from weights.text_ids import MAX_TEXT_BYTES
from weights.values import MAX_ACTION_VALUE, MAX_ID, MAX_SCORE_WEIGHT, MAX_TIME

MAX_COUNT = 2**63 - 1
REQUEST_ID_PATTERN = r"^[A-Za-z0-9_.:@/+=-]{1,128}$"
REQUEST_ID_RULE = "must be 1 to 128 letters, digits or any of _ . : @ / + = -"
HANDLE_PATTERN = r"^[0-9a-f]{32}$"
HANDLE_RULE = "must be a handle from POST /context or from a reply: 32 lower-case hexadecimal digits"

REF = "#/components/schemas/{name}"
"""Where the document has the schema of this name."""

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


class Strict(Struct, forbid_unknown_fields=True):
    """Unknown fields are errors, and so is `null`."""


WeightSet = Literal["default", "x-2026-09", "x-2026-10"]
"""Names of `weights.actions.SCORE_WEIGHT_SETS`."""

_IntegerId = Annotated[int, Meta(extra_json_schema={"minimum": 0, "maximum": MAX_ID})]
_TextId = Annotated[str, Meta(extra_json_schema={"minLength": 1, "maxLength": MAX_TEXT_BYTES})]
Id = _IntegerId | _TextId
_ID = "An unsigned 64-bit integer, or the same as a decimal string. If `ids` in `/info` is `text`: a string of 1 to 128 bytes."
Time = Annotated[int, Meta(extra_json_schema={"minimum": 0, "maximum": MAX_TIME})]
Count = Annotated[int, Meta(ge=1, le=MAX_COUNT)]
ActionValue = Annotated[float, Meta(extra_json_schema={"minimum": 0, "maximum": MAX_ACTION_VALUE})]
ScoreWeight = Annotated[float, Meta(extra_json_schema={"minimum": -MAX_SCORE_WEIGHT, "maximum": MAX_SCORE_WEIGHT})]
Actions = list[str] | dict[str, ActionValue] | _IntegerId

PostId = Annotated[Id, about(f"{_ID} Replies have it in the same form. 0 means no post.", 90)]
AuthorId = Annotated[Id, about(f"{_ID} 0 means unknown.", 7)]
Surface = Annotated[
    int,
    about("Where the post is or was shown: an index below `architecture.product_surfaces` of `/info`.", 0, minimum=0),
]
ActionsTaken = Annotated[
    Actions,
    about(
        "The actions taken: a list of names, or an object of name → value. A decimal string is taken as an index. Or one integer "
        "as a mask: bit a is action a of `/info`.",
        ["favorite", "dwell"],
    ),
]
Dwell = Annotated[
    float,
    about(
        "Seconds spent on the post; 0 if unknown. Checked, but ignored by a checkpoint without a dwell input.",
        12.5,
        minimum=0,
    ),
]
CreatedAt = Annotated[
    Time,
    about(
        "When the post was created, in Unix seconds; 0 if unknown. Checked, but ignored by a checkpoint without a post-age input.",
        1779990000,
    ),
]
ContentCodes = Annotated[
    list[Annotated[int, Meta(extra_json_schema={"minimum": 0, "maximum": MAX_CODE})]],
    about(
        "What the post is about: `code_levels` integers up to `code_values` (see `architecture` of `/info`). A code of 0, or an empty "
        "list, means none. Checked, but ignored by a checkpoint without codes.",
        [17, 203, 5],
        maxItems=MAX_CODE_LEVELS,
    ),
]
UserId = Annotated[Id, about(f"{_ID} 0 means anonymous.", "1868434417286410240")]
RequestName = Annotated[
    str | UnsetType,
    about("A name for this request, echoed and used in logs.", "feed-17", pattern=REQUEST_ID_PATTERN),
]
Weights = Annotated[
    dict[str, ScoreWeight] | WeightSet | UnsetType,
    about("Score weights by action, in place of the checkpoint's own; or the name of a published set of weights."),
]
Score = Annotated[
    Literal["sum", "offset"],
    about(
        "`sum`: the sum s of weight × probability. `offset`: the form that X uses, which keeps the order and lifts every score above 0: "
        "s + 0.001 if s ≥ 0, otherwise (s + N) / T · 0.001. N is the sum of the magnitudes of the negative weights, T that of all weights."
    ),
]
ActionsWanted = Annotated[
    list[str] | UnsetType,
    about("Return only the probabilities of these actions, in this order. Default: all actions.", ["favorite"]),
]
Topic = Annotated[str, Meta(max_length=100)]
