"""What the running server answers is what its own `/openapi.json` promises: status, media type, headers, every field."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import schemathesis
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.core.failures import FailureGroup
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from loadtest.fuzz.sources import drawn
from tests.app import retrieving
from tests.e2e.process import DEMO, Server, serving
from weights.actions import STANDARD_ACTIONS

EXAMPLES = 8


def no_fault_of_ours(context: Any, response: Any, case: Any) -> bool | None:
    """504 is the right answer to a deadline of a millisecond, which a draw may hold."""
    return None if response.status_code == 504 else not_a_server_error(context, response, case)


CHECKS = [
    no_fault_of_ours,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    paths = retrieving.written(tmp_path_factory.mktemp("posts"), actions=STANDARD_ACTIONS)
    with serving(DEMO, threads=1, retrieval__checkpoint=paths[0], retrieval__corpus=paths[1]) as server:
        yield server


def operations(document: dict[str, Any]) -> list[Any]:
    """The endpoints that rank."""
    found = [result.ok() for result in schemathesis.openapi.from_dict(document).get_all_operations()]
    return [operation for operation in found if operation.method == "post"]


@pytest.fixture(scope="module")
def document(server: Server) -> dict[str, Any]:
    content: dict[str, Any] = httpx.get(f"{server.url}/openapi.json").json()
    return content


@pytest.mark.parametrize("mode", list(GenerationMode))
def test_replies_keep_to_the_document(server: Server, document: dict[str, Any], mode: GenerationMode) -> None:
    for operation in operations(document):
        for case in drawn(operation.as_strategy(generation_mode=mode), 1, EXAMPLES):
            case.headers = {
                name: value for name, value in case.headers.items() if value.isprintable() and value.isascii()
            }
            case.call_and_validate(base_url=server.url, checks=CHECKS)


def ranked(server: Server, document: dict[str, Any]) -> None:
    """Every example of the document, with its reply held against the document."""
    model = httpx.get(f"{server.url}/info").json()["model"]
    for operation in operations(document):
        examples = document["paths"][operation.path]["post"]["requestBody"]["content"]["application/json"]["examples"]
        for example in examples.values():
            case = operation.Case(
                body=copy.deepcopy(example["value"]), media_type="application/json", path_parameters=model
            )
            response = case.call_and_validate(base_url=server.url, checks=CHECKS)
            assert response.status_code == 200


def test_rankings_keep_to_the_document(server: Server, document: dict[str, Any]) -> None:
    ranked(server, document)


@pytest.mark.parametrize("field", ["score", "probabilities", "continuous", "post_id"])
def test_a_ranking_that_breaks_the_document_is_noticed(server: Server, document: dict[str, Any], field: str) -> None:
    other = copy.deepcopy(document)
    other["components"]["schemas"]["RankedCandidate"]["properties"][field] = {"type": "boolean"}
    with pytest.raises(FailureGroup):
        ranked(server, other)
