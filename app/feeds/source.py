"""What a feed is to its reader, and how a URL names one."""

from __future__ import annotations

from typing import NamedTuple, Protocol
from urllib.parse import urlsplit

MAX_ENTRY_BYTES = 4 * 2**20
"""Of one change, as at the admin interface; a longer one is unreadable."""


class Entry(NamedTuple):
    """One change. `position`: two numbers and a dash, which grow; `body`: JSON as `POST /admin/posts` takes; `unix_seconds`: when it was
    written."""

    position: str
    body: bytes
    unix_seconds: float


class FeedGap(Exception):
    """The feed no longer holds what followed a position: to go on there would leave changes out. The message is a sentence."""


class NotKept(Exception):
    """The feed's server does not take an entry that cannot be read. The message says why."""


class Source(Protocol):
    """A log that others write. Used by one thread at a time; every method may wait for the network and raises what its library raises."""

    def after(self, position: str, most: int, wait_seconds: float) -> list[Entry]:
        """At most this many entries after this position, or from the beginning if it is "". Fewer mean that the log ended there.

        Raises FeedGap.
        """

    def bury(self, entry: Entry, reason: str) -> None:
        """Put an unreadable entry, with the reason, where people find it. Raises NotKept if the server refuses it."""

    def close(self) -> None:
        """End the connection."""


def parts_of(url: str) -> tuple[str, str]:
    """`redis://host:6379/posts` → `redis://host:6379` and `posts`. Raises ValueError for another scheme or port, and without a name."""
    base, _, name = url.rpartition("/")
    try:
        parts = urlsplit(url)
        is_known = parts.scheme == "kafka" or (parts.scheme in ("redis", "rediss") and parts.port != 0)
    except ValueError:  # a port that is none; what stands there may be a piece of a password
        is_known = False
    if not is_known or not name or base.endswith(":/"):
        raise ValueError("must be redis://HOST:PORT/STREAM, rediss://… or kafka://HOST:PORT/TOPIC")
    return base, name
