"""A second checkpoint and explanations behind a link are what they are in one process."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from app.errors import DeadlineExceeded, InternalError, NotReady
from app.fronts.remote import RemoteReloads, RemoteService
from app.http.arms import Arms, is_second
from app.interface import ranked
from app.settings import Shadow, Split
from loadtest.soak.fake_engine import FakeEngine
from tests.app.fakes import loader, request, right, until
from tests.app.fronts.linked import linked
from tests.app.serving import value_of

pytestmark = pytest.mark.anyio

GROUPS = {"shadow": Shadow(checkpoint=Path("second"), share=1.0), "split": Split(users=0.5)}
B = next(user for user in range(1, 99) if is_second(user, GROUPS["split"]))


def holds(front: RemoteService, version: str | None) -> bool:
    second = front.second
    return (None if second.model is None else second.model.manifest.version) == version


async def answered_by(front: RemoteService, user: int, version: int) -> bool:
    model = Arms(front, GROUPS["split"]).model(user)
    ticket = front.admit(model, candidates=4, history=2, deadline=None)
    return right((await ranked(front, ticket, *request(user))).scores, user, version)


async def test_fronts_know_both_and_hear_of_every_change() -> None:
    engine = FakeEngine(2)
    async with linked(FakeEngine(), 2, loader(FakeEngine(3), "v3"), second=loader(engine, "v2"), **GROUPS) as found:
        for front in found.fronts:
            await until(lambda front=front: holds(front, "v2"))
            for user in range(1, 40):
                assert await answered_by(front, user, 2 if is_second(user, GROUPS["split"]) else 1)
        assert (await RemoteReloads(found.fronts[0]).reload(second=True)).manifest.version == "v3"
        assert holds(found.fronts[0], "v3")
        await until(lambda: holds(found.fronts[1], "v3"))
        await until(engine.closed.is_set)
        assert await answered_by(found.fronts[1], B, 3)
        found.service.second_checkpoint.engine_lost("planted")
        for front in found.fronts:
            await until(lambda front=front: holds(front, None))
            assert "planted" in front.second.reason  # type: ignore[union-attr]
            assert await answered_by(front, B, 1)
        late = await found.front()
        await until(lambda: "planted" in late.second.reason)  # type: ignore[union-attr]


async def test_a_second_checkpoint_that_is_given_up_when_it_is_loaded_is_told_so() -> None:
    async with linked(
        FakeEngine(), 1, loader(FakeEngine(3), "v3"), second=loader(FakeEngine(2), "v2"), **GROUPS
    ) as found:
        [front], ask = found.fronts, found.fronts[0].uplink.ask
        await until(lambda: holds(front, "v2"))  # else a load is under way

        async def loaded_and_lost(*asked: object) -> None:
            await ask(*asked)  # type: ignore[arg-type]
            found.service.second_checkpoint.engine_lost("planted")
            await until(lambda: holds(front, None))

        front.uplink.ask = loaded_and_lost  # type: ignore[assignment,method-assign]
        with pytest.raises(NotReady, match="given up") as refused:
            await RemoteReloads(front).reload(second=True)
        assert refused.value.retry_after_seconds is not None


async def test_the_shadow_lives_in_the_engine_process_and_leaves_explanations_out() -> None:
    second = FakeEngine(2)
    groups = {"shadow": GROUPS["shadow"]}
    async with linked(FakeEngine(), second=loader(second, "v2"), **groups) as found:
        [front] = found.fronts
        await until(lambda: holds(front, "v2"))
        for user, is_kept in ((1, True), (2, False), (3, True)):
            context, candidates = request(user)
            ticket = front.admit(front.model, candidates=4, history=2, deadline=None)
            scores = (await ranked(front, ticket, replace(context, is_kept=is_kept), candidates)).scores
            assert right(scores, user)
        await until(lambda: [each for forward in second.forwards for each in forward] == [1, 3])
        exposition = (await front.exposition()).decode()
        assert value_of(exposition, 'ranker_shadow_requests_total{result="scored"}') == 2


async def test_attention_is_that_of_one_process() -> None:
    async with linked(FakeEngine()) as found:
        [front] = found.fronts
        context, candidates = request(3, candidates=6, history=5)
        later = candidates.chunk(2, 5)
        soon = front.clock() + 10
        for asked in (candidates, later):
            here = await front.attention(front.model, context, asked, soon)
            there = await found.service.attention(found.service.model, context, asked, soon)
            assert here.shape == there.shape == (1, 1, len(asked), 7)
            assert np.array_equal(here, there)
            np.testing.assert_allclose(here.sum(-1), 1, atol=1e-6)
        with pytest.raises(DeadlineExceeded):
            await front.attention(front.model, context, candidates, front.clock() - 1)


async def test_a_fault_in_attention_is_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as one whose answer is too long for a frame; not as a deadline that has passed."""

    async def attention(*asked: object) -> None:
        raise ValueError("planted")

    async with linked(FakeEngine()) as found:
        [front] = found.fronts
        monkeypatch.setattr(found.service, "attention", attention)
        with pytest.raises(InternalError):
            await front.attention(front.model, *request(1), front.clock() + 60)


async def test_attention_that_nobody_waits_for_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, ended = asyncio.Event(), asyncio.Event()

    async def attention(**asked: object) -> None:
        begun.set()
        try:
            await asyncio.sleep(60)
        finally:
            ended.set()

    async with linked(FakeEngine()) as found:
        [front] = found.fronts
        monkeypatch.setattr(found.service, "attention", attention)
        asking = asyncio.create_task(front.attention(front.model, *request(1), front.clock() + 60))
        await begun.wait()
        asking.cancel()
        await asyncio.wait_for(ended.wait(), 5)
