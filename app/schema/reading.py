"""Bytes → a request of bounded size, or the first thing that is wrong with it."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from contextlib import suppress
from functools import cache
from typing import Any, TypeVar

import msgspec
import orjson
from msgspec import UNSET, inspect

from app.errors import InvalidRequest, MalformedJson, TooLarge
from app.schema.requests import Request
from app.settings import Limits

DIGITS_CHECKED_BYTES = 256 * 1024
MAX_DIGITS = 512
"""Digits of one number in a body longer than `DIGITS_CHECKED_BYTES`; in a shorter one long numbers take no time worth a look."""
NO_REQUESTS = "must be a list of at least one request, with no other fields"

T = TypeVar("T")
R = TypeVar("R", bound=Request)


_DIGITS = bytes.maketrans(b"123456789", b"0" * 9)


def read(decoder: msgspec.json.Decoder[R], body: bytes | bytearray, limits: Limits, actions: Collection[str] = ()) -> R:
    """Decode and check a request of bounded size; `actions` as in `decode`.

    Raises TooLarge before it decodes a body that would be slow to read, and for more items than the limits allow; MalformedJson;
    InvalidRequest.
    """
    check_cost(body, limits.max_values)
    request = decode(decoder, body, actions)
    most = {"candidates": limits.max_candidates, "history": limits.max_history, "exclude": limits.max_excluded}
    for name, count in request.sizes().items():
        if count > most[name]:
            raise TooLarge(f"{name}: {count} items, but at most {most[name]} are allowed.")
    request.check()
    return request


def check_cost(body: bytes | bytearray, max_values: int) -> None:
    """Raise TooLarge for a body that is slow to read: its values are estimated from the bytes that begin, separate or escape them, and the
    time that Python takes for a whole number grows with the square of its digits."""
    if len(body) > max_values and len(body) - len(body.translate(None, b",[{\\")) > max_values:
        raise TooLarge(f"The body holds more than {max_values} values.")
    if len(body) > DIGITS_CHECKED_BYTES and b"0" * MAX_DIGITS in body.translate(_DIGITS):
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
    requests = [bytes(item) for item in msgspec.structs.astuple(items) if item is not UNSET]
    if not requests:
        raise InvalidRequest("requests", NO_REQUESTS)
    if len(requests) > most:
        raise TooLarge(f"requests: at most {most} are allowed.")
    return requests, is_bare


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
    match = _MESSAGE.fullmatch(message)
    assert match is not None
    sentence, path, types = match[1], match[2] or "", _flat([_type_of(kind)])
    if sentence.startswith(_UNKNOWN) and type(value) is dict and not {*value} <= {*_field_names(types)}:
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
        return InvalidRequest(path, f"has an unknown field; known are {', '.join(_field_names(types))}")
    if sentence.startswith(_NO_CHOICE):
        choices = [
            str(choice)
            for schema_type in types
            if isinstance(schema_type, inspect.LiteralType)
            for choice in schema_type.values
        ]
        return InvalidRequest(path, f"must be one of {', '.join(choices)}")
    return InvalidRequest(path, sentence[:1].lower() + sentence[1:])


@cache
def _type_of(kind: Any) -> inspect.Type:
    return inspect.type_info(kind)


def _field_names(types: Sequence[inspect.Type]) -> list[str]:
    return [
        field.encode_name
        for schema_type in types
        if isinstance(schema_type, inspect.StructType)
        for field in schema_type.fields
    ]


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
    entry_types: list[inspect.Type] = []
    for schema_type in types:
        if isinstance(schema_type, inspect.ListType) and is_index:
            entry_types.append(schema_type.item_type)
        elif isinstance(schema_type, inspect.StructType) and name:
            entry_types += [field.type for field in schema_type.fields if field.encode_name == name]
        elif isinstance(schema_type, inspect.DictType) and not is_index and not name:
            entry_types.append(schema_type.value_type)
    return _flat(entry_types)


def _flat(types: list[inspect.Type]) -> list[inspect.Type]:
    flat: list[inspect.Type] = []
    for schema_type in types:
        if isinstance(schema_type, inspect.Metadata):
            flat += _flat([schema_type.type])
        elif isinstance(schema_type, inspect.UnionType):
            flat += _flat([*schema_type.types])
        else:
            flat.append(schema_type)
    return flat
