"""Requests and replies of the Open Inference Protocol. `app.tensors` reads and writes the tensors in them."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from app.errors import InvalidRequest
from app.schema.fields import (
    HANDLE_PATTERN,
    HANDLE_RULE,
    MAX_COUNT,
    REQUEST_ID_PATTERN,
    REQUEST_ID_RULE,
    Count,
    Score,
    Strict,
    Time,
    WeightSet,
    about,
    is_handle,
    is_request_id,
)
from app.schema.requests import Request
from model.exploration import MAX_TEMPERATURE, MIN_TEMPERATURE
from weights.values import time_problem

MOST_INPUTS = 26
"""Twice as many as there are, so that the error for an unknown tensor can say which one it is."""
MOST_OUTPUTS = 10

Size = Annotated[int, Meta(ge=0, le=MAX_COUNT)]


class InputParameters(Struct):
    """Other parameters, such as `content_type`, are ignored."""

    binary_data_size: Annotated[
        Size | None,
        about(
            "How many bytes this tensor has in the binary data after the JSON (see `Inference-Header-Content-Length`). Not together "
            "with `data`."
        ),
    ] = None


class InputTensor(Struct):
    """One tensor of a request, named after its field in the columns form of `/rank`."""

    name: Annotated[str, about("Name of the tensor; `GET /v2/models/{name}` lists them.", "candidates.post_id")]
    datatype: Annotated[str, about("`UINT64`, `BYTES`, `INT64`, `FP32` or `FP64`, as in the metadata.", "UINT64")]
    shape: Annotated[
        list[Size],
        Meta(max_length=8),
        about("As in the metadata, with the sizes of this request. `[n, 1]` is taken as `[n]`.", [2]),
    ]
    parameters: Annotated[InputParameters | None, about("How its data is sent.")] = None
    data: Annotated[
        msgspec.Raw,
        about("The values in row-major order, flat or nested. Not together with binary data.", type="array", items={}),
    ] = msgspec.field(default_factory=msgspec.Raw)


class OutputParameters(Struct):
    """Other parameters are ignored."""

    binary_data: Annotated[
        bool | None, about("Whether this output is binary. Takes precedence over the request's `binary_data_output`.")
    ] = None


class WantedOutput(Struct):
    """One tensor that you want in the reply."""

    name: Annotated[str, about("`post_id`, `score`, `rank`, `propensity`, `probabilities` or `continuous`.", "score")]
    parameters: Annotated[OutputParameters | None, about("How it is to be sent.")] = None


class InferParameters(Strict):
    """Fields of `/rank` that are not tensors, under the same names. Action names are separated by commas. An unknown parameter is refused,
    because a misspelt one would change numbers silently."""

    actions: Annotated[
        str | None,
        about("The actions of the columns of `history.actions` and `weights`. Default: all of the checkpoint's."),
    ] = None
    actions_wanted: Annotated[
        str | None, about("Return only the probabilities of these actions. Default: all actions.")
    ] = None
    weights: Annotated[
        WeightSet | None,
        about("The name of a published set of weights. Not together with the tensor `weights`."),
    ] = None
    score: Score = "sum"
    top_k: Annotated[Count | None, about("Sort the reply by rank, best first, and keep this many.")] = None
    explore_temperature: Annotated[
        Annotated[float, Meta(ge=MIN_TEMPERATURE, le=MAX_TEMPERATURE)] | None,
        about("Draw the ranks at random, as `explore` does in `/rank`. There is an output `propensity` then."),
    ] = None
    context: Annotated[
        str | None, about("The handle of a context, in place of `user_id` and history.", pattern=HANDLE_PATTERN)
    ] = None
    impression_ts: Annotated[
        Time, about("When the posts are shown, in Unix seconds: their ages are counted from it.")
    ] = 0
    timeout: Annotated[Size | None, about("How many microseconds you wait.")] = None
    binary_data_output: Annotated[
        bool | None, about("Whether outputs are binary, unless an output itself says otherwise.")
    ] = None
    content_type: Annotated[Any, about("Has no effect.")] = None
    headers: Annotated[Any, about("Has no effect.")] = None
    priority: Annotated[Any, about("Has no effect.")] = None
    sequence_id: Annotated[Any, about("Has no effect.")] = None
    sequence_start: Annotated[Any, about("Has no effect.")] = None
    sequence_end: Annotated[Any, about("Has no effect.")] = None


class InferRequest(Request, forbid_unknown_fields=False, kw_only=True):
    """A ranking as tensors. Fields that are not listed are ignored, as other servers of the protocol do."""

    inputs: Annotated[
        list[InputTensor],
        Meta(max_length=MOST_INPUTS),
        about(
            "`candidates.post_id` and `candidates.author_id` are required. So is `user_id`, unless there is the parameter `context`, which "
            "replaces it."
        ),
    ]
    outputs: Annotated[
        Annotated[list[WantedOutput], Meta(max_length=MOST_OUTPUTS)] | None,
        about("Which tensors you want. Default: all."),
    ] = None
    id: Annotated[
        str | None, about("A name for this request, echoed and used in logs.", "feed-17", pattern=REQUEST_ID_PATTERN)
    ] = None
    model_name: Annotated[str | None, about("Must be the name in the path, or left out.")] = None
    parameters: Annotated[InferParameters | None, about("Fields that are not tensors.")] = None

    def sizes(self) -> dict[str, int]:
        """How many candidates and history items there are, by the shapes of the tensors."""
        counts = {tensor.name: tensor.shape[0] for tensor in self.inputs if tensor.shape}
        return {field: counts.get(f"{field}.post_id", 0) for field in ("candidates", "history")}

    def check(self) -> None:
        """Raise InvalidRequest for what no checkpoint can take."""
        if self.id and not is_request_id(self.id):
            raise InvalidRequest("id", REQUEST_ID_RULE)
        parameters = self.parameters or InferParameters()
        if parameters.context is not None and not is_handle(parameters.context):
            raise InvalidRequest("parameters.context", HANDLE_RULE)
        if (problem := time_problem(parameters.impression_ts)) is not None:
            raise InvalidRequest("parameters.impression_ts", problem)


class OutputTensor(Strict):
    """One tensor of a reply, with one row for each candidate."""

    name: Annotated[str, about("Name of the tensor.")]
    datatype: Annotated[str, about("As in the metadata.")]
    shape: Annotated[list[int], about("As in the metadata, with the sizes of this request.")]
    parameters: Annotated[InputParameters | UnsetType, about("Only with binary data.")] = UNSET
    data: Annotated[
        list[float | str] | UnsetType, about("The values, flat and row-major; only without binary data.")
    ] = UNSET


class InferReply(Strict, kw_only=True):
    """The ranking as tensors."""

    model_name: Annotated[str, about("Name of the checkpoint.")]
    model_version: Annotated[str, about("Version of the checkpoint.")]
    id: Annotated[str | UnsetType, about("The `id` of the request, if it had one.")] = UNSET
    parameters: Annotated[
        dict[str, str | int | float],
        about("Names of the columns, `history_used`, `history_dropped`, and milliseconds by stage."),
    ]
    outputs: Annotated[list[OutputTensor], about("In the order in which you asked for them.")]
