"""Looks up contexts that requests name by a handle, in the caches of the engines that serve."""

from __future__ import annotations

from dataclasses import replace
from typing import NoReturn

import numpy as np

from app.errors import ContextUnknown
from app.queue.job import RankJob
from app.queue.scheduler import Scheduler
from app.queue.versions import Versions
from app.telemetry.metrics import Metrics
from model.inputs import Context, codes_as_read
from model.retrieval.inputs import Query
from weights.format.manifest import Manifest


class Handles:
    """Used by the event loop only; engines insert and evict in their own threads meanwhile. Each method raises ContextUnknown."""

    def __init__(self, versions: Versions[RankJob], metrics: Metrics) -> None:
        self._versions = versions
        self._lookups = metrics.context_handles

    def of(self, scheduler: Scheduler[RankJob], handle: str, key: str | None) -> Context:
        """Return the context that this API key's handle names in this scheduler's engine."""
        context: Context | None = scheduler.loaded.engine.context_of(handle, key or "")
        if context is None:
            self._unknown()
        self._lookups.labels("found").inc()
        return context

    def query(self, query: Query, towers: Manifest, key: str | None, *, is_counted: bool = True) -> Query:
        """Fill in a query that names its context by a handle: with what the user tower would read of the whole request. `is_counted`: not
        where the same request is ranked afterwards, which finds the context once more."""
        current = self._versions.current
        cached: Context | None = None if current is None else current.loaded.engine.context_of(query.handle, key or "")
        if current is None or cached is None:
            self._unknown()
        context = _as_read(cached, current.loaded.served.manifest, towers, query.excludes_history)
        if context is None:
            self._unknown()
        if is_counted:
            self._lookups.labels("found").inc()
        excluded = query.filters.exclude
        if query.excludes_history:
            excluded = np.concatenate((excluded, cached.post_ids))
        return replace(query, context=context, filters=replace(query.filters, exclude=excluded), handle="")

    def _unknown(self) -> NoReturn:
        self._lookups.labels("unknown").inc()
        raise ContextUnknown


def _as_read(context: Context, manifest: Manifest, towers: Manifest, excludes_history: bool) -> Context | None:
    """Return what the user tower reads of a request whose context the ranker kept. None if the tower may read, or exclude, more than was
    kept, if it reads requests differently, or if nothing is known of the user. `manifest`: the ranker's."""
    ours, theirs = manifest.config, towers.config
    lacks_events = context.dropped and (excludes_history or theirs.history_length > ours.history_length)
    lacks_dwell = theirs.has_dwell and not ours.has_dwell
    is_alike = (manifest.action_names, manifest.ids) == (towers.action_names, towers.ids)
    codes = theirs.code_levels, theirs.code_values
    lacks_codes = bool(theirs.code_levels) and codes != (ours.code_levels, ours.code_values)
    is_nobody = not context.user_id and not context.post_ids.any()
    if (
        lacks_events
        or lacks_dwell
        or lacks_codes
        or not is_alike
        or is_nobody
        or theirs.product_surfaces < ours.product_surfaces
    ):
        return None
    return replace(context, codes=codes_as_read(context.codes, theirs)).last(theirs.history_length)
