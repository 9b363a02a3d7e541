"""The application around a ranker, without a server: a client that calls it as a server would."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from app.corpus.loading import CorpusLoader
from app.main import create_app
from app.queue.loading import Loader
from app.service.local import LocalService
from loadtest.server import wait_until
from tests.support import rankers
from tests.support.processes import fronting
from tests.support.replies import CheckedClient

ADDRESS = "http://127.0.0.1"


@contextmanager
def served(
    engine: Any = None, *, load: Loader | None = None, load_corpus: CorpusLoader | None = None, **groups: Any
) -> Iterator[tuple[CheckedClient, LocalService]]:
    """A client of the application around this engine, by default a `FakeEngine`, once it is ready. `groups` are of its settings."""
    ranker = rankers.create(engine, load=load, load_corpus=load_corpus, **groups)
    with client_of(ranker) as client:
        yield client, ranker


@contextmanager
def client_of(ranker: LocalService) -> Iterator[CheckedClient]:
    """A client of the application around this ranker once it is ready, in one process or several: see `tests.support.processes`."""
    with (
        fronting(ranker) as front,
        CheckedClient(create_app(ranker.settings, front), base_url=ADDRESS, raise_server_exceptions=False) as client,
    ):
        portal = client.portal
        assert portal is not None
        wait_until(lambda: portal.call(front.health).ready, 120)  # in its event loop, which may be installing a model
        yield client
