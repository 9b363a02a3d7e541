"""What a front and the engine process say to each other: frames of a length and one MessagePack array (docs/fronts.md).

Columns travel as their little-endian bytes, one after the other, so that nothing is converted. Not for when which is sent.
"""

from __future__ import annotations

import struct
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from app.errors import Draining
from app.interface import CheckpointNotFound, ReloadInProgress
from app.telemetry.sums import Family
from model.config import CandidatePositions, ModelConfig
from model.engine import CacheResult, EngineError, EngineInfo
from model.inputs import Candidates, Context, Scores
from weights.errors import CheckpointError, LogLost, NotStored, StorageFull

VERSION = 1
MAX_BYTES = 64 * 2**20  # of one frame
LENGTH = struct.Struct("<I")  # before each frame
RELOAD_FAILURES: dict[str, type[Exception]] = {
    "storage_full": StorageFull,  # before what they are, too
    "log_lost": LogLost,
    "not_stored": NotStored,
    "checkpoint": CheckpointError,
    "engine": EngineError,
    "in_progress": ReloadInProgress,
    "not_found": CheckpointNotFound,
    "draining": Draining,
    "memory": MemoryError,
}


Id = Annotated[int, Meta(ge=0)]  # the format itself has no larger ones than 2⁶⁴ − 1
Count = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Several = Annotated[int, Meta(ge=1, le=2**31 - 1)]
Word = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
Seconds = Annotated[float, Meta(ge=0)]


class Frame(msgspec.Struct, array_like=True, gc=False):
    """One message; its number is the first element of the array."""


class Told(Frame):
    """The answer to what a front asked with this number."""

    id: int


class Hello(Frame, tag=0):
    """The first frame of a front."""

    version: int
    front: int


class Rank(Frame, tag=1):
    """A request with `history` context items and `candidates`. `deadline` in seconds of CLOCK_MONOTONIC.

    `words`: 64 bits each, post ids, author ids, surfaces of the context, then post ids, author ids, surfaces, age buckets of the
    candidates. `floats`: 32 bits each, actions `[history, A]`, then dwell seconds. `again`, `waits`: as in `Service.admit`;
    `is_kept`, `first_slot`: as of `Context` and `Candidates`.
    """

    id: int
    model: int
    deadline: Seconds
    key: str | None
    user_id: Id
    history: Count
    candidates: Several
    words: bytes
    floats: bytes
    again: bool = False
    waits: bool = False
    is_kept: bool = True
    first_slot: Count = 0


class Cancel(Frame, tag=2):
    """Nobody waits for this answer any more: a client disconnected, or a deadline has passed."""

    id: int


class Left(Frame, tag=3):
    """No request on this model, or corpus, will come any more."""

    model: int


class Counts(Frame, tag=4):
    """What was counted since the last one, and gauges as they are. `id`: of a `Flush`, or 0."""

    id: int
    families: list[Family]


class Scrape(Frame, tag=5):
    """Asks for the metrics of all processes."""

    id: int


class Reload(Frame, tag=6):
    """Asks for another checkpoint by its name below the root, as the `second` one perhaps; None: the present one read again. With
    `retrieval`, for that retrieval checkpoint and that corpus as one instead."""

    id: int
    checkpoint: str | None
    retrieval: tuple[str | None, str | None] | None = None
    second: bool = False


class Refused(Frame, tag=7):
    """So many requests were refused unread since the last one."""

    requests: Count


class Search(Frame, tag=8):
    """A search of the corpus with the number `corpus`. `words` and `floats` as of a `Rank`, of the context alone. `exclude`: post ids,
    64 bits each. `least`, `topics`, `created_after`: as in `Query`."""

    id: int
    corpus: int
    deadline: Seconds
    key: str | None
    user_id: Id
    history: Count
    k: Several
    words: bytes
    floats: bytes
    exclude: bytes
    topics: list[str] | None
    created_after: Word | None
    least: float


class Change(Frame, tag=9):
    """Asks for a change of the corpus. `delete`: post ids; `words`: post ids, author ids, times of the posts that come, 64 bits each."""

    id: int
    delete: bytes
    words: bytes
    topics: list[str | None]


class Compact(Frame, tag=10):
    """Asks for the corpus to be written anew with its changes."""

    id: int


class Attend(Rank, tag=11):
    """Asks what these candidates attend to; the fields of a `Rank`."""


class Model(Frame, tag=20):
    """From now on this model serves, or is the `second` one. `manifest`: as `manifest.json` has it."""

    model: int
    manifest: bytes
    device: str
    dtype: str
    backend: str
    candidate_positions: CandidatePositions
    notes: dict[str, Any]
    second: bool = False

    def info(self) -> EngineInfo:
        """The engine that runs it."""
        return EngineInfo(self.device, self.dtype, self.backend, self.candidate_positions, self.notes)


class State(Frame, tag=21):
    """How the engine process is; sent when it changes, and as a sign of life. `closed`: why every request would be refused."""

    started: bool
    failed: bool
    draining: bool
    reason: str
    closed: str
    retry_after_seconds: float


class Answer(Told, tag=22):
    """Scores: logits and probabilities `[C, A]`, then continuous outputs `[C, Z]`, 32 bits each."""

    cache: CacheResult
    queue_seconds: float
    forward_seconds: float
    finite: bool
    columns: bytes


class Failed(Told, tag=23):
    """A request without scores: the code of its error, see docs/operations.md."""

    code: str
    detail: str
    retry_after_seconds: float | None


class Flush(Frame, tag=24):
    """Asks for `Counts` with this id now."""

    id: int


class Exposition(Told, tag=25):
    """The metrics of all processes as text."""

    text: bytes


class Reloaded(Told, tag=26):
    """How a reload ended. `failure`: empty, or a name of RELOAD_FAILURES, or another."""

    failure: str
    detail: str


class Corpus(Frame, tag=27):
    """From now on searches are for this retrieval model and corpus: their manifests, and the rest of `ServedRetrieval`."""

    corpus: int
    manifest: bytes
    posts: bytes
    hidden: int
    duplicates: int
    notes: dict[str, Any]


class Posts(Told, tag=28):
    """What a search found. `words`: post ids, author ids, times, 64 bits each; `scores`: 32 bits each; the rest as in `Retrieved`."""

    queue_seconds: float
    encode_seconds: float
    search_seconds: float
    words: bytes
    scores: bytes
    topics: list[str | None]
    visible: int
    scored: int
    cached: bool
    posts: int
    changes: int


class Changed(Told, tag=29):
    """A change was made, or a corpus written anew; as `interface.Changed`, of the corpus that serves."""

    posts: int
    changes: int
    deleted: int


class Attended(Told, tag=30):
    """What the candidates attend to, in C order, 32 bits each."""

    shape: tuple[int, int, int, int]
    columns: bytes


class SecondState(Frame, tag=31):
    """How the second checkpoint is; sent when it changes. `model`: 0 where none is held; the rest as in `interface.Second`."""

    model: int
    reason: str
    answers: bool


ToEngine = Hello | Rank | Cancel | Left | Counts | Scrape | Reload | Refused | Search | Change | Compact | Attend
ToFront = (
    Model | State | Answer | Failed | Flush | Exposition | Reloaded | Corpus | Posts | Changed | Attended | SecondState
)

from_front = msgspec.msgpack.Decoder(ToEngine)
from_engine = msgspec.msgpack.Decoder(ToFront)
_encode = msgspec.msgpack.Encoder().encode


def encode(frame: ToEngine | ToFront) -> bytes:
    """The frame with its length before it. Raises ValueError for one that is too long."""
    body = _encode(frame)
    if len(body) > MAX_BYTES:
        raise ValueError(f"a frame of {len(body)} bytes")
    return LENGTH.pack(len(body)) + body


def columns_of(context: Context, candidates: Candidates) -> tuple[bytes, bytes]:
    """`words` and `floats` of a `Rank`."""
    words = (
        context.post_ids, context.author_ids, context.surfaces,
        candidates.post_ids, candidates.author_ids, candidates.surfaces, candidates.age_buckets,
    )  # fmt: skip
    return joined(words), joined((context.actions, context.dwell_seconds))


def inputs_of(frame: Rank, config: ModelConfig) -> tuple[Context, Candidates]:
    """What `columns_of` was given, as views. Raises ValueError where the columns are not as long as the frame says, and where a number
    is none of this model: nothing after this looks at them, and the kernel reads its tables by them."""
    history, candidates, first = frame.history, frame.candidates, 3 * frame.history
    if len(frame.words) != 8 * (first + 4 * candidates):
        raise ValueError("columns of another length than the frame says")
    words = np.frombuffer(frame.words, np.int64)
    ids = words.view(np.uint64)
    context = context_of(frame.user_id, history, ids[:first], frame.floats, config, is_kept=frame.is_kept)
    authors = first + candidates
    surfaces = authors + candidates
    ages = surfaces + candidates
    posts = Candidates(ids[first:authors], ids[authors:surfaces], words[surfaces:ages], words[ages:], frame.first_slot)
    posts.check(config)
    return context, posts


def context_of(
    user_id: int, history: int, ids: NDArray[np.uint64], floats: bytes, config: ModelConfig, *, is_kept: bool = True
) -> Context:
    """The user and the history of a frame, as views; `ids` are its words. Raises ValueError as `inputs_of`."""
    actions = config.actions
    cells, values = history * actions, np.frombuffer(floats, np.float32)
    if len(ids) != 3 * history or len(values) != cells + history:
        raise ValueError("columns of another length than the frame says")
    context = Context(
        user_id,
        ids[:history],
        ids[history : 2 * history],
        values[:cells].reshape(history, actions),
        ids[2 * history :].view(np.int64),
        values[cells:],
        is_kept,
    )
    context.check(config)
    return context


def scores_bytes(scores: Scores) -> bytes:
    """`columns` of an `Answer`."""
    return joined((scores.logits, scores.probabilities, scores.continuous))


def scores_of(frame: Answer, candidates: int, actions: int) -> Scores:
    """What `scores_bytes` was given, as views. Raises ValueError where the columns cannot be so long."""
    floats, cells = np.frombuffer(frame.columns, np.float32), candidates * actions
    return Scores(
        floats[:cells].reshape(candidates, actions),
        floats[cells : 2 * cells].reshape(candidates, actions),
        floats[2 * cells :].reshape(candidates, -1),
        finite=frame.finite,
    )


def joined(columns: tuple[NDArray[Any], ...]) -> bytes:
    """The bytes of columns, one after the other."""
    return b"".join([column.tobytes() for column in columns])
