"""Messages of the Open Inference Protocol's gRPC service ↔ named tensors. Imported only where gRPC is turned on.

The message classes are made at import from the protocol's field numbers, in a descriptor pool of their own: nothing is compiled,
no generated file fixes the version of protobuf, and a process may hold another copy of the protocol's definitions as well.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError

from app.errors import BadRequest, InvalidRequest
from app.request.body import sized
from app.request.reply import ReplyFormat
from app.request.rules import check, struct_rule
from app.request.tensor_schema import InferRequest
from app.request.tensors import DATATYPES, Tensor, Tensors, outputs_of, raw_of, wanted_outputs
from app.request.validate import Request
from app.settings import Limits
from model.inputs import Scores

PACKAGE = "inference"
SERVICE = f"{PACKAGE}.GRPCInferenceService"
MESSAGES = {
    "ServerLiveRequest": "",
    "ServerLiveResponse": "bool live = 1",
    "ServerReadyRequest": "",
    "ServerReadyResponse": "bool ready = 1",
    "ModelReadyRequest": "string name = 1; string version = 2",
    "ModelReadyResponse": "bool ready = 1",
    "ServerMetadataRequest": "",
    "ServerMetadataResponse": "string name = 1; string version = 2; repeated string extensions = 3",
    "ModelMetadataRequest": "string name = 1; string version = 2",
    "TensorMetadata": "string name = 1; string datatype = 2; repeated int64 shape = 3",
    "ModelMetadataResponse": "string name = 1; repeated string versions = 2; string platform = 3; "
    "repeated TensorMetadata inputs = 4; repeated TensorMetadata outputs = 5",
    "InferParameter": "bool bool_param = 1; int64 int64_param = 2; string string_param = 3; double double_param = 4; "
    "uint64 uint64_param = 5",
    "Parameter": "string key = 1; InferParameter value = 2",
    "InputTensor": "string name = 1; string datatype = 2; repeated int64 shape = 3; repeated Parameter parameters = 4; "
    "bytes contents = 5",
    "RequestedOutput": "string name = 1; repeated Parameter parameters = 2",
    "ModelInferRequest": "string model_name = 1; string model_version = 2; string id = 3; "
    "repeated Parameter parameters = 4; repeated InputTensor inputs = 5; repeated RequestedOutput outputs = 6; "
    "repeated bytes raw_input_contents = 7",
    "OutputTensor": "string name = 1; string datatype = 2; repeated int64 shape = 3; repeated Parameter parameters = 4",
    "ModelInferResponse": "string model_name = 1; string model_version = 2; string id = 3; "
    "repeated Parameter parameters = 4; repeated OutputTensor outputs = 5; repeated bytes raw_output_contents = 6",
}
"""The protocol's field numbers. The names of messages do not travel, and a map is a list of entries. `contents` is only noticed."""

MOST_AXES = 3  # one more than any tensor has
VARINT, DELIMITED, FIXED_BYTES = 0, 2, {1: 8, 5: 4}  # wire types
MOST_FIELDS = 1024  # of a message, counting each byte of a shape; a request with every tensor has a tenth of these
SHORT_BYTES = 4096  # a message this short is never slow to read
RAW = "must hold the little-endian data of each input, in their order; `contents` is not taken"
RULE = struct_rule(InferRequest, None, "inputs", "outputs")
Field = descriptor_pb2.FieldDescriptorProto


def _entries(fields: str) -> Iterator[tuple[bool, str, str, int]]:
    """For each field: whether it is repeated, its kind, its name and its number."""
    for entry in filter(None, fields.split("; ")):
        *label, kind, name, _, number = entry.split()
        yield bool(label), kind, name, int(number)


def _message_classes() -> dict[str, Any]:
    file = descriptor_pb2.FileDescriptorProto(name="ranker/inference.proto", package=PACKAGE, syntax="proto3")
    for name, fields in MESSAGES.items():
        message = file.message_type.add(name=name)
        for repeated, kind, field_name, number in _entries(fields):
            added = message.field.add(name=field_name, number=number)
            added.label = Field.LABEL_REPEATED if repeated else Field.LABEL_OPTIONAL
            if kind in MESSAGES:
                added.type, added.type_name = Field.TYPE_MESSAGE, f".{PACKAGE}.{kind}"
            else:
                added.type = getattr(Field, f"TYPE_{kind.upper()}")
            if name == "InferParameter":
                added.oneof_index = 0
        if name == "InferParameter":
            message.oneof_decl.add(name="choice")
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{PACKAGE}.{name}")) for name in MESSAGES}


CLASSES = _message_classes()
PARTS = {
    name: {
        number: kind
        for repeated, kind, _, number in _entries(fields)
        if kind in MESSAGES or (repeated and kind == "int64")
    }
    for name, fields in MESSAGES.items()
}
"""For each message, the fields that may hold many entries, and the kind of entry: a message or int64."""


def read(kind: str, data: bytes) -> Any:
    """Parse a message of this kind. Raises BadRequest, and InvalidRequest for more fields than any request has."""
    try:
        if len(data) > SHORT_BYTES:
            _count_fields(kind, data)
        return CLASSES[kind].FromString(data)
    except (DecodeError, IndexError):
        raise BadRequest(f"The message is no {kind}.") from None


def _count_fields(kind: str, data: bytes) -> None:
    """Walk over tags and lengths alone: parsing makes an object of each entry, and an entry may be two bytes long.

    Raises InvalidRequest for too many, DecodeError for a group, and IndexError for a number that is cut off; parsing sees the rest.
    """
    count, parts = 0, [(kind, 0, len(data))]
    while parts:
        kind, place, end = parts.pop()
        while place < end:
            tag, place = _varint(data, place)
            wire, length = tag & 7, FIXED_BYTES.get(tag & 7, 0)
            if wire in (VARINT, DELIMITED):
                number, place = _varint(data, place)
                length = number if wire == DELIMITED else 0
            elif not length:
                raise DecodeError
            if wire == DELIMITED and (inner := PARTS[kind].get(tag >> 3)) is not None:
                if inner in MESSAGES:
                    parts.append((inner, place, min(place + length, end)))
                else:
                    count += length
            place += length
            count += 1
            if count > MOST_FIELDS:
                raise InvalidRequest([("", "has more inputs, outputs, parameters or sizes than there are")])


def _varint(data: bytes, place: int) -> tuple[int, int]:
    """A number of 7 bits a byte, the lowest first, and where it ends. Raises IndexError where the data ends before."""
    found = data[place] & 127
    for shift in range(7, 70, 7):
        if data[place] < 128:
            break
        place += 1
        found |= (data[place] & 127) << shift
    return found, place + 1


def tensors_of(request: Any, limits: Limits) -> Tensors:
    """The tensors of a ModelInferRequest, as `inference.decode` makes them of a body. Raises TooLarge or InvalidRequest."""
    raw = request.raw_input_contents
    if len(raw) != len(request.inputs) or any(given.contents for given in request.inputs):
        raise InvalidRequest([("raw_input_contents", RAW)])
    if any(given.parameters for given in (*request.inputs, *request.outputs)):
        raise InvalidRequest([("inputs", "take no parameters, and outputs neither")])
    shapes = [tuple(given.shape[:MOST_AXES]) for given in request.inputs]
    if any(size < 0 for shape in shapes for size in shape):
        raise InvalidRequest([("inputs", "must have shapes without negative sizes")])
    parameters = {entry.key: _value(entry.value) for entry in request.parameters}
    check({"id": request.id, "parameters": parameters}, RULE)
    inputs = [
        Tensor(given.name, given.datatype, shape, data)
        for given, shape, data in zip(request.inputs, shapes, raw, strict=True)
    ]
    wanted = wanted_outputs([(output.name, True) for output in request.outputs], is_binary=True)
    return sized(Tensors(inputs, parameters, wanted, request.id or None), limits)


def _value(parameter: Any) -> Any:
    choice = parameter.WhichOneof("choice")
    return None if choice is None else getattr(parameter, choice)


def reply(
    request: Request, scores: Scores, form: ReplyFormat, *, history_used: int, timings_ms: Mapping[str, float]
) -> Iterator[bytes]:
    """The ModelInferResponse in one piece; all of its outputs are raw."""
    told, arrays = outputs_of(request, scores, form, history_used, timings_ms)
    message = CLASSES["ModelInferResponse"](
        model_name=form.model["name"], model_version=form.model["version"], id=request.request_id or ""
    )
    for key, value in told.items():
        field = {str: "string_param", int: "int64_param", float: "double_param"}[type(value)]
        setattr(message.parameters.add(key=key).value, field, value)
    for name, _, array in arrays:
        message.outputs.add(name=name, datatype=DATATYPES[array.dtype], shape=array.shape)
        message.raw_output_contents.append(raw_of(array))
    yield message.SerializeToString()


def write(kind: str, **fields: Any) -> bytes:
    """A message of this kind as bytes."""
    written: bytes = CLASSES[kind](**fields).SerializeToString()
    return written
