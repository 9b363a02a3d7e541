"""Retrieval as a front sees it: there is none, since no link carries a search."""

from __future__ import annotations

from typing import Any

from app.errors import CorpusNotLoaded
from app.interface import ServedRetrieval

SINGLE = "Retrieval needs a single process, and this service has several (RANKER_FRONTS)."


class NoRetrieval:
    """`interface.Retrieval`; all of it raises CorpusNotLoaded."""

    @property
    def served(self) -> ServedRetrieval:
        """Nothing."""
        raise CorpusNotLoaded(SINGLE)

    async def _refuse(self, *arguments: Any, **options: Any) -> Any:
        raise CorpusNotLoaded(SINGLE)

    def retrieve(self, *arguments: Any, **options: Any) -> Any:
        """Nothing."""
        raise CorpusNotLoaded(SINGLE)

    change = compact = _refuse
