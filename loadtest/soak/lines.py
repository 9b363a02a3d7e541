"""B8: hostile ids, headers and paths over sockets. Each request must be one JSON line in the log that shows nothing of its content."""

from __future__ import annotations

import json
import random
import tempfile
import time
from collections.abc import Sequence
from string import ascii_letters, digits

from loadtest.matrix import Row
from loadtest.soak.clients import Callers
from loadtest.soak.servers import fake

SECRET = 700_000_000_000_000_007  # an id of every history
MARK = "zq9marker"  # part of every hostile value, and of no legitimate one
LONGEST_LINE = 1000
NAME_CHARACTERS = frozenset(ascii_letters + digits + "-_.:/=+@")
LONGEST_NAME = 128
IN_FLIGHT = 32
PATH = ('"', "\\", "{}", "%0d%0a", "%1b", "\\u000a", "null", "x" * 4000)
HEADER = (*PATH, "\t", "\u0085", "\u2028", "é", "\U0001f600", "\x9b31m")
# in a header, a request with these never reaches the application
REFUSED = ("\x1b[31m", "\x0b", "\x7f", "\r", "x" * 40_000)
BODY = (*HEADER, *REFUSED, "\r\n", "\n", "\x00", "x" * 65_536, "\ud800")


def lines(seconds: float, style: str = "json") -> Row:
    """Send requests until the time is over, then check the log. The figure is the longest line. `style` "console" must turn it red."""
    settings = {"logs__level": "info", "logs__format": style, "logs__success_sample": 1, "queue__max_wait_seconds": 10}
    with tempfile.TemporaryFile() as log:
        with fake(log=log, **settings) as server, Callers(server.port, IN_FLIGHT, call) as callers:
            time.sleep(seconds)
        log.seek(0)
        written = log.read().decode("utf-8", "replace").split("\n")[:-1]
    named = sum(b"x-request-id" in reply.headers for reply in callers.replies)  # answered by the application
    strangers = len(callers.replies) - named
    faults = [fault for line in written if (fault := complaint(line))]
    requests = sum('"event":"request"' in (bare := line.replace(" ", "")) and "/readyz" not in bare for line in written)
    failed = len(faults) + abs(requests - named)
    told = [f"hostile ids and headers: one line of JSON each, {strangers} refused before HTTP", *sorted(set(faults))]
    longest = max(map(len, written))
    return Row("B8", "; ".join(told), named, failed, longest, LONGEST_LINE, "characters in a line")


def complaint(line: str) -> str:
    """What is wrong with a line of the log; empty if nothing is."""
    if not (line.isascii() and line.isprintable()):
        return "a line that a terminal would obey"
    try:
        said = json.loads(line)
    except ValueError:
        return "a line that is no JSON"
    if not isinstance(said, dict) or "event" not in said:
        return "a line without an event"
    name = said.pop("request_id", "")
    if not (isinstance(name, str) and len(name) <= LONGEST_NAME and set(name) <= NAME_CHARACTERS):
        return "a name that is none"
    shown = json.dumps(said)
    return "a line that shows what was sent" if MARK in shown or str(SECRET) in shown else ""


def call(draw: random.Random) -> bytes:
    """A request with hostile values in its headers, and in its path or its body."""

    def evil(choices: Sequence[str]) -> str:
        return MARK + "".join(draw.choice(choices) for _ in range(draw.randint(1, 3)))

    odd = HEADER if draw.random() < 0.9 else REFUSED
    head = f"X-Request-ID: {evil(odd)}\r\nUser-Agent: {evil(odd)}\r\ntraceparent: {evil(odd)}\r\n".encode()
    if draw.random() < 0.4:
        return f"GET /{evil(PATH)}?{evil(PATH)} HTTP/1.1\r\nHost: localhost\r\n".encode() + head + b"\r\n"
    body = {
        "user_id": draw.choice(("1", evil(BODY))),
        "history": {"post_id": [str(SECRET)], "author_id": [SECRET]},
        "candidates": {"post_id": draw.choice(([2], [evil(BODY)])), "author_id": [SECRET]},
    }
    if draw.random() < 0.5:
        body["request_id"] = evil(BODY)
    if draw.random() < 0.3:
        body[evil(BODY)] = {evil(BODY): SECRET}
    content = json.dumps(body).encode()
    start = b"POST /rank HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return start + head + b"Content-Length: %d\r\n\r\n%b" % (len(content), content)
