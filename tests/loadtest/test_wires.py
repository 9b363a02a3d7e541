"""The bench of newer forms of a request: every form is taken, with the bits of what it replaces."""

from __future__ import annotations

from typing import Any

import pytest

from loadtest.bench import production
from loadtest.bench.production import payload_of
from loadtest.servers.launch import ranking_server


def test_every_form_is_taken_and_has_the_bits_of_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(production, "READINGS", 2)
    rows = list(production.reading_rows(2))
    with ranking_server(threads=1) as server:
        rows += [*production.page_rows(server, 1), production.prewarmed_row(server, "the demo's window", 1)]
        assert len(rows) == 8
        [size] = [row for row in rows if row.unit == "bytes"]
        assert size.ok, size  # the others compare speeds

        def another(content: Any, wire: str, path: str = "/rank") -> bytes:
            if "context" in content:
                content = {"user_id": 1, "history": [], "candidates": content["candidates"]}
            return payload_of(content, wire, path)

        monkeypatch.setattr(production, "payload_of", another)
        with pytest.raises(RuntimeError, match="other bits"):
            list(production.page_rows(server, 1))
