"""The application as a whole: methods that no endpoint takes, and its beginning and end."""

from __future__ import annotations

from tests.app.serving import served


def test_other_methods_are_fastapis() -> None:
    with served() as (client, _):
        for path in (
            "/rank",
            "/rank/batch",
            "/rank/fake",
            "/context",
            "/explain",
            "/retrieve",
            "/v2/models/fake/infer",
        ):
            for method in ("GET", "HEAD", "PUT"):
                answer = client.request(method, path)
                assert (answer.status_code, answer.headers["allow"]) == (405, "POST")
        assert client.post("/rank/").status_code == 404
        assert set(client.get("/openapi.json").json()["paths"]) >= {"/rank", "/rank/batch"}


def test_the_lifespan_starts_the_service_and_stops_it() -> None:
    with served() as (_, service):
        assert service.health().ready
    assert service.health().draining
