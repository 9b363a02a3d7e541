"""Requests and replies of the Open Inference Protocol, as `schema` and `replies` declare those of `/rank`."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import UNSET, Meta, UnsetType

from app.request.schema import Count, Handle, OptionalName, Score, Size, Strict, Time, WeightSet, about

MOST_INPUTS = 22  # twice as many as there are, so that an unknown one is told by its place
MOST_OUTPUTS = 5


class InputParameters(Strict):
    """Of a tensor whose data is binary."""

    binary_data_size: Annotated[
        Size, about("Bytes of its data behind the JSON: see `Inference-Header-Content-Length`.")
    ]


class InputTensor(Strict):
    """One tensor of a request, by the name of its field in the array form of `/rank`."""

    name: Annotated[str, about("Which one: `GET /v2/models/{name}` lists them.", "candidates.post_id")]
    datatype: Annotated[str, about("`UINT64`, `BYTES`, `INT64`, `FP32` or `FP64`, as the metadata says.", "UINT64")]
    shape: Annotated[list[Size], about("As the metadata says, with this request's sizes.", [2])]
    parameters: Annotated[InputParameters | UnsetType, about("Only for binary data.")] = UNSET
    data: Annotated[
        Annotated[list[Any], Meta(extra_json_schema={"items": {}})] | UnsetType,
        about("The values in row-major order, flat or nested; only without binary data."),
    ] = UNSET


class OutputParameters(Strict):
    """Of a wanted output."""

    binary_data: Annotated[bool | UnsetType, about("Whether its data is to be binary.", default=False)] = UNSET


class WantedOutput(Strict):
    """One tensor that the caller wants."""

    name: Annotated[str, about("`post_id`, `score`, `rank`, `probabilities` or `continuous`.", "score")]
    parameters: Annotated[OutputParameters | UnsetType, about("How it is to be sent.")] = UNSET


class InferParameters(Strict):
    """Fields of `/rank` that are not tensors, under the same names. Names are separated by commas."""

    actions: Annotated[
        str | UnsetType,
        about("What the columns of `history.actions` and `weights` are; the checkpoint's when missing."),
    ] = UNSET
    actions_wanted: Annotated[
        str | UnsetType, about("Which actions' probabilities to return; all of them when missing.")
    ] = UNSET
    weights: Annotated[
        WeightSet | UnsetType, about("The name of published weights; not with the tensor `weights`.")
    ] = UNSET
    score: Score = UNSET
    top_k: Annotated[Count | UnsetType, about("Sort the reply by score, best first, and keep this many.")] = UNSET
    context: Handle = UNSET
    impression_ts: Annotated[Time | UnsetType, about("Unix seconds from which ages are counted.", default=0)] = UNSET
    timeout: Annotated[Size | UnsetType, about("Microseconds that the caller waits.")] = UNSET
    binary_data_output: Annotated[bool | UnsetType, about("Whether all outputs are binary.", default=False)] = UNSET


class InferRequest(Strict):
    """A request as tensors."""

    inputs: Annotated[
        list[InputTensor],
        Meta(max_length=MOST_INPUTS),
        about("`user_id`, `candidates.post_id` and `candidates.author_id` are required; no `user_id` with `context`."),
    ]
    outputs: Annotated[
        Annotated[list[WantedOutput], Meta(max_length=MOST_OUTPUTS)] | UnsetType, about("All of them when missing.")
    ] = UNSET
    id: Annotated[
        OptionalName | UnsetType,
        about("A name for this request, echoed in the reply and used in logs."),
    ] = UNSET
    parameters: Annotated[InferParameters | UnsetType, about("Fields that are not tensors.")] = UNSET


class OutputTensor(Strict):
    """One tensor of a reply, a row a candidate."""

    name: Annotated[str, about("As it was wanted.")]
    datatype: Annotated[str, about("As the metadata says.")]
    shape: Annotated[list[int], about("As the metadata says, with this request's sizes.")]
    parameters: Annotated[InputParameters | UnsetType, about("Only with binary data.")] = UNSET
    data: Annotated[
        list[float | str] | UnsetType, about("The values, flat and row-major; only without binary data.")
    ] = UNSET


class InferReply(Strict, kw_only=True):
    """The ranking as tensors."""

    model_name: Annotated[str, about("Name of the checkpoint.")]
    model_version: Annotated[str, about("Version of the checkpoint.")]
    id: Annotated[str | UnsetType, about("The request's own, if it had one.")] = UNSET
    parameters: Annotated[
        dict[str, str | int | float],
        about("Names of the columns, `history_used`, `history_dropped`, and milliseconds by stage."),
    ]
    outputs: Annotated[list[OutputTensor], about("In the order in which they were wanted.")]
