"""What an error becomes on its way from the engine process to a worker."""

from __future__ import annotations

import msgspec
import pytest

from app.errors import InvalidRequest, Overloaded
from app.processes.messages import Failed


@pytest.mark.parametrize(
    ("raised", "status", "code"),
    [
        (Overloaded("The queue is full.", retry_after_seconds=3.0), 429, "overloaded"),
        (InvalidRequest("user_id", "is missing"), 422, "invalid_request"),
        (MemoryError(), 503, "engine_down"),
        (ZeroDivisionError(), 500, "internal"),
        (msgspec.DecodeError(), 500, "internal"),  # of a message between the processes, which no caller has sent
    ],
)
def test_a_worker_raises_what_the_engine_process_has_raised(raised: Exception, status: int, code: str) -> None:
    error = Failed.of(1, raised).error()
    assert (error.status, error.code) == (status, code)
    if isinstance(raised, Overloaded):
        assert (error.detail, error.retry_after_seconds) == (raised.detail, 3.0)
