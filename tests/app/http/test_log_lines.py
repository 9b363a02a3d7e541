"""Every request, however odd, is one line of JSON in plain ASCII, and nothing of its body is in it."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import Iterator
from typing import Any

import pytest
import structlog
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from app.http.application import create_app
from app.settings import Logs, Settings
from app.telemetry import logs
from loadtest.fuzz.bodies import nearly_valid
from loadtest.fuzz.calls import JSON_TYPE, Answer, Call, send
from tests.app.fakes import FakeEngine, running

SECRET = "700000000000000007"
evil = st.sampled_from(
    ["\r\n", "\n", "\x1b[31m", "\x00", "\x7f", "\u2028", '"', "\\", "{}", "é", "x" * 65_536]
) | st.text(max_size=20)
text = st.lists(evil, min_size=1, max_size=4).map("".join)


class Application:
    """The real one, in a loop of its own, with its log in memory."""

    def __init__(self, runner: asyncio.Runner, app: Any) -> None:
        self.runner = runner
        self.app = app

    def lines(self, call: Call) -> tuple[Answer, list[str]]:
        """The answer to a call, and what was logged meanwhile."""
        stream = io.StringIO()
        logs.configure(Logs(format="json"), stream)
        answer = self.runner.run(send(self.app, call))
        return answer, stream.getvalue().splitlines()


@pytest.fixture(scope="module")
def application() -> Iterator[Application]:
    before = structlog.get_config()
    with asyncio.Runner() as runner:
        context = running(FakeEngine())
        service = runner.run(context.__aenter__())
        yield Application(runner, create_app(Settings(), service))
        runner.run(context.__aexit__(None, None, None))
    structlog.configure(**before)


def check(lines: list[str], answer: Answer) -> dict[str, Any]:
    assert len(lines) == 1
    assert lines[0].isascii()
    assert lines[0].isprintable()
    line: dict[str, Any] = json.loads(lines[0])
    assert line["event"] == "request"
    assert line["status"] == answer.status
    assert line["request_id"] == answer.headers[b"x-request-id"].decode()
    assert len(lines[0]) < 1000
    return line


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(request_id=text, path=text, agent=text)
def test_headers_and_paths(application: Application, request_id: str, path: str, agent: str) -> None:
    headers = [
        JSON_TYPE,
        (b"x-request-id", request_id.encode("utf-8", "replace")),
        (b"user-agent", agent.encode("utf-8", "replace")),
    ]
    for call in (Call(b"{}", headers=tuple(headers)), Call(b"", path=f"/{path}", method="GET", headers=tuple(headers))):
        answer, lines = application.lines(call)
        check(lines, answer)
        assert b"\n" not in answer.headers[b"x-request-id"]


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(body=nearly_valid(), name=text)
def test_bodies(application: Application, body: dict[str, Any], name: str) -> None:
    event = {"post_id": SECRET, "author_id": SECRET, "actions": ["favorite"]}
    marked = body | {"user_id": SECRET, "history": [event], name: SECRET}
    answer, lines = application.lines(Call(json.dumps(marked).encode()))
    check(lines, answer)
    assert SECRET not in lines[0]


def test_a_line_that_shows_the_input_would_be_noticed(
    application: Application, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.http.observe.request_id_of", lambda headers: headers[b"x-request-id"].decode())
    call = Call(b"{}", headers=(JSON_TYPE, (b"x-request-id", SECRET.encode() + b"\n" + b"x" * 2000)))
    answer, lines = application.lines(call)
    with pytest.raises(AssertionError):
        check(lines, answer)
