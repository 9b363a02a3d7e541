"""The eight messages between a worker and the engine process, as msgpack with its length before it.

    worker → engine    Admit, Rank, Search, Cancel, Call
    engine → worker    Answer, Failed, EngineState; and Call, for the worker's metrics, which it answers like the engine, and Cancel of that

A new question is a new method of `Call`, not a new message. Both ends are the same build on one machine.
"""

from __future__ import annotations

import struct
from functools import lru_cache
from typing import Any, get_args, get_origin

import msgspec
import numpy as np
from numpy.typing import NDArray

from app.errors import InternalError, InvalidRequest, ServiceError, error_class, service_error_of
from app.interface import CorpusState, Health, PlaceRequest, SearchRequest, ServedCorpus, ServedModel
from app.queue.forecast import Outlook
from model.engine import EngineInfo
from model.inputs import Candidates, Context
from weights.corpus.manifest import CorpusManifest
from weights.format.manifest import Manifest

LENGTH = struct.Struct("<I")
MAX_BYTES = 256 * 2**20


class Admit(msgspec.Struct, tag=True):
    """Reserve a place for a request to the model of this number; answered with None. The place keeps this id until a `Rank` names it or a
    `Cancel` frees it. Times are seconds of the machine's monotonic clock, which all processes share."""

    id: int
    model: int
    request: PlaceRequest


class Rank(msgspec.Struct, tag=True):
    """Rank the candidates with the model of this number. `context`: or its handle. `place_id`: the id of the `Admit` that was answered, 0
    for a request that is admitted or refused now."""

    id: int
    model: int
    context: Context | str
    candidates: Candidates
    request: PlaceRequest
    place_id: int = 0


class Search(msgspec.Struct, tag=True):
    """Search the corpus of this number."""

    id: int
    corpus: int
    request: SearchRequest


class Cancel(msgspec.Struct, tag=True):
    """Nobody waits for the answer to this question any more, or needs the place of this `Admit`."""

    id: int


class Call(msgspec.Struct, tag=True):
    """Call a method of `METHODS` with these arguments, each encoded by itself."""

    id: int
    method: str
    arguments: list[bytes]


class Answer(msgspec.Struct, tag=True):
    """The result of the question with this id, encoded by itself."""

    id: int
    result: bytes


class Failed(msgspec.Struct, tag=True):
    """The error that the question with this id ended with."""

    id: int
    code: str
    detail: str
    retry_after_seconds: float | None

    @classmethod
    def of(cls, number: int, error: Exception) -> Failed:
        """From what was raised: an internal error unless it is a ServiceError or a lack of memory."""
        problem = service_error_of(error) if isinstance(error, ServiceError | MemoryError) else InternalError()
        return cls(number, problem.code, problem.detail, problem.retry_after_seconds)

    def error(self) -> ServiceError:
        """The error to raise."""
        kind = error_class(self.code)
        if kind is InvalidRequest:
            return InvalidRequest("", self.detail)
        return kind(self.detail, retry_after_seconds=self.retry_after_seconds)


class ServedNow(msgspec.Struct):
    """A model, or a retrieval checkpoint with a corpus, by its number. Manifests are as on disk."""

    number: int
    manifest: bytes
    engine: EngineInfo | None = None
    corpus: bytes = b""
    hidden: int = 0
    duplicates: int = 0
    notes: dict[str, Any] = {}

    @classmethod
    def of(cls, number: int, served: ServedModel | ServedCorpus) -> ServedNow:
        """From what the engine process serves."""
        if isinstance(served, ServedModel):
            return cls(number, served.manifest.to_json(), served.engine)
        corpus = served.corpus.to_json()
        return cls(number, served.manifest.to_json(), None, corpus, served.hidden, served.duplicates, served.notes)

    def model(self) -> ServedModel:
        """The model as the worker names it."""
        assert self.engine is not None
        return ServedModel(Manifest.from_json(self.manifest), self.engine)

    def served_corpus(self) -> ServedCorpus:
        """The corpus as the worker names it."""
        corpus = CorpusManifest.from_json(self.corpus)
        return ServedCorpus(Manifest.from_json(self.manifest), corpus, self.hidden, self.duplicates, self.notes)


class EngineState(msgspec.Struct, tag=True):
    """The engine process as it is now: sent when it changes, and as a sign of life. `closed`: why every request would be refused.
    `outlook`: what awaits the next request, sent often while requests are refused; None while none are."""

    health: Health
    model: ServedNow | None = None
    corpus: ServedNow | None = None
    closed: str = ""
    retry_after_seconds: float = 0.0
    outlook: Outlook | None = None


FromWorker = Admit | Rank | Search | Cancel | Call | Answer | Failed
FromEngine = Answer | Failed | EngineState | Call | Cancel

METHODS: dict[str, tuple[tuple[Any, ...], Any]] = {  # name: types of the arguments, type of the result
    "exposition": ((), bytes),
    "worker_exposition": ((), tuple[int, bytes]),
    "context": ((int, str, str | None), Context),  # number of the model, handle, key
    "attention": ((int, Context, Candidates, float), NDArray[np.float32]),  # number, context, candidates, deadline
    "corpus_state": ((), CorpusState | None),
    "reach": ((str, str | None, float), None),  # change, key, deadline
}


def _write(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.tobytes() if value.ndim == 1 else (value.shape, value.tobytes())
    if isinstance(value, np.generic):
        return value.item()
    raise NotImplementedError(type(value))


def _read(kind: Any, value: Any) -> Any:
    """A column as a view of what came. Raises ValueError for bytes that are no such column."""
    if get_origin(kind) is not np.ndarray:
        raise ValueError(f"no value of type {kind}")
    dtype = np.dtype(get_args(get_args(kind)[1])[0])
    if isinstance(value, bytes):
        return np.frombuffer(value, dtype)
    shape, data = value
    return np.frombuffer(data, dtype).reshape(shape)


encode = msgspec.msgpack.Encoder(enc_hook=_write).encode


@lru_cache(maxsize=64)
def decoder(kind: Any) -> msgspec.msgpack.Decoder[Any]:
    """The decoder of values of this type."""
    return msgspec.msgpack.Decoder(kind, dec_hook=_read)


def frame(message: msgspec.Struct) -> bytes:
    """The message with its length before it. Raises ValueError for one that is too long."""
    body = encode(message)
    if len(body) > MAX_BYTES:
        raise ValueError(f"a message of {len(body)} bytes")
    return LENGTH.pack(len(body)) + body
