"""The check that decodes every reply by its declared type finds what the type does not say."""

from __future__ import annotations

import json

import httpx
import msgspec
import pytest

from tests.support.asgi import served
from tests.support.bodies import good
from tests.support.replies import check_reply


@pytest.fixture(scope="module")
def reply() -> httpx.Response:
    with served() as (client, _):
        answer = client.post("/rank", json=good())
        assert answer.status_code == 200
        return answer


def altered(reply: httpx.Response, **changes: object) -> httpx.Response:
    body = {name: value for name, value in (reply.json() | changes).items() if value is not None}
    return httpx.Response(
        200, headers={"content-type": "application/json"}, content=json.dumps(body), request=reply.request
    )


def test_a_reply_as_declared_passes(reply: httpx.Response) -> None:
    check_reply(altered(reply))


@pytest.mark.parametrize(
    "changes", [{"surplus": 1}, {"actions": None}, {"history_used": "1"}, {"candidates": [{"post_id": 1}]}]
)
def test_a_reply_that_differs_is_noticed(reply: httpx.Response, changes: dict[str, object]) -> None:
    with pytest.raises(msgspec.ValidationError):
        check_reply(altered(reply, **changes))
