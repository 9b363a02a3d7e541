"""What the pages' routes answer, around a fake engine. What the pages do is shown by a browser: tests/e2e/explore."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.requests import Request
from starlette.testclient import TestClient

from app.api.pages import MOST_CARRIED_BYTES, POLICY, WHAT_THERE_IS, CachedReply, carried
from app.settings import Explore
from tests.support.asgi import served
from tests.support.fakes import FakeEngine, fake_loader

pytestmark = [pytest.mark.anyio, pytest.mark.one_process("it is about files alone")]
DEMO = Path(__file__).parents[3] / "weights" / "demo"


@pytest.fixture(scope="module")
def client() -> Iterator[TestClient]:
    with served() as (client, _):
        yield client


@pytest.fixture(scope="module")
def without() -> Iterator[TestClient]:
    with served(explore=Explore(enabled=False)) as (client, _):
        yield client


@pytest.mark.parametrize("path", ["/explore", "/docs"])
def test_a_page_names_only_files_of_the_package_and_all_exist(client: TestClient, path: str) -> None:
    reply = client.get(path)
    assert (reply.status_code, reply.headers["content-security-policy"]) == (200, POLICY)
    named = re.findall(r'(?:src|href)="([^"#]+)"', reply.text)
    assert len(named) >= 3
    for name in named:
        part = client.get(f"/{name}")
        assert part.status_code == 200, name
        assert part.headers["content-security-policy"] == POLICY
        assert part.headers["x-content-type-options"] == "nosniff"


def test_who_has_a_file_is_told_so(client: TestClient) -> None:
    first = client.get("/assets/explore.js")
    again = client.get("/assets/explore.js", headers={"if-none-match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    other = client.get("/assets/explore.js", headers={"if-none-match": '"another"'})
    assert (other.status_code, other.content) == (200, first.content)


def test_the_root_leads_to_the_page_by_a_relative_address(client: TestClient) -> None:
    reply = client.get("/", follow_redirects=False)
    assert (reply.status_code, reply.headers["location"]) == (307, "explore")


def test_without_the_page_the_root_lists_what_there_is(without: TestClient) -> None:
    assert without.get("/").json() == WHAT_THERE_IS
    known = without.get("/openapi.json").json()["paths"]
    for path in WHAT_THERE_IS.values():
        assert f"/{path}" in known or without.get(f"/{path}").status_code == 200


@pytest.mark.parametrize(
    "words",
    [
        {"ids": "text"},
        {"actions": ("like", "skip", "buy")},
        {"actions": ("reply", "favorite", "bookmark"), "ids": "text"},
    ],
)
def test_every_example_of_the_document_works_on_the_checkpoint(words: dict[str, Any]) -> None:
    with served(load=fake_loader(FakeEngine(), **words)) as (client, _):
        asked = 0
        for path, operations in client.get("/openapi.json").json()["paths"].items():
            content = operations.get("post", {}).get("requestBody", {}).get("content", {}).get("application/json", {})
            for example in content.get("examples", {}).values():
                url = path.replace("{name}", "fake").replace("{version}", "v1")
                reply = client.post(url, json=example["value"])
                wanted = (404,) if path in ("/retrieve", "/recommend") else (200,)  # they have no corpus here
                assert reply.status_code in wanted, (path, reply.text)
                assert '"error"' not in reply.text or reply.status_code == 404, reply.text
                asked += 1
        assert asked >= 10


@pytest.mark.parametrize("path", ["/explore", "/assets/explore.js", "/explore/checkpoint.json"])
def test_what_is_off_is_not_there(without: TestClient, path: str) -> None:
    assert without.get(path).json()["code"] == "not_found"
    assert without.get("/docs").status_code == 200


@pytest.mark.parametrize("name", ["gone.js", "%2e%2e%2fpages.py", "..%2fpages.py", "__init__.py%00.js"])
def test_nothing_else_is_served(client: TestClient, name: str) -> None:
    assert client.get(f"/assets/{name}").status_code == 404


def test_a_page_is_not_posted_to(client: TestClient) -> None:
    assert client.post("/explore").json()["code"] == "method_not_allowed"


def test_names_of_another_checkpoint_are_not_shown(tmp_path: Path) -> None:
    digest = json.loads((DEMO / "manifest.json").read_text())["digest"]
    nothing = {"example": None, "names": None}
    own = {name: json.loads((DEMO / f"{name}.json").read_text()) for name in nothing}
    assert carried(DEMO, digest) == own
    assert carried(DEMO, "0" * 64) == nothing
    shutil.copy(DEMO / "manifest.json", tmp_path)
    assert carried(tmp_path, digest) == nothing
    (tmp_path / "names.json").write_text("{")
    shutil.copy(DEMO / "example.json", tmp_path)
    assert carried(tmp_path, digest) == nothing | {"example": own["example"]}
    (tmp_path / "manifest.json").write_text("[]")
    assert carried(tmp_path, digest) == nothing


def test_only_files_of_a_bounded_size_are_read(tmp_path: Path) -> None:
    """A FIFO would wait for its writer, and a large file would be kept; the demo's own are the control."""
    for name in ("manifest.json", "example.json"):
        shutil.copy(DEMO / name, tmp_path)
    digest = json.loads((DEMO / "manifest.json").read_text())["digest"]
    os.mkfifo(tmp_path / "names.json")
    assert carried(tmp_path, digest)["names"] is None
    os.remove(tmp_path / "names.json")
    for size, is_kept in ((MOST_CARRIED_BYTES, True), (MOST_CARRIED_BYTES + 1, False)):
        (tmp_path / "names.json").write_text('"' + "x" * (size - 2) + '"')
        assert (carried(tmp_path, digest)["names"] is not None) == is_kept
    (tmp_path / "names.json").unlink()
    (tmp_path / "names.json").mkdir()
    assert carried(tmp_path, digest) == {"example": json.loads((DEMO / "example.json").read_text()), "names": None}


def test_an_etag_of_the_document_or_checkpoint_gets_304(client: TestClient) -> None:
    for path in ("/explore/checkpoint.json", "/openapi.json"):
        reply = client.get(path)
        again = client.get(path, headers={"if-none-match": f'"other", W/{reply.headers["etag"]}'})
        assert (reply.status_code, again.status_code, again.content) == (200, 304, b"")
        assert again.headers["etag"] == reply.headers["etag"]


async def test_a_failed_reply_is_made_again_and_another_key_anew() -> None:
    made: list[str] = []

    def make(key: str) -> bytes:
        made.append(key)
        if len(made) == 1:
            raise OSError("planted")
        return key.encode()

    kept, request = CachedReply(make, "text/plain"), Request({"type": "http", "headers": []})

    with pytest.raises(OSError, match="planted"):
        await kept.reply(request, "a")
    replies = await asyncio.gather(*(kept.reply(request, "a") for _ in range(5)))
    assert {reply.body for reply in replies} == {b"a"}
    assert (await kept.reply(request, "b")).body == b"b"
    assert made == ["a", "a", "b"]


def test_a_checkpoint_without_names_has_none(client: TestClient) -> None:
    reply = client.get("/explore/checkpoint.json")
    assert reply.json() == {"example": None, "names": None}, "the fake engine's checkpoint is not the demo"
    assert reply.headers["cache-control"] == "no-cache"
