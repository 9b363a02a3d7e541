"""Requests of a front from admission to answer, and the models that they are for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from app.errors import EngineDown
from app.fronts import frames
from app.fronts.link import Link
from app.fronts.uplink import Asked, Uplink
from app.interface import Done, Ranked, ServedModel
from model.inputs import Candidates, Context

ENDED = "The engine process has ended."


class Version:
    """A model of the engine process at the other end of `link`, with the requests that are prepared for it and not sent."""

    __slots__ = ("link", "number", "served", "unsent")

    def __init__(self, number: int, served: ServedModel, link: Link | None) -> None:
        self.number = number
        self.served = served
        self.link = link
        self.unsent = 0


class Place(Asked):
    """`interface.Ticket`: a request that is first prepared, then sent, at last answered or released.

    `sent` is called once for each: when it is sent, or released before that.
    """

    __slots__ = ("again", "candidates", "done", "key", "number", "sent", "uplink", "version", "waits")

    def __init__(
        self,
        uplink: Uplink,
        version: Version,
        sent: Callable[[Version], None],
        deadline: float,
        key: str | None,
        again: bool,
        waits: bool,
    ) -> None:
        super().__init__(deadline)
        self.uplink = uplink
        self.sent = sent
        self.version = version
        self.key = key
        self.again = again
        self.waits = waits
        self.number = 0  # of its frame; -1 when it will never be sent
        version.unsent += 1

    def send(self, context: Context, candidates: Candidates, done: Done) -> None:
        """As `Service.rank`."""
        if self.number:
            raise ValueError("this ticket was used before")
        uplink, version = self.uplink, self.version
        self.candidates, self.done = len(candidates), done
        self.number = number = uplink.expect(self)
        if version.link is not uplink.link:  # lost since this was admitted
            asyncio.get_running_loop().call_soon(uplink.end, number, EngineDown(ENDED, retry_after_seconds=2.0))
            return
        words, floats = frames.columns_of(context, candidates)
        uplink.send(
            frames.Rank(
                number, version.number, self.deadline, self.key, context.user_id, len(context), len(candidates),
                words, floats, self.again, self.waits, context.is_kept, candidates.first_slot,
            )
        )  # fmt: skip
        self.sent(version)

    def release(self) -> None:
        """Free the place and drop what is not computed; a second time does nothing."""
        if self.number > 0:
            self.uplink.forget(self.number)
        elif self.number == 0:
            self.number = -1
            self.sent(self.version)

    def read(self, frame: Any) -> Ranked:
        """Raises ValueError for what is no such answer."""
        if type(frame) is not frames.Answer:
            raise ValueError("not the answer to a request for scores")
        scores = frames.scores_of(frame, self.candidates, self.version.served.manifest.config.actions)
        return Ranked(scores, frame.cache, frame.queue_seconds, frame.forward_seconds)

    def end(self, result: Any) -> None:
        """Tell the caller."""
        self.done(result)
