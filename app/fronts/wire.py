"""The messages between a front and the engine process, derived from `app/interface.py` (docs/fronts.md).

Each method of the interface that is awaited, or that takes `done`, becomes two messages: a question with its arguments and an answer
with its result. Does not decide when messages are sent.
"""

from __future__ import annotations

import inspect
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from functools import reduce
from operator import or_
from pathlib import Path
from typing import Annotated, Any, get_args, get_type_hints

import msgspec
import numpy as np
from msgspec import Meta

from app.errors import ServiceError, error_class
from app.interface import (
    CheckpointNotFound,
    Health,
    ReloadInProgress,
    Reloads,
    Retrieval,
    ServedModel,
    ServedRetrieval,
    Service,
)
from app.telemetry.sums import Family
from model.engine import EngineError, EngineInfo
from model.inputs import Float32s, Ids, Int64s
from weights.corpus.manifest import CorpusManifest
from weights.errors import CheckpointError, LogLost, NotStored, StorageFull
from weights.format.manifest import Manifest

VERSION = 3
MAX_BYTES = 64 * 2**20  # of one message
LENGTH = struct.Struct("<I")  # before each message
FAILURES = {
    kind.__name__: kind
    for kind in (
        CheckpointError, LogLost, NotStored, StorageFull, EngineError, ReloadInProgress, CheckpointNotFound, MemoryError,
    )
}  # fmt: skip

Served = ServedModel | ServedRetrieval
Seconds = Annotated[float, Meta(ge=0)]  # `ge` also refuses NaN
Number = Annotated[int, Meta(ge=0)]


class Message(msgspec.Struct, array_like=True, gc=False, tag=str.lower):
    """Base of all messages. Its lower-case name is the first element of the array."""


class Hello(Message):
    """The first message of a front."""

    version: int
    front: int


class Question(Message):
    """Base of a front's questions. The answer has the same `id`."""

    id: Number


class Cancel(Question):
    """Nobody waits for the answer any more: the client disconnected, or a deadline passed."""


class Left(Message):
    """The front will ask no more questions about this model or corpus."""

    number: Number


class Counts(Message):
    """Counts since the last message, and present gauges. `flush`: the number of the `Flush` that it answers, or 0."""

    flush: Number
    families: list[Family]


class Refused(Message):
    """Number of requests refused unread since the last message."""

    requests: Number


class Serve(Message):
    """A model, or a retrieval model with its corpus, that fronts may name by its number from now on. Manifests are as on disk."""

    number: Number
    manifest: bytes
    engine: EngineInfo | None = None
    corpus: bytes = b""
    hidden: int = 0
    duplicates: int = 0
    notes: dict[str, Any] = {}

    @classmethod
    def of(cls, number: int, served: Served) -> Serve:
        """Return the message that announces it to fronts."""
        if isinstance(served, ServedModel):
            return cls(number, served.manifest.to_json(), served.engine)
        corpus = served.corpus.to_json()
        return cls(number, served.manifest.to_json(), None, corpus, served.hidden, served.duplicates, served.notes)

    def served(self) -> Served:
        """Return what `of` was given. Raises CheckpointError for an invalid manifest."""
        manifest = Manifest.from_json(self.manifest)
        if self.engine is not None:
            return ServedModel(manifest, self.engine)
        return ServedRetrieval(
            manifest, CorpusManifest.from_json(self.corpus), self.hidden, self.duplicates, self.notes
        )


class State(Message):
    """State of the engine process; sent when it changes, and as a sign of life. `closed`: why every request would be refused. `model`,
    `corpus`, `second`: the numbers of what serves, 0 for none; `second_reason`, `answers`: as in `interface.Second`."""

    health: Health
    closed: str = ""
    retry_after_seconds: float = 0.0
    model: int = 0
    corpus: int = 0
    second: int = 0
    second_reason: str = "The engine process is starting."
    answers: bool = False


class Flush(Message):
    """Asks for `Counts` with this number now."""

    number: Number


class Answer(Message):
    """Base of the engine process's answers; all but `Failed` have the field `result`. `id` is that of the question."""

    id: Number


class Failed(Answer):
    """A question without a result. `code`: of a ServiceError, see docs/operations.md, or the name of an exception in FAILURES."""

    code: str
    detail: str
    retry_after_seconds: float | None = None

    @classmethod
    def of(cls, number: int, error: Exception) -> Failed:
        """Return the message that carries an error to a front."""
        if isinstance(error, ServiceError):
            return cls(number, error.code, error.detail, error.retry_after_seconds)
        known = (kind.__name__ for kind in type(error).__mro__ if kind.__name__ in FAILURES)
        return cls(number, next(known, "internal_error"), str(error))

    def error(self) -> Exception:
        """Return the error that `of` was given, or one of its nearest known base."""
        if self.code in FAILURES:
            return FAILURES[self.code](self.detail)
        return error_class(self.code)(self.detail, retry_after_seconds=self.retry_after_seconds)


@dataclass(frozen=True, slots=True)
class Method:
    """One method of the interface as it travels. `owner`: Service, Retrieval or Reloads; `arguments`: the names of those sent; `served`:
    the one that is sent as a number, "" for none; `has_done`: it calls back and is not awaited; `has_result`: the answer carries
    a result."""

    owner: type
    name: str
    question: type[Any]
    answer: type[Any]
    arguments: tuple[str, ...]
    served: str
    has_done: bool
    has_result: bool

    @property
    def changes(self) -> bool:
        """Whether it changes what serves: then all fronts hear of the change before the one that asked hears the answer."""
        return self.owner is not Service and not self.has_done


def _methods(owner: type) -> Iterator[Method]:
    for name, function in vars(owner).items():
        if not inspect.isfunction(function) or name.startswith("_") or name == "stop":
            continue
        hints = get_type_hints(function)
        result, done = hints.pop("return"), hints.pop("done", None)
        if done is None and not inspect.iscoroutinefunction(function):
            continue
        if done is not None:  # Callable[[Ranked | ServiceError], None]
            result = get_args(get_args(done)[0][0])[0]
        if hints.pop("ticket", None) is not None:  # a front admits nothing: the request also asks for the place
            place = get_type_hints(Service.admit)
            hints = {key: place[key] for key in ("model", "deadline", "key", "again", "waits")} | hints
        served = next((key for key, hint in hints.items() if hint in get_args(Served)), "")
        fields = [
            (key, int if key == served else Seconds if key == "deadline" else hint) for key, hint in hints.items()
        ]
        result = None if result in get_args(Served) else result  # the fronts already know what serves now
        question = msgspec.defstruct(name, fields, bases=(Question,))  # its tag is its name
        answer = msgspec.defstruct(f"{name}_answer", [("result", result)], bases=(Answer,), tag=name)
        yield Method(owner, name, question, answer, tuple(hints), served, done is not None, result is not None)


METHODS = {method.name: method for owner in (Service, Retrieval, Reloads) for method in _methods(owner)}
_QUESTIONS = (Hello, Cancel, Left, Counts, Refused, *(method.question for method in METHODS.values()))
_ANSWERS = (Serve, State, Flush, Failed, *(method.answer for method in METHODS.values()))


_DTYPES: dict[Any, np.dtype[Any]] = {kind: np.dtype(get_args(get_args(kind)[1])[0]) for kind in (Ids, Int64s, Float32s)}


def _read(kind: Any, value: Any) -> Any:
    """Read what msgspec cannot: columns, as views, and paths. Raises ValueError for bytes that are not such a column."""
    if type(value) is bytes:
        return np.frombuffer(value, _DTYPES[kind])
    if kind is Path:
        return Path(value)
    shape, data = value
    return np.frombuffer(data, _DTYPES[kind]).reshape(shape)


def _write(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.tobytes() if value.ndim == 1 else (value.shape, value.tobytes())
    if isinstance(value, Path):
        return str(value)
    raise NotImplementedError(type(value))  # as msgspec requires


from_front = msgspec.msgpack.Decoder(reduce(or_, _QUESTIONS), dec_hook=_read)
from_engine = msgspec.msgpack.Decoder(reduce(or_, _ANSWERS), dec_hook=_read)
_encode = msgspec.msgpack.Encoder(enc_hook=_write).encode


def encode(message: Message) -> bytes:
    """The message with its length before it. Raises ValueError for one that is too long."""
    body = _encode(message)
    if len(body) > MAX_BYTES:
        raise ValueError(f"a message of {len(body)} bytes")
    return LENGTH.pack(len(body)) + body
