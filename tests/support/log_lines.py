"""The log of this process: how it was before a test is how it is afterwards."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import structlog

from app.telemetry.logs import access


@contextmanager
def logs_as_before() -> Iterator[None]:
    """What `configure` sets in the block ends with the block."""
    before, root, put = structlog.get_config(), logging.getLogger(), access.put
    handlers = root.handlers
    yield
    structlog.configure(**before)
    root.handlers, access.put = handlers, put
