"""What a request and a reply of the Open Inference Protocol are, as pydantic models: for `/docs` alone. `contract` is the other form."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from app.request.contract import Strict, absent


class InputParameters(Strict):
    """Of an input whose data is binary."""

    binary_data_size: int = Field(ge=0)
    """Bytes of its data behind the JSON, where `Inference-Header-Content-Length` says how long that is."""


class InputTensor(Strict):
    """One tensor of a request, by the name of its field in the array form of `/rank`."""

    name: str = Field(examples=["candidates.post_id"])
    """Which one: `GET /v2/models/{name}` lists them."""
    datatype: str = Field(examples=["UINT64"])
    """`UINT64`, `INT64`, `FP32` or `FP64`, as the metadata says."""
    shape: list[int] = Field(examples=[[2]])
    """As the metadata says, with this request's sizes."""
    parameters: InputParameters = absent()
    """Only for binary data."""
    data: list[Any] = absent()
    """The values in row-major order, flat or nested; only without binary data."""


class OutputParameters(Strict):
    """Of a wanted output."""

    binary_data: bool = False
    """Whether its data is to be binary."""


class WantedOutput(Strict):
    """One tensor that the caller wants."""

    name: str = Field(examples=["score"])
    """`post_id`, `score`, `rank`, `probabilities` or `continuous`."""
    parameters: OutputParameters = absent()
    """How it is to be sent."""


class InferParameters(Strict):
    """What is no tensor; the fields of `/rank` of the same name."""

    actions: str = absent()
    """The actions that the columns of `history.actions` and `weights` stand for, separated by commas; the checkpoint's when missing."""
    actions_wanted: str = absent()
    """Which actions' probabilities to return, separated by commas; all of them when missing."""
    top_k: int = absent()
    """Sort the reply by score, best first, and keep this many."""
    impression_ts: int = 0
    """Unix seconds of the impression; ages are counted from it."""
    timeout: int = absent()
    """Microseconds that the caller waits."""
    binary_data_output: bool = False
    """Whether all outputs are to be binary."""


class InferRequest(Strict):
    """A request as tensors."""

    inputs: list[InputTensor]
    """`user_id`, `candidates.post_id` and `candidates.author_id` are required."""
    outputs: list[WantedOutput] = absent()
    """All of them when missing."""
    id: str = absent()
    """A name for this request, echoed in the reply and used in logs."""
    parameters: InferParameters = absent()
    """What is no tensor."""


class OutputTensor(Strict):
    """One tensor of a reply, a row a candidate."""

    name: str
    """As it was wanted."""
    datatype: str
    """As the metadata says."""
    shape: list[int]
    """As the metadata says, with this request's sizes."""
    parameters: InputParameters = absent()
    """Only with binary data."""
    data: list[float] = absent()
    """The values in row-major order, flat; only without binary data."""


class InferReply(Strict):
    """The ranking as tensors."""

    model_name: str
    """Name of the checkpoint."""
    model_version: str
    """Version of the checkpoint."""
    id: str = absent()
    """The request's own, if it had one."""
    parameters: dict[str, str | int | float]
    """Names of the columns of `probabilities` and `continuous`, `history_used`, `history_dropped`, and milliseconds by stage."""
    outputs: list[OutputTensor]
    """In the order in which they were wanted."""
