"""What tests of app/ray share."""

from __future__ import annotations

import pytest

from app.telemetry import logs


@pytest.fixture(autouse=True)
def _logs_of_the_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    """A replica and an ingress set up the logs of their process, which here is everybody's."""
    monkeypatch.setattr(logs, "configure", lambda settings: None)
