"""How much work the service takes: the groups of settings for a request, for all callers together, for the queue and for a forward.

What follows from a setting is a property beside it. `app.settings` holds the other groups.
"""

from __future__ import annotations

from functools import cached_property

from pydantic import BaseModel, ConfigDict, Field, computed_field

MIB = 2**20


class Group(BaseModel):
    """A group of settings: `RANKER_GROUP__NAME` in the environment, `--group.name` on the command line."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)


class Limits(Group):
    """How large one request may be. A larger one gets 413."""

    max_body_bytes: int = Field(default=MIB, ge=1024)
    """Longest body in bytes. All bodies being read may together be 64 times as long, and so may all replies that clients have not read.
    Default: 4 096 candidates and 1 000 history items fit as objects."""
    max_candidates: int = Field(default=4096, ge=1)
    """Most candidates in one request. A call of /rank/batch may hold four times as many, all such calls together sixteen times as many.
    Default: several times the longest list of the published service."""
    max_history: int = Field(default=2048, ge=1)
    """Most history items in one request. The model reads the newest ones that fit its window. Default: longer than any window so far."""
    max_retrieved: int = Field(default=2000, ge=1)
    """Most posts that one request may retrieve; it may exclude five times as many. Default: twice what the published service ranks."""

    @computed_field  # type: ignore[prop-decorator]
    @cached_property
    def max_values(self) -> int:
        """Most JSON values in one request; each list, object and escaped character counts too. Bounds the time of reading it to 10 ms."""
        return max(30_000, 7 * self.max_candidates)

    @computed_field  # type: ignore[prop-decorator]
    @cached_property
    def max_batch_requests(self) -> int:
        """Most requests in one call of /rank/batch."""
        return 64

    @computed_field  # type: ignore[prop-decorator]
    @cached_property
    def max_batch_candidates(self) -> int:
        """Most candidates in one call of /rank/batch."""
        return 4 * self.max_candidates

    @computed_field  # type: ignore[prop-decorator]
    @cached_property
    def max_excluded(self) -> int:
        """Most post ids that one request may exclude."""
        return 5 * self.max_retrieved

    @cached_property
    def batch_candidates(self) -> int:
        """Most candidates in all calls of /rank/batch that are being answered."""
        return 4 * self.max_batch_candidates

    @cached_property
    def buffered_bytes(self) -> int:
        """Most bytes of all bodies that are being read, and of all replies that clients have not read."""
        return 64 * self.max_body_bytes


class Budgets(Group):
    """What all callers together may take of the process."""

    connections: int = Field(default=2048, ge=1)
    """Connections open at once, those of the probes' port not counted. A further one is closed as soon as it is accepted. Fewer where the
    limit of open files leaves less room.
    Default: balancers keep some hundreds open; [Memory](#memory) says what each may cost."""


class Queue(Group):
    """How much admitted work may wait for the engine. Beyond it, 429."""

    max_candidates: int = Field(default=32_768, ge=1)
    """Most candidates waiting, and eight times as many context tokens (user and history). Default: bounds memory."""
    max_requests: int = Field(default=4096, ge=1)
    """Most requests waiting, and four times the most searches. Default: bounds memory where requests are tiny."""
    max_wait_seconds: float = Field(default=0.5, ge=0)
    """Longest predicted wait for the first forward; 0 sets no bound. A request that can join the next forward is never refused for it.
    Default: a ranking that comes later is of no use to a feed; see [Capacity](#capacity)."""
    max_share_per_key: float = Field(default=0.5, gt=0, le=1)
    """Share of the queue that one API key may fill. Default: half for one caller alone, and less for each the fuller the queue is."""
    key_candidates_per_second: float = Field(default=0.0, ge=0)
    """Rate limit of one API key, with bursts of two seconds' worth; a context alone counts as one candidate. 0 sets none.
    Default: shares are enough among trusted callers."""
    stall_seconds: float = Field(default=4.0, gt=0)
    """With work queued and no forward finished for this long, the process is not ready. Default: longer than any normal forward."""
    stall_exit_seconds: float = Field(default=30.0, gt=0)
    """After this long, waiting callers get 503 and the process exits, to be started again. Default: a hung device rarely recovers."""

    @cached_property
    def max_context_tokens(self) -> int:
        """Most context tokens (user and history) waiting."""
        return 8 * self.max_candidates


class Batching(Group):
    """How waiting requests share a forward."""

    max_requests: int = Field(default=64, ge=1)
    """Requests in one forward; 1 turns sharing off. As many gRPC calls may be open. Default: handling each request costs time too."""
    max_candidates: int = Field(default=2048, ge=1)
    """Candidates in one forward; eight times as many context tokens fit. Default: one forward stays far below the deadline."""
    chunk_candidates: int = Field(default=512, ge=1)
    """Longer candidate lists are cut into chunks of this many. Default: a small request waits for one chunk of a long list only."""
    window_seconds: float = Field(default=0.0, ge=0, le=1)
    """How long a busy engine lets the next forward grow; an idle one never waits. Default: none. Try 0.001 on CUDA under load."""

    @cached_property
    def max_context_tokens(self) -> int:
        """Context tokens in one forward."""
        return 8 * self.max_candidates


class Cache(Group):
    """The context cache: keys and values of users seen before."""

    bytes: int | None = Field(default=None, ge=0)
    """Its size on the engine's device; 0 turns it off. Default: 256 MiB on a CPU, an eighth of a GPU's memory."""

    @cached_property
    def host_bytes(self) -> int:
        """The most that it takes where it is on the CPU."""
        return 256 * MIB if self.bytes is None else self.bytes


class Deadline(Group):
    """How long a request may take, from its first byte to its scores. Its headers may ask for another deadline."""

    default_seconds: float = Field(default=10.0, gt=0)
    """For a request that names no deadline, and the longest for an explanation. Default: longer than any feed waits."""
    max_seconds: float = Field(default=60.0, gt=0)
    """No request gets longer, whatever its headers say. Default: a header must not hold a place in the queue for ever."""
