"""Decides whether a request may join the queue: bounded work, predicted wait, fair shares. Pure policy with a clock; orders nothing.

The rules, in the order they are checked. Work is counted in candidates and context tokens; *unfinished* work is admitted and not
yet answered. An engine without work takes any request that passes the first two.

    rule       refuses                                          by                               default  setting
    late       a request that arrives past its deadline         its deadline                     10.0     deadline.default_seconds
    key rate   a key that asks for more a second (0: no limit)  candidates of the key            0.0      queue.key_candidates_per_second
    size       a request the queue has no room for              unfinished requests              4096     queue.max_requests
                                                                unfinished candidates            32768    queue.max_candidates
                                                                unfinished context tokens        262144   queue.max_context_tokens
    key share  a key that would hold more than its share        unfinished work of the key       0.5      queue.max_share_per_key
    wait       a longer wait, if beyond the next forward        seconds until its first forward  0.5      queue.max_wait_seconds
    patience   a request whose caller would leave before        that, and its forwards           `Work.leaves_at`
    deadline   a request that would end too late                that, and its forwards           10.0     deadline.default_seconds

*Key share* holds for requests, candidates and context tokens: see `app.shares`.

*Wait.* A request that joins the next forward waits no longer than the running one takes, and a place refused there may stay empty.
So it may join even if a forward takes longer than the limit, unless demand is so high that later requests, which wait within the
limit, fill the next forward `FILLED_TIMES` over.

*Patience.* Callers who give up after a quarter of a second and come again would fill the queue with work for nobody. So a request must end
before its caller is likely to leave: `app.api.patience` learns when that is, and `app.queue.forecast.Outlook` has the rule, which workers
apply as well. Of a caller that says its deadline nothing is guessed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

from app.lateness import PAST_DEADLINE, TOO_LATE
from app.queue.batching import Full, Work, chunk_count, forwards_of
from app.queue.forecast import Clock, ForwardTime, Offered, Outlook, Running
from app.settings import Batching, Queue
from app.shares import over_share

Reason = Literal["queue_full", "key_rate", "loop_overrun", "deadline"]

KEY_BURST_SECONDS = 2.0  # an idle key may use this many seconds of its rate at once
FILLED_TIMES = 1.5  # arrivals are random: demand that fills it once on average would often leave it partly empty
CROWDED_SECONDS = 0.1  # for this long after a refusal, check for room before reading a request
NO_RATE_RETRY_SECONDS = 1.0  # `retry_after_seconds` before the first forward was measured


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a request may not join, and in how many seconds it would fit at the observed rate."""

    reason: Reason
    detail: str
    retry_after_seconds: float


class Wait(NamedTuple):
    """A job's predicted wait for its first forward. `seconds`: until that forward begins. `forwards`: how many full ones come before it.
    `shared_cost`: how many tokens of other jobs are in it."""

    seconds: float
    forwards: int
    shared_cost: float


@dataclass(slots=True)
class _Held:
    """The unfinished work of one API key."""

    requests: int = 0
    candidates: int = 0
    context_tokens: int = 0

    @property
    def cost(self) -> int:
        return self.candidates + self.context_tokens


class Admission:
    """Counts unfinished jobs. Used by the event loop only. `running`, in its methods, is what the engine computes now."""

    def __init__(self, queue: Queue, batching: Batching, clock: Clock) -> None:
        self.queue = queue
        self.clock = clock
        self._batching = batching
        self.forward_time = ForwardTime()
        self.offered = Offered()
        self.requests = 0
        self.candidates = 0
        self.context_tokens = 0
        self._full, self._most_context_tokens = Full.of(batching), queue.max_context_tokens
        self._held: dict[str | None, _Held] = {}  # of keys with unfinished work
        self._rate_used_until: dict[str, float] = {}  # clock seconds when a key's candidates so far fit its rate

    @property
    def cost(self) -> int:
        """Unfinished candidates plus context tokens."""
        return self.candidates + self.context_tokens

    def full(self, running: Running, key: str | None = None, leaves_at: float = math.inf) -> Refusal | None:
        """Return why even this key's smallest request would be refused, or None. Records one arrival if refused."""
        refusal = self.closed(running, key, leaves_at)
        if refusal is not None:
            self.offered.observe(self.clock())
        return refusal

    def closed(self, running: Running, key: str | None = None, leaves_at: float = math.inf) -> Refusal | None:
        """Why even this key's smallest request would be refused, or None; records nothing. With keys, None stands for a key without
        unfinished work, which finds the most room."""
        if not self.requests:
            return None
        smallest = _smallest(key, leaves_at)
        wait = self.wait(smallest, running)
        return self._no_room(smallest) or self._over_wait(wait) or self._over_patience(smallest, wait)

    def outlook(self, running: Running) -> Outlook:
        """What awaits the next request of a key without unfinished work."""
        wait = Wait(0.0, 0, 0.0)
        if self.requests:
            wait = self.wait(_smallest(), running)
        return self.forward_time.outlook(self.clock() + wait.seconds, wait.shared_cost)

    def refusal(self, job: Work, running: Running) -> Refusal | None:
        """Return why the job may not join now, or None. Records it as offered work."""
        now = self.clock()
        self.offered.observe(now, forwards_of(1, job.candidates, job.context_tokens, self._full))
        if job.deadline <= now:
            return Refusal("deadline", "the deadline had passed on arrival", 0.0)
        if limited := self._over_key_rate(job):
            return limited
        if not self.requests:
            return None
        if limited := self._no_room(job):
            return limited
        wait = self.wait(job, running)
        return self._over_wait(wait) or self._over_patience(job, wait) or self._over_deadline(job, wait)

    def add(self, job: Work) -> None:
        """Count a job that joins."""
        self._count(job, +1)
        rate = self.queue.key_candidates_per_second
        if rate and job.key is not None:
            now = self.clock()
            self._rate_used_until[job.key] = max(self._rate_used_until.get(job.key, now), now) + _rated(job) / rate

    def remove(self, job: Work) -> None:
        """Stop counting a job that was answered, was cancelled or expired."""
        self._count(job, -1)

    def resize(self, job: Work, candidates: int, context_tokens: int) -> None:
        """Set how much an admitted job is: fewer candidates than it was admitted for, or the context that it named by a handle.

        Raises ValueError for more candidates.
        """
        if candidates > job.candidates:
            raise ValueError("more candidates than the job was admitted for")
        self._count(job, -1)
        job.candidates, job.context_tokens = candidates, context_tokens
        job.chunks = chunk_count(candidates, self._batching)
        self._count(job, +1)

    def wait(self, job: Work, running: Running) -> Wait:
        """Predict the wait of this job."""
        left = 0.0
        if running.requests:
            left = max(0.0, (self.forward_time.seconds(running.cost) or 0.0) - running.seconds)
        forwards = forwards_of(
            self.requests - running.requests,
            self.candidates - running.candidates,
            self.context_tokens - running.context_tokens,
            self._full,
        )
        waiting_cost = self.cost - running.cost
        if forwards < 1:  # the job shares a forward with all work before it
            return Wait(left, 0, waiting_cost)
        full_cost = waiting_cost / forwards
        before = forwards * self._share_ahead(job) + 1e-9
        ahead = int(before)
        return Wait(left + ahead * (self.forward_time.seconds(full_cost) or 0.0), ahead, (before - ahead) * full_cost)

    def _share_ahead(self, job: Work) -> float:
        """Fraction of the queue served before the job: its key's work, and of each other key at most that plus the job's own work."""
        own = self._held[job.key].cost if job.key in self._held else 0
        if own == self.cost:
            return 1.0
        others = (held.cost for key, held in self._held.items() if key != job.key)
        return (own + sum(min(cost, own + job.cost) for cost in others)) / self.cost

    def _no_room(self, job: Work) -> Refusal | None:
        """The rules of size and key share."""
        queue = self.queue
        excess = max(
            self.candidates + job.candidates - queue.max_candidates,
            self.context_tokens + job.context_tokens - self._most_context_tokens,
            self.cost // self.requests if self._has_too_many_requests(job.key) else 0,
            self._over_share(job),
        )
        if excess > 0:
            return Refusal("queue_full", "the queue is full", self._seconds_of(excess))
        return None

    def _over_wait(self, wait: Wait) -> Refusal | None:
        limit = self.queue.max_wait_seconds
        if limit and wait.seconds > limit and (wait.forwards or self._fills_without_it()):
            return Refusal("queue_full", "the predicted wait is over the limit", wait.seconds - limit)
        return None

    def _over_patience(self, job: Work, wait: Wait) -> Refusal | None:
        if job.leaves_at == math.inf:
            return None
        now = self.clock()
        outlook = self.forward_time.outlook(now + wait.seconds, wait.shared_cost)
        late = outlook.late_seconds(job.cost, job.chunks, job.leaves_at, now)
        return Refusal("queue_full", TOO_LATE, late) if late > 0 else None

    def _over_share(self, job: Work) -> int:
        """By how much the key would exceed its share."""
        if job.key is None:
            return 0
        queue, held = self.queue, self._held.get(job.key, _Held())
        share, most_tokens = queue.max_share_per_key, self._most_context_tokens
        return max(
            over_share(held.candidates, job.candidates, self.candidates, queue.max_candidates, share),
            over_share(held.context_tokens, job.context_tokens, self.context_tokens, most_tokens, share),
        )

    def _has_too_many_requests(self, key: str | None) -> bool:
        """Whether one more request would be too many, of all or of this key. A key without any always may have one."""
        queue, held = self.queue, self._held.get(key, _Held()).requests
        if self.requests >= queue.max_requests:
            return True
        if key is None or not held:
            return False
        return over_share(held, 1, self.requests, queue.max_requests, queue.max_share_per_key) > 0

    def _fills_without_it(self) -> bool:
        """Whether the next forward fills up with requests that arrive late enough to wait within the limit."""
        forwards = self.offered.forwards_per_second(self.clock()) * self.queue.max_wait_seconds
        return forwards >= FILLED_TIMES

    def _over_deadline(self, job: Work, wait: Wait) -> Refusal | None:
        forward_seconds = self.forward_time.seconds(job.cost / job.chunks + wait.shared_cost)
        if forward_seconds is None:
            return None
        late = self.clock() + (wait.seconds + forward_seconds) * job.chunks - job.deadline
        return Refusal("deadline", PAST_DEADLINE, wait.seconds) if late > 0 else None

    def _over_key_rate(self, job: Work) -> Refusal | None:
        rate = self.queue.key_candidates_per_second
        if not rate or job.key is None or not _rated(job):
            return None
        used = max(0.0, self._rate_used_until.get(job.key, 0.0) - self.clock())
        own = min(_rated(job) / rate, KEY_BURST_SECONDS)  # a larger request may join once nothing is used
        wait = used + own - KEY_BURST_SECONDS
        return Refusal("key_rate", "the key is over its rate", wait) if wait > 1e-9 else None

    def _seconds_of(self, cost: int) -> float:
        """Seconds that this much of the queue takes at the observed rate of full forwards."""
        full = min(self.cost, self._full.candidates + self._full.context_tokens)
        seconds = self.forward_time.seconds(full)
        return NO_RATE_RETRY_SECONDS if seconds is None else seconds * cost / max(full, 1)

    def _count(self, job: Work, sign: Literal[1, -1]) -> None:
        held = self._held.get(job.key)
        if held is None:
            held = self._held[job.key] = _Held()
        candidates, context_tokens = sign * job.candidates, sign * job.context_tokens
        self.requests += sign
        self.candidates += candidates
        self.context_tokens += context_tokens
        held.requests += sign
        held.candidates += candidates
        held.context_tokens += context_tokens
        if not held.requests:
            del self._held[job.key]


def _rated(job: Work) -> int:
    """The candidates that a job counts for in its key's rate: a context by itself, which has none, for one."""
    return max(1, job.candidates) if job.rated is None else job.rated


def _smallest(key: str | None = None, leaves_at: float = math.inf) -> Work:
    """The smallest request: a user without a history, and one candidate."""
    return Work(candidates=1, context_tokens=1, deadline=math.inf, key=key, leaves_at=leaves_at)
