"""Learns when callers leave without their reply. Pure arithmetic; knows no HTTP.

Callers who give up after a quarter of a second and come again would fill every queue with work for nobody. What those who left had waited
bounds the predicted end of the next requests: `app.api.read_queue` and `app.queue.admission` refuse what would be late.
"""

from __future__ import annotations

import math
from collections import deque

MEMORY_SECONDS, MOST_LEAVERS = 5.0, 32
LEAST_LEAVERS, MOMENT_SECONDS = 3, 0.1  # a caller whose process ends takes all its calls with it in one moment
LEAVERS_SHARE, FEW_LEAVERS_SHARE = 0.05, 0.01  # from which it begins to count, and below which it ends to
REPLIES = 16  # that an average goes over
MOST_SHARE, LEAST_SHARE = 0.7, 0.4  # of the time after which callers left, within which replies are wanted
SHARE_LOST, SHARE_WON = 0.03, 0.003  # by a reply that came too late, and by one in time: one of ten may be late


class Patience:
    """How long the callers of one kind lately waited before they left without their reply: a guess of when those who wait now will leave.

    The guess is used once enough callers leave, and not all in one moment. It is dropped when almost nobody leaves, so that longer waits
    are tried again. The share of leavers at which it is dropped is smaller than the one at which it is first used: a caller who leaves just
    before the reply is taken for answered, so when waits are only just short enough, fewer seem to leave than do.
    `reply_seconds`: how long replies lately took from the turn in which the body was read. What a request waits for besides the engine is
    not predicted, so replies are wanted earlier the more of them come too late.
    """

    def __init__(self) -> None:
        self.reply_seconds = 0.0
        self._share = MOST_SHARE
        self._counts = False  # as of the last look
        self._left: deque[tuple[float, float]] = deque(maxlen=MOST_LEAVERS)  # when, and after how many seconds
        self._moments: deque[float] = deque(maxlen=2)  # the last two in which any left: when each began
        self._answered: deque[float] = deque(maxlen=round(MOST_LEAVERS / LEAVERS_SHARE))

    def left(self, now: float, seconds: float, *, was_read: bool) -> None:
        """Record that a caller left after so many seconds; `was_read`: its request had been read by then."""
        self._left.append((now, seconds))
        if was_read:
            self._share = max(LEAST_SHARE, self._share - SHARE_LOST)
        if not self._moments or now - self._moments[-1] >= MOMENT_SECONDS:
            self._moments.append(now)

    def answered(self, now: float, seconds: float) -> None:
        """Record that a caller got its reply so many seconds after its turn."""
        self._answered.append(now)
        self._share = min(MOST_SHARE, self._share + SHARE_WON)
        self.reply_seconds += (seconds - self.reply_seconds) / REPLIES

    def seconds(self, now: float) -> float:
        """Within how many seconds a reply should come, so that its caller is still there; infinite where less than `LEAVERS_SHARE` of them
        left lately."""
        if not self._left:
            self._counts = False
            return math.inf
        since = now - MEMORY_SECONDS
        while self._left and self._left[0][0] < since:
            self._left.popleft()
        while self._answered and self._answered[0] < since:
            self._answered.popleft()
        count = len(self._left)
        share = FEW_LEAVERS_SHARE if self._counts else LEAVERS_SHARE
        is_one_moment = len(self._moments) < 2 or self._moments[0] < since
        enough = count >= LEAST_LEAVERS and count >= share * (count + len(self._answered))
        self._counts = enough and not is_one_moment
        if not self._counts:
            return math.inf
        return self._share * sorted(seconds for _, seconds in self._left)[count // 2]


class Leavers:
    """The patience of callers, by API key and route: what one key does, or one kind of request takes, tells nothing of another."""

    def __init__(self) -> None:
        self._patience: dict[tuple[str | None, str], Patience] = {}

    def of(self, key: str | None, route: str) -> Patience:
        """The patience of the callers with this key at this route."""
        patience = self._patience.get((key, route))
        if patience is None:
            patience = self._patience[key, route] = Patience()
        return patience
