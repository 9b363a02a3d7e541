"""The documentation: every field and status is described, and every example is a request that works."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib.metadata import version
from typing import Any

import msgspec
import pytest
from starlette.testclient import TestClient

from app.http.openapi import DESCRIBED, example_requests
from tests.app import retrieving
from tests.app.serving import served


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    with served(retrieval=retrieving.loader(tmp_path_factory.mktemp("retrieval"))) as (client, _):
        yield client


@pytest.fixture(scope="module")
def document(client: TestClient) -> dict[str, Any]:
    content: dict[str, Any] = client.get("/openapi.json").json()
    return content


def test_every_field_is_described(document: dict[str, Any]) -> None:
    fields = {
        f"{name}.{key}": schema
        for name, model in document["components"]["schemas"].items()
        for key, schema in model.get("properties", {}).items()
    }
    assert len(fields) > 40
    assert [path for path, schema in fields.items() if len(schema.get("description", "")) < 10] == []
    assert [name for name, model in document["components"]["schemas"].items() if not model.get("description")] == []


OPERATIONS = ("/livez", "/readyz", "/startupz", "/metrics", "/info")


def test_probes_and_info_are_what_the_document_says(client: TestClient, document: dict[str, Any]) -> None:
    for path, model in DESCRIBED.items():
        reply = client.get(path).raise_for_status().content
        msgspec.json.decode(reply, type=model)
        with pytest.raises(msgspec.ValidationError, match="unknown"):
            msgspec.json.decode(b'{"more": 1, ' + reply[1:], type=model)
        answer = document["paths"][path]["get"]["responses"]["200"]["content"]["application/json"]
        assert answer["schema"] == {"$ref": f"#/components/schemas/{model.__name__}"}


def test_every_path_is_there_and_described(document: dict[str, Any], client: TestClient) -> None:
    model = ("/v2/models/{name}", "/v2/models/{name}/versions/{version}")
    wanted = {"/context", "/rank", "/rank/{name}", "/rank/batch", "/explain", "/retrieve", "/recommend", *OPERATIONS}
    wanted |= {"/v2", "/v2/health/live", "/v2/health/ready", *model}
    wanted |= {f"{path}/{below}" for path in model for below in ("ready", "infer")}
    assert set(document["paths"]) == wanted
    for path, operations in document["paths"].items():
        for operation in operations.values():
            assert operation["summary"], path
            assert not operation["summary"].endswith("."), path
            assert operation["description"], path
            inferred = path.startswith("/v2") and not path.endswith("infer")
            group = "operations" if path in OPERATIONS else "open inference protocol" if inferred else "ranking"
            assert operation["tags"] == [group], path
            assert re.fullmatch(r"\w+", operation["operationId"]), (
                "code that is made from the document takes it for a name"
            )
            assert operation.get("security") == ([{}, {"key": []}] if group == "ranking" else None), path
    names = [operation["operationId"] for operations in document["paths"].values() for operation in operations.values()]
    assert len(set(names)) == len(names)
    assert document["components"]["securitySchemes"] == {"key": {"type": "http", "scheme": "bearer"}}
    assert document["info"]["description"], "what the whole is for"
    assert document["info"]["title"] == "Phoenix ranking server"
    assert document["info"]["version"] == version("phoenix-ranking-server")
    assert client.get("/docs").status_code == 200


@pytest.mark.parametrize("path", ["/context", "/rank", "/rank/batch", "/explain", "/retrieve", "/recommend"])
def test_every_refusal_is_listed(document: dict[str, Any], path: str) -> None:
    responses = document["paths"][path]["post"]["responses"]
    assert set(responses) == {"200", "400", "401", "404", "406", "412", "413", "415", "422", "429", "500", "503", "504"}
    named = {each["name"] for each in document["paths"][path]["post"]["parameters"]}
    assert named - {"X-Model-Version"} >= {"X-Request-ID", "X-Request-Timeout-Ms", "traceparent"}
    assert ("X-Model-Version" in named) == (path != "/retrieve")
    text = str(responses)
    for codes in (
        "malformed_json unauthorized context_unknown too_large unsupported_media_type invalid_request overloaded",
        "not_ready draining engine_down deadline_exceeded non_finite_scores",
    ):
        assert [code for code in codes.split() if code not in text] == []


def test_every_reference_leads_somewhere(document: dict[str, Any]) -> None:
    def references(value: Any) -> Iterator[str]:
        if isinstance(value, dict):
            yield from ([value["$ref"]] if "$ref" in value else [])
            for item in value.values():
                yield from references(item)
        elif isinstance(value, list):
            for item in value:
                yield from references(item)

    found = set(references(document))
    assert found
    assert {reference.rpartition("/")[2] for reference in found} <= set(document["components"]["schemas"])


def test_every_example_works(document: dict[str, Any], client: TestClient) -> None:
    for path in (
        "/context",
        "/rank",
        "/rank/{name}",
        "/rank/batch",
        "/explain",
        "/retrieve",
        "/recommend",
        "/v2/models/{name}/infer",
    ):
        content = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]
        assert content["examples"]
        for example in content["examples"].values():
            assert "history" in str(example["value"]), "each shows how events are written"
            reply = client.post(path.replace("{name}", "fake"), json=example["value"])
            assert reply.status_code == 200, reply.text
            assert "error" not in reply.text


def test_examples_speak_the_checkpoints_words() -> None:
    for names in (("favorite", "reply", "report"), ("action_0", "action_1"), ("one",)):
        text = str(example_requests(names))
        assert names[0] in text
        assert ("report" in text) == ("report" in names)
