"""Reads the address of a feed: which Redis, which stream. Nothing that is said of it repeats a piece of it, which may be of a password."""

from __future__ import annotations

from typing import NamedTuple
from urllib.parse import unquote, urlsplit

RULE = (
    "must be redis://[USER:PASSWORD@]HOST[:PORT]/[DB/]STREAM[?OPTIONS] or the same with rediss://; in a name or password, "
    "@ is written %40, / is %2F, # is %23, ? is %3F and : is %3A"
)


class FeedAddress(NamedTuple):
    """`url`: of the server, with redis-py's options, as `redis.Redis.from_url` reads it. `stream`: the name of the stream."""

    url: str
    stream: str

    @classmethod
    def of(cls, address: str) -> FeedAddress:
        """Split an address such as `redis://:secret@host:6379/posts?socket_keepalive=true`. Raises ValueError for any other form.

        The path is the stream's name, percent-decoded, with perhaps a number of a database before it.
        """
        try:
            parts = urlsplit(address)
            is_port = parts.port != 0  # `port` raises ValueError for what is none
        except ValueError:
            raise ValueError(RULE) from None
        *before, stream = parts.path.removeprefix("/").split("/")
        rest = parts.path + parts.query
        if (
            parts.scheme not in ("redis", "rediss")
            or not (parts.hostname and is_port and stream)
            or parts.netloc.count("@") > 1
            or "#" in address
            or "@" in rest
            or any(letter.isspace() or not letter.isprintable() for letter in address)
            or not (not before or (len(before) == 1 and before[0].isdecimal()))
        ):
            raise ValueError(RULE)
        return cls(parts._replace(path="/".join(["", *before])).geturl(), unquote(stream))
