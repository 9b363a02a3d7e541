"""The compiled fast path for requests as most callers write them: JSON → columns, scores → JSON. Python reads what it declines.

`schema`, `validate`, `features` and `reply` are the plain definition of the same; tests hold both to the same columns and bytes. Its
bounds are those of `schema`, the checkpoint and the settings, given once.
"""

from __future__ import annotations

import ctypes
import functools
from array import array
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from struct import Struct
from typing import Any, ClassVar, NamedTuple

import numpy as np
import orjson
import structlog
from numpy.typing import NDArray

from app.errors import ServiceError
from app.request import body
from app.request.ids import echo_of
from app.request.rules import check, struct_rule
from app.request.schema import MAX_ACTION_VALUE, MAX_TIME, RankRequest, is_handle, is_request_id
from app.request.strict_json import parse
from app.request.validate import NO_HISTORY, Posts, Request, Wishes, wishes_of
from app.request.vocabulary import Vocabulary
from app.settings import Limits
from model.config import MAX_DWELL_SECONDS, ModelConfig
from model.inputs import Candidates, Context, Scores
from model.native.build import KernelUnavailable, build_kernel
from model.ranking import magnitudes
from weights.format.manifest import Manifest

SOURCE = Path(__file__).parent / "native" / "codec.cpp"
MOST_ROWS = 4096  # about 2 ms of writing: a longer reply is written in pieces
MOST_KNOWN, SHORT_BYTES = 64, 512  # how many wishes are cached, and how many bytes of JSON each may have
HEAD = Struct("=Q5q")  # user id; counts: events sent, events kept, candidates, bytes of the ids' echo, of wishes

Int64, Pointer, Text = ctypes.c_int64, ctypes.c_void_p, ctypes.c_char_p


class _Checkpoint(ctypes.Structure):
    """Mirrors the struct of the same name in codec.cpp."""

    _fields_ = (
        *(
            (name, Int64)
            for name in (
                "actions",
                "surfaces",
                "history_length",
                "age_seconds",
                "age_buckets",
                "continuous",
                "has_text_ids",
            )
        ),
        *((name, Int64) for name in ("max_candidates", "max_history", "max_values", "max_time")),
        *((name, ctypes.c_double) for name in ("max_action_value", "max_dwell_seconds")),
        ("names", Int64),
        *((name, Pointer) for name in ("name", "column", "key", "scale")),
    )


@functools.cache
def load_library() -> ctypes.PyDLL | None:
    """The compiled codec, built if needed; None, with a log line, if that is not possible."""
    try:
        return open_library(build_kernel(source=SOURCE).path)
    except (KernelUnavailable, OSError) as error:
        structlog.get_logger("app.request").warning("no_codec", reason=str(error))
        return None


def open_library(path: Path) -> ctypes.PyDLL:
    """Load a compiled codec and declare the types of its functions. Raises OSError."""
    library = ctypes.PyDLL(str(path))
    library.codec_functions.argtypes = (Pointer,)
    library.codec_functions.restype = ctypes.py_object
    return library


class Codec:
    """Reads requests and writes replies in one checkpoint's vocabulary. Used in one thread."""

    def __init__(self, library: ctypes.PyDLL, manifest: Manifest, vocabulary: Vocabulary, limits: Limits) -> None:
        """Raises MemoryError."""
        self._vocabulary = vocabulary
        config, names, continuous = manifest.config, list(vocabulary.index), manifest.continuous
        self.actions = config.actions
        read_here = "user_id", "history", "candidates", "impression_ts"
        self._rest = struct_rule(RankRequest, vocabulary, *read_here)
        self._default = wishes_of({}, vocabulary)
        self._known: dict[bytes, Wishes] = {}
        self._kept: tuple[Any, ...] = (  # the arrays that the struct points to, kept alive
            (Text * len(names))(*(name.encode() for name in names)),
            (Int64 * len(names))(*vocabulary.index.values()),
            (Text * len(continuous))(*(orjson.dumps(output.name) for output in continuous)),
            (ctypes.c_float * len(continuous))(*(output.scale for output in continuous)),
        )
        words = _Checkpoint(
            *(config.actions, config.product_surfaces, config.history_length, 60 * config.post_age_granularity_minutes),
            *(config.post_age_buckets, len(continuous), vocabulary.ids == "text"),
            *(limits.max_candidates, limits.max_history, limits.max_values, MAX_TIME),
            *(MAX_ACTION_VALUE, MAX_DWELL_SECONDS, len(names)),
            *(ctypes.addressof(kept) for kept in self._kept),
        )
        self._read, self._rank, self._write = library.codec_functions(ctypes.byref(words))

    def read(self, body: bytes | bytearray) -> Packed | None:
        """Read a valid request; None if it is invalid or written in an unusual way."""
        data = self._read(body, True)
        if not data:
            return None
        user_id, events, kept, count, echo, rest = HEAD.unpack_from(data)
        wishes = self._wishes(data[-rest:]) if rest else self._default
        return None if wishes is None else Packed(self, body, data, user_id, events, kept, count, echo, wishes)

    def read_viewer(self, body: bytes | bytearray) -> Viewed | None:
        """Read the user and history of a request without candidates; None as in `read`."""
        data = self._read(body, False)
        if not data:
            return None
        user_id, events, kept, _, _, rest = HEAD.unpack_from(data)
        end = len(data) - rest
        start = end - 8 * (events - kept)
        context, _ = _context(data[:start], user_id, events, kept, 0, self.actions)  # a copy: what follows may be long
        posts = context.post_ids
        if kept < events:
            posts = np.concatenate((np.frombuffer(data[start:end], np.uint64), posts))
        return Viewed(context, posts, data[end:] or b"{}")

    def read_context(self, body: bytes | bytearray) -> Packed | None:
        """Read a request that holds only a user, a history and perhaps a request id; None as in `read`."""
        data = self._read(body, False)
        if not data:
            return None
        user_id, events, kept, _, _, rest = HEAD.unpack_from(data)
        wishes = self._default
        with suppress(ServiceError):
            said = parse(data[-rest:]) if rest else {}
            if said.keys() == {"request_id"} and is_request_id(said["request_id"]):
                wishes = wishes._replace(request_id=said.pop("request_id"))
            return None if said else Packed(self, body, data, user_id, events, kept, 0, 0, wishes)
        return None

    def _wishes(self, text: bytes) -> Wishes | None:
        """The wishes in this JSON, None if invalid. Cached: most requests differ only in their name and context."""
        try:
            rest = parse(text)
            if ("request_id" in rest and not is_request_id(rest["request_id"])) or (
                "context" in rest and not is_handle(rest["context"])
            ):
                return None
            request_id, handle = rest.pop("request_id", None), rest.pop("context", None)
            known = self._known.get(key := orjson.dumps(rest))
            if known is None:
                check(rest, self._rest)
                known = wishes_of(rest, self._vocabulary)
                if len(self._known) == MOST_KNOWN:
                    self._known.clear()
                if len(key) <= SHORT_BYTES:
                    self._known[key] = known
        except ServiceError:
            return None
        return Wishes(known.weights, known.top_k, known.wanted, request_id, known.reply, handle, known.has_offset)

    def rank(
        self, scores: Scores, request: Request
    ) -> tuple[NDArray[np.float64], NDArray[np.int64], NDArray[np.int64]] | None:
        """As `reply.ranked`; None for an empty or a long reply."""
        count = len(scores.probabilities)
        data = self._rank(*_numbers(scores, request)) if count <= MOST_ROWS else b""
        if not data:
            return None
        return (
            np.ndarray(count, _FLOAT64, data),
            np.ndarray(count, _INT64, data, 8 * count),
            np.ndarray(count, _INT64, data, 16 * count),
        )

    def write(
        self, request: Request, scores: Scores, head: bytes, tail: bytes, retrieved: NDArray[np.float32] | None = None
    ) -> bytes | None:
        """The candidates of a reply in the form that the request asks for, between head and tail; None for a long one.

        `retrieved` `[C]`: their scores where they were retrieved, best first."""
        wanted, count = request.wanted, len(scores.probabilities)
        if count > MOST_ROWS:
            return None
        sent = request.candidates.sent or b""
        written: bytes = self._write(
            *_numbers(scores, request),
            request.candidates.post_ids,
            sent if isinstance(sent, bytes) else echo_of(sent),
            min(request.top_k or 0, count),
            b"" if wanted is None else array("q", wanted),
            -1 if wanted is None else len(wanted),
            request.reply == "columns",
            b"" if retrieved is None else retrieved,
            head,
            tail,
        )
        return written or None


def _numbers(scores: Scores, request: Request) -> tuple[Any, ...]:
    """The numbers that scores are combined from, as the compiled functions take them."""
    weights, sums = request.weights, b""
    if request.has_offset:
        sums = array("d", magnitudes(weights[: scores.probabilities.shape[1]])).tobytes()
    return len(scores.probabilities), scores.probabilities, scores.continuous, weights, sums


def decode(
    data: bytes | bytearray, headers: Mapping[bytes, bytes], limits: Limits, vocabulary: Vocabulary
) -> Packed | body.Body:
    """As `wires.Wire.decode`, of JSON objects: by the compiled codec, else by `body.decode`. Raises what that raises."""
    packed = None if vocabulary.codec is None else vocabulary.codec.read(data)
    return body.decode(data, limits) if packed is None else packed


_UINT64, _INT64 = np.dtype(np.uint64), np.dtype(np.int64)  # made for each array, else
_FLOAT32, _FLOAT64 = np.dtype(np.float32), np.dtype(np.float64)


class Viewed(NamedTuple):
    """A user with a history, as the model reads it; `posts`: the post ids of all of it; `rest`: what else the request says, as JSON."""

    context: Context
    posts: NDArray[np.uint64]
    rest: bytes


def _context(data: bytes, user_id: int, events: int, kept: int, further: int, actions: int) -> tuple[Context, int]:
    """What the model reads of what the codec has read, and where the bytes after it begin. `further`: words of candidates, which come
    between the context's words and its other numbers."""
    start, size = HEAD.size, 8 * kept
    floats = start + 3 * size + 8 * further
    end = floats + 4 * kept * actions
    context = Context(
        user_id,
        np.ndarray(kept, _UINT64, data, start),
        np.ndarray(kept, _UINT64, data, start + size),
        np.ndarray((kept, actions), _FLOAT32, data, floats),
        np.ndarray(kept, _INT64, data, start + 2 * size),
        np.ndarray(kept, _FLOAT32, data, end),
        True,
        events - kept,
    )
    return context, end + 4 * kept


@dataclass(slots=True)
class Packed:
    """A valid request as the codec has read it: a `Typed` that needs no check under the same codec. `body` is what it was read from."""

    codec: Codec
    body: bytes | bytearray
    data: bytes
    user_id: int
    events: int
    kept: int
    candidates: int
    echo: int
    wishes: Wishes

    timeout_seconds: ClassVar[None] = None

    @property
    def reply(self) -> Any:
        """As in `Request`."""
        return self.wishes.reply

    @property
    def handle(self) -> str | None:
        """As in `Request`."""
        return self.wishes.handle

    def count(self, name: str) -> int:
        """Items of `candidates` or `history`."""
        return self.candidates if name == "candidates" else self.events

    def unpack(self, config: ModelConfig) -> tuple[Request, Context, Candidates]:
        """The request, without the history that the model reads, and what the model reads."""
        data, kept, count = self.data, self.kept, self.candidates
        context, place = _context(data, self.user_id, self.events, kept, 4 * count, config.actions)
        start, size = HEAD.size + 24 * kept, 8 * count
        candidates = Candidates(
            np.ndarray(count, _UINT64, data, start),
            np.ndarray(count, _UINT64, data, start + size),
            np.ndarray(count, _INT64, data, start + 2 * size),
            np.ndarray(count, _INT64, data, start + 3 * size),
        )
        sent = data[place : place + self.echo] if self.echo else None
        weights, top_k, wanted, request_id, reply, handle, has_offset = self.wishes
        request = Request(
            self.user_id,
            *NO_HISTORY,
            self.events,
            Posts(candidates.post_ids, candidates.author_ids, candidates.surfaces, sent),
            weights,
            top_k,
            wanted,
            request_id,
            reply,
            handle,
            has_offset,
        )
        return request, context, candidates
