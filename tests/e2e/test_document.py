"""What the running service answers is what its own `/openapi.json` promises, and generated clients understand that document."""

from __future__ import annotations

import copy
import importlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
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

from loadtest.server import Server, example
from tests.support import strategies

pytestmark = pytest.mark.slow

drawn = settings(derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck))
PROMISES = [
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
]
CASES = 5  # of each operation, right and wrong: about two hundred in all
BUSY = {429, 503, 504}  # what a drawn deadline or a neighbour's load may cost; anything else of 5xx is a fault


def no_fault(context: Any, response: Any, case: Any) -> bool | None:
    return None if response.status_code in BUSY else not_a_server_error(context, response, case)


@pytest.fixture(scope="module")
def document(client: httpx.Client) -> dict[str, Any]:
    content: dict[str, Any] = client.get("/openapi.json").json()
    return content


def operations(document: dict[str, Any]) -> list[Any]:
    return [result.ok() for result in schemathesis.openapi.from_dict(document).get_all_operations()]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("mode", list(GenerationMode))
def test_every_reply_keeps_to_the_document(server: Server, document: dict[str, Any], mode: GenerationMode) -> None:
    for operation in operations(document):

        @settings(drawn, max_examples=CASES)
        @given(case=operation.as_strategy(generation_mode=mode))
        def check(case: Any) -> None:
            sendable = {name: value for name, value in case.headers.items() if value.isprintable() and value.isascii()}
            case.headers = sendable
            case.call_and_validate(base_url=server.url, checks=[no_fault, *PROMISES])

        check()


def send_examples(server: Server, document: dict[str, Any]) -> None:
    """Every example of the document, with its reply held against the document."""
    model = server.get("/info").json()["model"]
    sent = 0
    for operation in operations(document):
        media = document["paths"][operation.path][operation.method].get("requestBody", {}).get("content", {})
        for one in media.get("application/json", {}).get("examples", {}).values():
            names = {name: model[name] for name in ("name", "version") if f"{{{name}}}" in operation.path}
            case = operation.Case(
                body=copy.deepcopy(one["value"]), media_type="application/json", path_parameters=names
            )
            assert case.call_and_validate(base_url=server.url, checks=PROMISES).status_code == 200, operation.path
            sent += 1
    assert sent > 8


def test_every_example_of_the_document_is_answered_as_it_says(server: Server, document: dict[str, Any]) -> None:
    send_examples(server, document)


@pytest.mark.parametrize("field", ["score", "probabilities", "post_id"])
def test_a_reply_that_breaks_the_document_is_noticed(server: Server, document: dict[str, Any], field: str) -> None:
    other = copy.deepcopy(document)
    other["components"]["schemas"]["RankedCandidate"]["properties"][field] = {"type": "boolean"}
    with pytest.raises(FailureGroup):
        send_examples(server, other)


BODIES: dict[str, st.SearchStrategy[Any]] = {
    "/rank": strategies.valid,
    "/rank/batch": st.fixed_dictionaries({"requests": st.lists(strategies.valid, max_size=3)}),
    "/context": st.fixed_dictionaries({"user_id": strategies.ids, "history": strategies.histories}),
    "/retrieve": strategies.retrieve_requests,
    "/recommend": strategies.recommend_requests,
    "/explain": strategies.rank_requests.map(lambda body: body | {"explain": [body["candidates"][0]["post_id"]]}),
}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("path", BODIES)
def test_no_body_is_a_fault_of_ours(client: httpx.Client, path: str) -> None:
    """Whatever the bytes of a request that was right once: an answer, or a refusal in the caller's terms."""

    @settings(drawn, max_examples=40)
    @given(body=strategies.mutated(BODIES[path]))
    def check(body: bytes) -> None:
        reply = client.post(path, content=body, headers={"content-type": "application/json"})
        assert reply.status_code < 500 or reply.status_code in BUSY, (body, reply.text)
        assert reply.status_code == 200 or reply.json()["code"], "a refusal has a code"

    check()


@pytest.fixture(scope="module")
def described(document: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("document") / "openapi.json"
    path.write_text(json.dumps(document))
    return path


def generate(*command: str | Path) -> str:
    """Run a generator of this environment; its output."""
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture
def importing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Any]]:
    """Imports modules of a package `generated` in the test's folder, which is forgotten afterwards."""
    monkeypatch.syspath_prepend(tmp_path)
    yield lambda name: importlib.import_module(f"generated.{name}")
    for name in [name for name in sys.modules if name.partition(".")[0] == "generated"]:
        del sys.modules[name]


def test_a_generated_python_client_ranks(
    server: Server, document: dict[str, Any], described: Path, tmp_path: Path, importing: Callable[[str], Any]
) -> None:
    pytest.importorskip("openapi_python_client")
    generate(
        *(Path(sys.executable).parent / "openapi-python-client", "generate", "--path", described, "--meta", "none"),
        *("--output-path", tmp_path / "generated", "--fail-on-warning"),
    )
    [operation] = [document["paths"]["/rank"]["post"]["operationId"]]
    ask, models = importing(f"api.ranking.{operation}"), importing("models")
    body = models.RankRequest.from_dict(example())
    with importing("client").Client(base_url=server.url) as client:
        reply = ask.sync_detailed(client=client, body=body).parsed
    assert isinstance(reply, models.RankReply)
    wanted = server.post("/rank", example()).json()["candidates"]
    assert [row.to_dict() for row in reply.candidates] == wanted


def test_openapi_generator_makes_a_typescript_client(document: dict[str, Any], described: Path, tmp_path: Path) -> None:
    """It validates the document first, and fails where it is wrong."""
    generator = Path(sys.executable).parent / "openapi-generator-cli"
    if not generator.exists() or shutil.which("java") is None:
        pytest.skip("needs openapi-generator-cli and Debian's default-jdk-headless")
    generate(generator, "generate", "-i", described, "-g", "typescript-fetch", "-o", tmp_path)
    paths = {path for path in document["paths"] if path.count("/") == 1}
    sources = "".join(path.read_text() for path in (tmp_path / "apis").glob("*.ts"))
    assert {"/rank", "/info"} <= paths
    assert [path for path in paths if f"`{path}`" not in sources] == []
    assert "createdAt?: number" in (tmp_path / "models" / "Candidate.ts").read_text()
