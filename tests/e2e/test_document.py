"""What the running service answers is what its own `/openapi.json` promises, and no request is a fault of the service."""

from __future__ import annotations

import copy
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.core.failures import FailureGroup
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from tests.app.api.live import Live
from tests.support import strategies

drawn = settings(derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck))
PROMISES = [
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
]
CASES = 3  # of each operation, right and wrong: about a hundred in all
BUSY = {429, 503, 504}  # what a drawn deadline or a neighbour's load may cost; anything else of 5xx is a fault


def no_fault(context: Any, response: Any, case: Any) -> bool | None:
    return None if response.status_code in BUSY else not_a_server_error(context, response, case)


@pytest.fixture(scope="module")
def document(client: httpx.Client) -> dict[str, Any]:
    content: dict[str, Any] = client.get("/openapi.json").json()
    return content


def operations(document: dict[str, Any]) -> list[Any]:
    found: Any = schemathesis.openapi.from_dict(document).get_all_operations()
    return [result.ok() for result in found]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("mode", list(GenerationMode))
def test_every_reply_keeps_to_the_document(server: Live, document: dict[str, Any], mode: GenerationMode) -> None:
    for operation in operations(document):
        if mode is GenerationMode.NEGATIVE and operation.method == "get":
            continue  # it has nothing that can be wrong

        @settings(drawn, max_examples=CASES)
        @given(case=operation.as_strategy(generation_mode=mode))
        def check(case: Any) -> None:
            sendable = {name: value for name, value in case.headers.items() if value.isprintable() and value.isascii()}
            case.headers = sendable
            case.call_and_validate(base_url=server.url, checks=[no_fault, *PROMISES])

        check()


def send_examples(client: httpx.Client, document: dict[str, Any]) -> None:
    """Every example of the document, with its reply held against the document."""
    model = client.get("/info").json()["model"]
    sent = 0
    for operation in operations(document):
        media: dict[str, Any] = (
            document["paths"][operation.path][operation.method].get("requestBody", {}).get("content", {})
        )
        for one in media.get("application/json", {}).get("examples", {}).values():
            names = {name: model[name] for name in ("name", "version") if f"{{{name}}}" in operation.path}
            case = operation.Case(
                body=copy.deepcopy(one["value"]), media_type="application/json", path_parameters=names
            )
            assert case.call_and_validate(base_url=str(client.base_url), checks=PROMISES).status_code == 200, (
                operation.path
            )
            sent += 1
    assert sent > 8


def test_every_example_of_the_document_is_answered_as_it_says(client: httpx.Client, document: dict[str, Any]) -> None:
    send_examples(client, document)


def test_a_reply_that_breaks_the_document_is_noticed(client: httpx.Client, document: dict[str, Any]) -> None:
    other = copy.deepcopy(document)
    other["components"]["schemas"]["RankedCandidate"]["properties"]["score"] = {"type": "boolean"}
    with pytest.raises(FailureGroup):
        send_examples(client, other)


def explained(body: Any) -> Any:
    """The body of /explain that asks for the first candidate."""
    return body | {"explain": [body["candidates"][0]["post_id"]]}


BODIES: dict[str, st.SearchStrategy[Any]] = {
    "/context": st.fixed_dictionaries({"user_id": strategies.ids, "history": strategies.histories}),
    "/retrieve": strategies.retrieve_requests,
    "/recommend": strategies.recommend_requests,
    "/explain": strategies.rank_requests.map(explained),
}


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("path", BODIES)
def test_no_body_is_a_fault_of_ours(client: httpx.Client, path: str) -> None:
    """Whatever the bytes of a request that was right once: an answer, or a refusal in the caller's terms. /rank: tests/app/api."""

    @settings(drawn, max_examples=30)
    @given(body=strategies.mutated(BODIES[path]))
    def check(body: bytes) -> None:
        reply = client.post(path, content=body, headers={"content-type": "application/json"})
        assert reply.status_code < 500 or reply.status_code in BUSY, (body, reply.text)
        assert reply.status_code == 200 or reply.json()["code"], "a refusal has a code"

    check()
