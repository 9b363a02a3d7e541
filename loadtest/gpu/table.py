"""The GPU table: device times of one geometry at a time, against the card's ceilings and the peers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from loadtest.geometries import GEOMETRIES, in_dtype
from loadtest.gpu.card import Card, Ceilings
from loadtest.gpu.checks import make_engine
from loadtest.gpu.peers import PeerRanker, dense_eager
from loadtest.gpu.work import Work, forward_work
from loadtest.timing import Figure
from model.config import ModelConfig
from model.engine import Item
from model.ranker import Ranker
from model.split.engine import SplitEngine
from model.synthetic import random_candidates, random_context, random_ranker

COUNTS = {"mini": (64, 512), "nano": (64, 512), "seed": (1024,), "flagship": (64, 512, 1400)}
# geometry, candidates, cold or cached → target and floor in milliseconds of device time
TARGETS_MS: dict[tuple[str, int, str], tuple[float, float | None]] = {
    ("seed", 1024, "cold"): (5.6, 4.5),
    ("seed", 1024, "cached"): (3.9, 3.05),
    ("flagship", 64, "cached"): (0.25, 0.17),
    ("flagship", 512, "cold"): (2.0, 1.5),
    ("mini", 64, "cold"): (0.1, None),
    ("mini", 64, "cached"): (0.08, 0.06),
}
# figures that others have published, of other models and cards
MFU_BESIDE = (
    "published MFU: OneRec 28.8 %, Meta's adaptive ranking 35 %; HSTU on an H100: 5 layers, 99k tokens in 9.3 ms"
)
CACHE_BESIDE = "published gains of caching contexts: NVIDIA 1.3 to 2.6, MTServe 3.1"
CANDIDATES_PER_SECOND = {("seed", 1024, "cold"): 183e3, ("seed", 1024, "cached"): 260e3}
BATCH_REQUESTS, BATCH_REQUESTS_PER_SECOND = 64, 250e3
PADDING_TARGET = 0.2  # sizes of steps are at most a quarter apart


Record = dict[str, Any]
"""Plain JSON values."""


def line(name: str, figure: float, unit: str, **more: Any) -> Record:
    """A record of a figure. `more`, without None: `low` and `high`; `target` and `floor` in the figure's unit and whether it is `met`;
    shares of the card's measured ceilings; `wall_ms`; `beside`: what others have published."""
    return {"name": name, "figure": figure, "unit": unit} | {
        key: value for key, value in more.items() if value is not None
    }


def tiny(config: ModelConfig) -> ModelConfig:
    """A small version of an architecture, for a machine without a card."""
    group = config.query_heads // config.kv_heads
    return replace(config, width=64, layers=2, query_heads=2 * group, kv_heads=2, head_width=16, history_length=20)


class Geometry:
    """One architecture with random weights on the card: a warm engine, or its peers."""

    def __init__(self, name: str, card: Card, ceilings: Ceilings) -> None:
        self.name = name
        self.card = card
        self.ceilings = ceilings
        self.config = tiny(GEOMETRIES[name]) if card.tiny else GEOMETRIES[name]
        self.ranker: Ranker = random_ranker(self.config, device=card.device)

    @cached_property
    def engine(self) -> SplitEngine:
        """The engine that is timed."""
        return make_engine(self.ranker, self.card)

    def peer_rows(self) -> Iterator[Record]:
        """Times of the peers that compute the same on this card."""
        for candidates in COUNTS[self.name]:
            yield from self._peer_rows(self.item(candidates))

    def rows(self) -> Iterator[Record]:
        """All rows of this geometry except its peers."""
        for candidates in COUNTS[self.name]:
            item = self.item(candidates)
            milliseconds = []
            for kind in ("cold", "cached"):
                for row in self._forward_rows(item, kind):
                    milliseconds += [row["figure"]] if row["unit"] == "ms" else []
                    yield row
            label = f"{self.name} C={len(item.candidates)}: cold over cached"
            yield line(label, milliseconds[0] / milliseconds[1], "x", beside=CACHE_BESIDE)
        if self.name == "mini":
            yield from self._batch_rows()
            yield self._padding_row()
        yield line(f"{self.name}: compiled or recorded after warm-up", self.engine.late_compilations(), "", target=0,
                  met=self.engine.late_compilations() == 0)  # fmt: skip

    def item(self, candidates: int, seed: int = 0, history: int | None = None) -> Item:
        """A request, with a full history unless told otherwise."""
        count = min(candidates, 24 + candidates // 32) if self.card.tiny else candidates
        history = self.config.history_length if history is None else history
        return Item(random_context(self.config, history, seed), random_candidates(self.config, count, seed))

    def _forward_rows(self, item: Item, kind: str) -> Iterator[Record]:
        request = self._cached(item) if kind == "cached" else item
        candidates = len(item.candidates)
        time = self._on_device([request])
        wall = self.card.wall_time(lambda: self.engine.forward([request]))
        work = forward_work(self.config, 1 + len(item.context), candidates, cached=kind == "cached")
        key = (self.name, candidates, kind)  # tiny shapes have no target: none of their counts is in the table
        target, floor = TARGETS_MS.get(key, (None, None))
        label = f"{self.name} C={candidates} {kind}"
        yield self._timed(label, time, work, target, floor, wall.median)
        per_second = candidates / time.median * 1e3
        target_per_second = CANDIDATES_PER_SECOND.get(key)
        met = None if target_per_second is None else per_second >= target_per_second
        yield line(f"{label}: candidates", per_second, "1/s", target=target_per_second, met=met)
        mfu = work.flops / time.median / 1e9 / self.ceilings.tflops
        yield line(f"{label}: MFU, of the matrix rate measured here", 100 * mfu, "%", beside=MFU_BESIDE)

    def _on_device(self, items: list[Item]) -> Figure:
        """Milliseconds of one forward's kernels; each of three readings is a mean. On a CPU, the wall time."""
        if not self.card.is_cuda:
            return self.card.wall_time(lambda: self.engine.forward(items))
        seen = [self.card.operations(lambda: self.engine.forward(items)).values() for _ in range(3)]
        return Figure.of([sum(microseconds for microseconds, _ in kernels) / 1e3 for kernels in seen])

    def _timed(
        self,
        name: str,
        time: Figure,
        work: Work,
        target: float | None = None,
        floor: float | None = None,
        wall_ms: float | None = None,
    ) -> Record:
        return line(
            name, time.median, "ms", low=time.low, high=time.high, target=target,
            met=None if target is None else time.median <= target, floor=floor,
            matrix_share=work.flops / time.median / 1e9 / self.ceilings.tflops,
            bandwidth_share=work.nbytes / time.median / 1e6 / self.ceilings.gigabytes_per_second,
            wall_ms=wall_ms,
        )  # fmt: skip

    def _cached(self, item: Item) -> Item:
        return Item(item.context, item.candidates, self.engine.forward([item])[0].state)

    def _batch_rows(self) -> Iterator[Record]:
        requests = 3 if self.card.tiny else BATCH_REQUESTS
        items = [self.item(64, seed) for seed in range(requests)]
        for kind in ("cold", "cached"):
            batch = [self._cached(item) for item in items] if kind == "cached" else items
            time = self._on_device(batch)
            per_second = requests / time.median * 1e3
            target = None if self.card.tiny else BATCH_REQUESTS_PER_SECOND
            yield line(
                f"mini C=64 {kind}, {requests} requests a forward: requests", per_second, "1/s",
                target=target, met=None if target is None else per_second >= target,
                wall_ms=self.card.wall_time(lambda batch=batch: self.engine.forward(batch), 10).median,  # type: ignore[misc]
            )  # fmt: skip

    def _padding_row(self) -> Record:
        """Share of padding in forwards of 64 requests of mixed lengths, on an engine that has served nothing else."""
        generator = np.random.default_rng(5)
        engine = make_engine(self.ranker, self.card)
        longest = 20 if self.card.tiny else 200
        for _ in range(3 if self.card.tiny else 20):
            sizes = zip(
                generator.integers(0, self.config.history_length + 1, BATCH_REQUESTS),
                generator.integers(1, longest, BATCH_REQUESTS),
                strict=True,
            )
            engine.forward([self.item(int(c), seed, int(h)) for seed, (h, c) in enumerate(sizes)])
        waste = engine.padding_ratio()
        return line(
            "mini, 64 mixed requests a forward: padding", waste, "", target=PADDING_TARGET, met=waste <= PADDING_TARGET
        )

    def _peer_rows(self, item: Item) -> Iterator[Record]:
        label = f"{self.name} C={len(item.candidates)}"
        ranker = in_dtype(random_ranker(self.config, device=self.card.device), torch.bfloat16)
        work = forward_work(self.config, 1 + len(item.context), len(item.candidates), cached=False)
        time = self.card.device_time(dense_eager(ranker, item, self.card, torch.bfloat16), 10)
        yield self._timed(f"{label}: dense definition, eager", time, work)
        uncapped = Ranker(replace(self.config, attention_cap=None)).to(self.card.device)
        uncapped.load_state_dict(ranker.state_dict())
        in_dtype(uncapped.requires_grad_(False), torch.bfloat16)
        for attention, peer_ranker, name in (
            ("sdpa", uncapped, "SDPA with a mask, without the cap"),
            ("flex", ranker, "FlexAttention"),
        ):
            peer = PeerRanker(peer_ranker, item, self.card, torch.bfloat16, attention)  # type: ignore[arg-type]
            mask = peer.mask()

            def forward(peer: PeerRanker = peer, mask: BlockMask | Tensor = mask) -> Tensor:
                return peer.forward(mask)

            for how, run in (("compiled", forward), ("compiled and recorded", self.card.recorded(forward))):
                time = self.card.device_time(run, 10)
                yield self._timed(f"{label}: {name}, {how}", time, work)

            def build_mask(peer: PeerRanker = peer) -> None:
                peer.mask()
                self.card.synchronize()

            build = self.card.wall_time(build_mask, 5)
            yield line(f"{label}: {name}: its mask, a request", build.median, "ms", low=build.low, high=build.high)
