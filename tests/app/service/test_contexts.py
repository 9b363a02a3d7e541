"""What a search may read of a context that the ranker has kept: what the user tower would read of the whole request, or nothing."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from app.engine.versions import Versions
from app.errors import ContextUnknown
from app.interface import ranked
from app.request import explanation
from app.service.contexts import Contexts
from app.settings import Batching
from app.telemetry.metrics import Metrics
from model.cache import ContextCache
from model.engine import Item
from model.inputs import Context
from model.retrieval.inputs import Filters, Query
from tests.app.fakes import CONFIG, FakeEngine, busy, loaded, request, running
from tests.app.serving import checked, good

RANKER = loaded(FakeEngine()).checkpoint.manifest
NOBODY = request(0, history=0)[0]


def towers(**changes: Any) -> Any:
    """A retrieval checkpoint that reads as the ranker does, but for these."""
    manifest = {name: changes.pop(name) for name in ("action_names", "ids") if name in changes}
    return replace(RANKER, config=replace(CONFIG, **changes), **manifest)


def found(context: Context, served: Any, *, excludes_history: bool = False, ranker: Any = RANKER) -> Query:
    """What a search by the handle of this context reads."""
    versions: Versions[Any] = Versions(Batching(), None, lambda: 0.0, 1.0)  # type: ignore[arg-type]
    cache: ContextCache[None] = ContextCache(2**20, prefixes=False)
    handle = cache.name(Item(context, request(1, 0)[1], caller="feed"), ranker.config)
    engine = SimpleNamespace(context_of=lambda *asked: cache.context_of(*asked, ranker.config))
    model = SimpleNamespace(engine=engine, served=SimpleNamespace(manifest=ranker))
    versions.current = SimpleNamespace(model=model)  # type: ignore[assignment]
    query = Query(NOBODY, 5, Filters(np.array([9], np.uint64)), handle=handle, excludes_history=excludes_history)
    query.check(served.config)
    return Contexts(Metrics(), versions).query(query, served, "feed")


def test_the_tower_reads_the_newest_of_what_is_kept() -> None:
    context, _ = request(7, history=12)
    whole = found(context, towers(), excludes_history=True)
    assert (whole.handle, whole.context.post_ids.tolist()) == ("", context.post_ids.tolist())
    assert whole.filters.exclude.tolist() == [9, *context.post_ids.tolist()]
    shorter = found(replace(context, dropped=3), towers(history_length=5))
    assert (shorter.context.post_ids.tolist(), shorter.context.dropped) == (context.post_ids[-5:].tolist(), 10)
    assert shorter.filters.exclude.tolist() == [9]
    longer = found(context, towers(history_length=100))
    assert len(longer.context) == 12, "nothing was dropped, so this is all"


@pytest.mark.parametrize(
    ("why", "context", "served", "options"),
    [
        ("dropped posts are to be excluded", replace(request(7, history=16)[0], dropped=1), towers(), {"excludes_history": True}),
        ("dropped events are read", replace(request(7, history=16)[0], dropped=1), towers(history_length=17), {}),
        ("other actions", request(7)[0], towers(action_names=("reply", "favorite", "report")), {}),
        ("other ids", request(7)[0], towers(ids="text"), {}),
        ("fewer surfaces", request(7)[0], towers(product_surfaces=CONFIG.product_surfaces - 1), {}),
        ("nothing is known of the user", NOBODY, towers(), {}),
        ("dwell time was not kept", request(7)[0], towers(), {"ranker": replace(RANKER, config=replace(CONFIG, has_dwell=False))}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_what_the_tower_would_read_otherwise_is_unknown(why: str, context: Context, served: Any, options: Any) -> None:
    with pytest.raises(ContextUnknown):
        found(context, served, **options)


@pytest.mark.parametrize("is_loaded", [False, True])
def test_a_search_by_a_handle_that_nobody_has_is_told_and_counted(is_loaded: bool) -> None:
    versions: Versions[Any] = Versions(Batching(), None, lambda: 0.0, 1.0)  # type: ignore[arg-type]
    if is_loaded:
        engine = SimpleNamespace(context_of=lambda *asked: None)
        versions.current = SimpleNamespace(model=SimpleNamespace(engine=engine))  # type: ignore[assignment]
    metrics, query = Metrics(), Query(NOBODY, 5, Filters(np.array([9], np.uint64)), handle="0" * 32)
    with pytest.raises(ContextUnknown):
        Contexts(metrics, versions).query(query, towers(), "feed")
    assert metrics.context_handles.labels("unknown")._value.get() == 1


def test_an_explanation_needs_all_events_and_integer_ids() -> None:
    """The control is the same context whole."""
    context, _ = request(7, history=12)
    asked = replace(checked(good(user_id=1, history=[])), handle="0" * 32)
    made = explanation.with_context(asked, context, RANKER)
    assert (made.user_id, made.history_length, made.handle) == (7, 12, None)
    for kept, ranker in ((replace(context, dropped=1), RANKER), (context, replace(RANKER, ids="text"))):
        with pytest.raises(ContextUnknown):
            explanation.with_context(asked, kept, ranker)


@pytest.mark.anyio
async def test_a_context_that_nobody_waits_for_any_more_leaves_the_queue() -> None:
    """It has no candidates that are left, and is not computed all the same."""
    async with busy() as (service, engine, gate, first):
        context, candidates = request(7, candidates=0)
        ticket = service.admit(service.model, candidates=0, history=len(context), deadline=None)
        service.rank(ticket, context, candidates, lambda result: None)
        assert service.versions.waiting == 1
        ticket.release()
        assert (service.versions.waiting, service.admission.requests) == (0, 1)
        gate.opened.set()
        await first
        assert engine.chunks == [[4]]


@pytest.mark.anyio
async def test_a_handle_counts_as_the_context_that_it_names() -> None:
    async with running(FakeEngine()) as service:
        context, candidates = request(7, history=5)
        whole = service.admit(service.model, candidates=4, history=5, deadline=None)
        handle = (await ranked(service, whole, context, candidates)).handle
        ticket = service.admit(service.model, candidates=4, history=0, deadline=None)
        assert service.admission.context_tokens == 1
        named = ranked(service, ticket, handle, candidates)
        working = asyncio.ensure_future(named)
        await asyncio.sleep(0)
        assert service.admission.context_tokens == 6
        result = await working
        assert (result.handle, result.history_used, service.admission.context_tokens) == (handle, 5, 0)
