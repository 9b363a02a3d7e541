"""What a search may read of a context that the ranker has kept: what the user tower would read of the whole request, or nothing."""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest

from app.errors import ContextUnknown
from app.interface import PlaceRequest
from app.service.local import LocalService
from model.inputs import Context
from model.retrieval.inputs import Filters, Query
from tests.support.fakes import CONFIG, FakeEngine, fake_model, fake_request
from tests.support.rankers import running

RANKER = fake_model(FakeEngine()).checkpoint.manifest
NOBODY = fake_request(0, history=0)[0]


def towers(**changes: Any) -> Any:
    """A retrieval checkpoint that reads requests as the ranker does, but for these."""
    manifest = {name: changes.pop(name) for name in ("action_names", "ids") if name in changes}
    return msgspec.structs.replace(RANKER, config=replace(CONFIG, **changes), **manifest)


def query(handle: str, *, excludes_history: bool = False) -> Query:
    """A search by a handle that excludes post 9."""
    return Query(NOBODY, 5, Filters(np.array([9], np.uint64)), handle=handle, excludes_history=excludes_history)


async def kept(ranker: LocalService, context: Context) -> str:
    """The handle of this context, once it has been ranked."""
    _, posts = fake_request(1, 1)
    with ranker.admit(ranker.model(), PlaceRequest(1, len(context), math.inf, "feed")) as job:
        return (await ranker.rank(job, context, posts)).handle


def found(context: Context, read_by: Any, **asked: bool) -> Query:
    """What a search by the handle of this context reads."""

    async def main() -> Query:
        async with running() as ranker:
            return ranker.handles.query(query(await kept(ranker, context), **asked), read_by, "feed")

    return asyncio.run(main())


def test_the_tower_reads_the_newest_of_what_is_kept() -> None:
    context, _ = fake_request(7, history=12)
    whole = found(context, towers(), excludes_history=True)
    assert (whole.handle, whole.context.post_ids.tolist()) == ("", context.post_ids.tolist())
    assert whole.filters.exclude.tolist() == [9, *context.post_ids.tolist()]
    shorter = found(replace(context, dropped=3), towers(history_length=5))
    assert (shorter.context.post_ids.tolist(), shorter.context.dropped) == (context.post_ids[-5:].tolist(), 10)
    assert shorter.filters.exclude.tolist() == [9]
    longer = found(context, towers(history_length=100))
    assert len(longer.context) == 12, "nothing was dropped, so this is all"


@pytest.mark.parametrize(
    ("why", "context", "read_by", "asked"),
    [
        ("dropped posts are to be excluded", replace(fake_request(7, history=16)[0], dropped=1), towers(), {"excludes_history": True}),
        ("dropped events are read", replace(fake_request(7, history=16)[0], dropped=1), towers(history_length=17), {}),
        ("other actions", fake_request(7)[0], towers(action_names=("reply", "favorite", "report")), {}),
        ("other ids", fake_request(7)[0], towers(ids="text"), {}),
        ("fewer surfaces", fake_request(7)[0], towers(product_surfaces=CONFIG.product_surfaces - 1), {}),
        ("nothing is known of the user", NOBODY, towers(), {}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_what_the_tower_would_read_otherwise_is_unknown(
    why: str, context: Context, read_by: Any, asked: dict[str, bool]
) -> None:
    with pytest.raises(ContextUnknown):
        found(context, read_by, **asked)
