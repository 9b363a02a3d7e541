"""A bare ASGI function that parses the same JSON and sends as many bytes: an upper bound for a Python server."""

from __future__ import annotations

import os
import sys
from contextlib import AbstractContextManager
from typing import Any

import orjson

from loadtest.servers.launch import Server, free_port, process

REPLY_BYTES = "BARE_REPLY_BYTES"


async def bare(scope: Any, receive: Any, send: Any) -> None:
    """Read and parse the body, then reply with the configured number of bytes."""
    body, more = b"", True
    while more:
        message = await receive()
        body, more = body + message.get("body", b""), message.get("more_body", False)
    orjson.loads(body or b"{}")
    size = os.environ[REPLY_BYTES]
    headers = [(b"content-type", b"application/json"), (b"content-length", size.encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": b"x" * int(size)})


def bare_server(reply_bytes: int) -> AbstractContextManager[Server]:
    """A process that serves the bare function with uvicorn, uvloop and httptools."""
    port = free_port()
    flags = "--loop uvloop --http httptools --no-access-log --log-level warning --lifespan off"
    command = [sys.executable, "-m", "uvicorn", f"{__name__}:bare", "--port", str(port), *flags.split()]
    return process(command, {REPLY_BYTES: str(reply_bytes)}, port=port)
