"""The bench of newer forms of a request: every form is taken, with the bits of what it replaces."""

from __future__ import annotations

from typing import Any

import pytest

from loadtest.bench import wires
from loadtest.bench.production import ask
from loadtest.generate.http_client import Reply
from loadtest.servers.launch import ranking_server


def test_every_form_is_taken_and_has_the_bits_of_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wires, "READINGS", 2)
    rows = list(wires.reading_rows(2))
    with ranking_server(threads=1) as server:
        rows += wires.http_rows(server, 1)
        assert len(rows) == 8
        [size] = [row for row in rows if row.unit == "bytes"]
        assert size.ok, size  # the others compare speeds

        def another(server: Any, content: Any, wire: str, path: str = "/rank") -> Reply:
            if "context" in content:
                content = {name: value for name, value in content.items() if name != "context"} | {
                    "user_id": 1,
                    "history": [],
                }
            return ask(server, content, wire, path)

        monkeypatch.setattr(wires, "ask", another)
        with pytest.raises(RuntimeError, match="other bits"):
            list(wires.http_rows(server, 1))
