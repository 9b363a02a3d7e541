"""One request of plain ASGI: its limits to the byte, its timeouts, and who hears that its client has gone."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from starlette.types import Message

from app.errors import InvalidRequest, TooLarge
from app.http.asgi import ClientGone, Watching, check_length, read_body, send_reply, timeout_seconds_of

pytestmark = pytest.mark.anyio


def received(*chunks: bytes) -> Callable[[], Awaitable[Message]]:
    """What a server gives an application: these pieces of a body, then a disconnect."""
    body = [{"body": chunk, "more_body": place < len(chunks)} for place, chunk in enumerate(chunks, 1)]
    messages = [{"type": "http.request", **message} for message in body] + [{"type": "http.disconnect"}]

    async def receive() -> Message:
        return messages.pop(0)

    return receive


@pytest.mark.parametrize("chunks", [(b"0123456789",), (b"01234", b"56789"), (b"0123456789", b""), (b"", b"0123456789")])
async def test_a_body_of_the_limit_is_read_and_one_byte_more_refused(chunks: tuple[bytes, ...]) -> None:
    assert await read_body({}, received(*chunks), 10) == b"0123456789"
    with pytest.raises(TooLarge):
        await read_body({}, received(*chunks), 9)


async def test_a_body_that_breaks_off_is_no_body() -> None:
    receive = received(b"01234", b"56789")
    await receive()
    await receive()
    with pytest.raises(ClientGone):
        await read_body({}, receive, 10)


@pytest.mark.parametrize("length", [b"101", b"x", b"-1", b"9" * 30])
async def test_a_length_beyond_the_limit_or_none_at_all_is_refused_before_the_body(length: bytes) -> None:
    check_length({b"content-length": b"100"}, 100)
    with pytest.raises(TooLarge):
        check_length({b"content-length": length}, 100)


async def test_the_shorter_timeout_counts() -> None:
    own, envoy = b"x-request-timeout-ms", b"x-envoy-expected-rq-timeout-ms"
    assert timeout_seconds_of({}) is None
    assert timeout_seconds_of({own: b"1500"}) == 1.5
    assert timeout_seconds_of({own: b"1500", envoy: b"250"}) == timeout_seconds_of({envoy: b"250"}) == 0.25
    assert timeout_seconds_of({own: b"1500", envoy: b"0"}) == timeout_seconds_of({own: b"1500", envoy: b"soon"}) == 1.5
    assert timeout_seconds_of({own: b"9" * 12}) == 999_999_999.999
    for bad in (b"9" * 13, b"soon", b""):
        with pytest.raises(InvalidRequest):
            timeout_seconds_of({own: bad})


async def test_a_reply_tells_its_length() -> None:
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    await send_reply(send, 200, [(b"a", b"b")], b"0123456789")
    assert sent[0]["headers"] == [(b"a", b"b"), (b"content-length", b"10")]
    assert (sent[0]["status"], sent[1]["body"]) == (200, b"0123456789")


@pytest.mark.parametrize("stopped_too", [False, True])
async def test_work_whose_client_has_gone_ends_as_such_unless_it_is_stopped_as_well(stopped_too: bool) -> None:
    gone = asyncio.Event()

    async def receive() -> Message:
        await gone.wait()
        return {"type": "http.disconnect"}

    async def work() -> None:
        with Watching(receive):
            gone.set()
            if stopped_too:
                task.cancel()
            await asyncio.Event().wait()

    task = asyncio.create_task(work())
    with pytest.raises(asyncio.CancelledError if stopped_too else ClientGone):
        await asyncio.wait_for(task, 10)


async def test_work_that_fails_by_itself_fails_as_such() -> None:
    with pytest.raises(ValueError, match="its own"), Watching(received()):
        raise ValueError("its own")
