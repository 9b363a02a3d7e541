"""Computes every number of the pictures on the plain path in fp32: mask, isolation, positions, attention, cap, updates, RoPE."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from model.batch import collate
from model.config import ModelConfig
from model.inputs import Candidates, Context
from model.layers import attention_logits, attention_weights, rope_tables, rotate, soft_cap
from model.ranker import Ranker
from model.synthetic import random_candidates
from model.trunk import Seen
from weights.explain.request import Request

Array = NDArray[Any]
DRAWN_TOKENS = 200
MOVED_CANDIDATES = 24  # limit for the isolation panel: each needs a forward
BINS = 60


@dataclass(frozen=True, slots=True)
class Figures:
    """`mask`, `causal` bool `[T, T]`. `isolation`, `leaking` float32 `[C, C]`: the largest change of row i's logits when column j becomes
    another post, with the ranking mask and with the causal one. `reversed_list`: that of each candidate when the list is reversed, by
    kind of positions. `positions`: by kind, int64 `[T]`. `attention` float32 `[L, N, t, t]`, means of blocks above 200 tokens; `rows`
    `[L, N, 1 + h + 1]` of the chosen candidate; `shares` `[L, 3]` on user, history, itself over all candidates; `row_error`: how
    far rows are from 1. `raw`, `capped`: counts `[L, bins]` over `edges`; `beyond_half` `[L]`. `updates` `[L, 2]`, `stream` `[L]`.
    `score_changes` `[h + 1, C]` and `changes` `[h + 1, C, A]`: without each event, then without the user. `rope_logits`
    `[N, distances]`, `wavelengths` `[K/2]`; None without RoPE.
    """

    mask: Array
    causal: Array
    isolation: Array
    leaking: Array
    reversed_list: dict[str, Array]
    positions: dict[str, Array]
    attention: Array
    rows: Array
    shares: Array
    row_error: float
    edges: Array
    cap: float | None
    raw: Array
    capped: Array
    beyond_half: Array
    updates: Array
    stream: Array
    score_changes: Array
    changes: Array
    rope_logits: Array | None
    wavelengths: Array | None
    history: int
    chosen: int


@torch.inference_mode()
def figures_of(ranker: Ranker, request: Request, chosen: int = 0) -> Figures:
    """Compute all figures for one request; `chosen` is the candidate whose attention is enlarged. Holds one layer's attention at a time."""
    context, candidates, config = request.context, request.candidates, ranker.config
    batch = collate([(context, candidates)], config)
    length = 1 + len(context)
    _, valid = ranker.embed(batch)
    mask = ranker.mask(length, valid)
    limit = 1.5 * (config.attention_cap or 30.0)
    edges = np.linspace(-limit, limit, BINS + 1)
    layers: list[dict[str, Any]] = []
    rope: list[Array] = []

    def watch(seen: Seen) -> None:
        if config.positions == "rope" and not rope:
            rope.append(_rope(seen, config, length, chosen))
        layers.append(_layer(seen, config, mask, length, chosen, edges))

    ranker(batch, watch=watch)
    each = {name: np.stack([layer[name] for layer in layers]) for name in layers[0]}
    moved = candidates.chunk(0, min(len(candidates), MOVED_CANDIDATES))
    score_changes, changes = _leave_one_out(ranker, request)
    turns = np.arange(0, config.head_width, 2) / config.head_width
    return Figures(
        mask=mask[0].numpy(),
        causal=(torch.ones_like(mask[0]).tril() & valid[0]).numpy(),
        isolation=_moves(ranker, context, moved, causal=False),
        leaking=_moves(ranker, context, moved, causal=True),
        reversed_list={kind: _reversal(ranker, context, moved, kind) for kind in ("shared", "sequential")},
        positions=_positions(ranker, context, candidates),
        row_error=float(each.pop("row_error").max()),
        edges=edges,
        cap=config.attention_cap,
        score_changes=score_changes,
        changes=changes,
        rope_logits=rope[0] if rope else None,
        wavelengths=2 * math.pi * config.rope_base**turns if rope else None,
        history=len(context),
        chosen=chosen,
        **each,
    )


def _layer(seen: Seen, config: ModelConfig, mask: Tensor, length: int, chosen: int, edges: Array) -> dict[str, Any]:
    """The figures of one layer, by their names in `Figures`."""
    multiplier, cap, form = config.attention_multiplier, config.attention_cap, config.cap_form
    weights = attention_weights(seen.query, seen.key, mask, multiplier, cap, form)[0]
    rows, itself = weights[:, length:], weights[:, length:, length:].diagonal(dim1=1, dim2=2)
    shares = (rows[:, :, 0].mean(), rows[:, :, 1:length].sum(-1).mean(), itself.mean())
    raw = attention_logits(seen.query, seen.key, multiplier)[mask[:, None].expand(-1, config.query_heads, -1, -1)]
    after = seen.stream + seen.attention_update
    return {
        "row_error": float((weights.sum(-1) - 1).abs().max()),
        "attention": blocks(weights.numpy()),
        "rows": torch.cat((rows[:, chosen, :length], itself[:, chosen, None]), -1).numpy(),
        "shares": np.array([float(share) for share in shares], np.float32),
        "raw": np.histogram(raw.clamp(edges[0], edges[-1]), edges)[0],
        "capped": np.histogram(soft_cap(raw, cap, form).clamp(edges[0], edges[-1]), edges)[0],
        "beyond_half": 0.0 if cap is None else float((raw.abs() > cap / 2).float().mean()),
        "updates": (_scale(seen.attention_update, seen.stream), _scale(seen.ffn_update, after)),
        "stream": float(seen.stream.std()),
    }


def _rope(seen: Seen, config: ModelConfig, length: int, chosen: int) -> Array:
    """The first layer's logit of the chosen candidate's query and its newest event's key, or the user's, at every distance."""
    query = seen.query[:, length + chosen]
    key = seen.key[:, length - 1].repeat_interleave(config.query_heads // config.kv_heads, 1)
    newest = config.history_length if config.right_anchored and length > 1 else length - 1
    tables = (
        rope_tables(torch.tensor([at]), config.head_width, config.rope_base)
        for at in (config.candidate_position, newest)
    )
    query, key = (rotate(x[:, None], cos, -sin) for x, (cos, sin) in zip((query, key), tables, strict=True))
    distances = torch.arange(config.history_length + 2)
    turned = rotate(
        query.expand(-1, len(distances), -1, -1), *rope_tables(distances, config.head_width, config.rope_base)
    )
    logits: Array = (turned[0] * key[0]).sum(-1).T.numpy() * config.attention_multiplier
    return logits


def _scale(update: Tensor, stream: Tensor) -> float:
    """`sqrt(σr² / (σr² + σs²))`: 0 if nothing is added, near 1 if the update dominates."""
    moved, before = float(update.var()), float(stream.var())
    return math.sqrt(moved / (moved + before)) if moved else 0.0


def blocks(matrices: Array, limit: int = DRAWN_TOKENS) -> Array:
    """Reduce the last two axes to at most `limit` rows and columns, by means of square blocks if they are longer."""
    length = matrices.shape[-1]
    if length <= limit:
        return matrices
    starts = np.arange(0, length, -(-length // limit))
    sizes = np.diff([*starts, length])
    for axis in (-1, -2):
        matrices = np.add.reduceat(matrices, starts, axis)
        matrices = matrices / (sizes if axis == -1 else sizes[:, None])
    return matrices


def _logits(
    ranker: Ranker, context: Context, candidates: Candidates, *, causal: bool = False, kind: Any = "shared"
) -> Array:
    """Logits `[C, A]`. With `causal`, candidates see those before them, which ranking must not do."""
    batch = collate([(context, candidates)], ranker.config, kind)
    if not causal:
        return ranker(batch)[0][0].numpy()  # type: ignore[no-any-return]
    hidden, valid = ranker.embed(batch)
    mask = torch.ones(valid.shape[1], valid.shape[1], dtype=torch.bool).tril() & valid[:, None]
    hidden = ranker.trunk(hidden, batch.positions, mask)
    return ranker.heads(hidden[:, 1 + len(context) :])[0][0].numpy()  # type: ignore[no-any-return]


def _moves(ranker: Ranker, context: Context, candidates: Candidates, *, causal: bool) -> Array:
    before = _logits(ranker, context, candidates, causal=causal)
    others = random_candidates(ranker.config, len(candidates), 7)
    moves = np.empty((len(candidates), len(candidates)), np.float32)
    names = ("post_ids", "author_ids", "surfaces", "age_buckets")
    for place in range(len(candidates)):
        columns = {name: getattr(candidates, name).copy() for name in names}
        for name in names:
            columns[name][place] = getattr(others, name)[place]
        after = _logits(ranker, context, Candidates(**columns), causal=causal)
        moves[:, place] = np.abs(after - before).max(1)
    return moves


def _reversal(ranker: Ranker, context: Context, candidates: Candidates, kind: Any) -> Array:
    """The largest change of each candidate's logits when the list is reversed."""
    back = candidates.rows(np.arange(len(candidates))[::-1])
    before, after = (_logits(ranker, context, each, kind=kind) for each in (candidates, back))
    found: Array = np.abs(after[::-1] - before).max(1)
    return found


def _positions(ranker: Ranker, context: Context, candidates: Candidates) -> dict[str, Array]:
    """The position of every token by kind: shared, sequential and right-anchored."""
    left, right = (replace(ranker.config, right_anchored=anchored) for anchored in (False, True))
    kinds: tuple[Any, ...] = (
        ("shared", left, "shared"),
        ("sequential", left, "sequential"),
        ("right-anchored", right, "shared"),
    )
    return {name: collate([(context, candidates)], config, kind).positions[0].numpy() for name, config, kind in kinds}


def _leave_one_out(ranker: Ranker, request: Request) -> tuple[Array, Array]:
    """Changes of scores `[h + 1, C]` and of probabilities `[h + 1, C, A]`: with each item minus without it."""

    def outputs(context: Context) -> Array:
        logits, continuous = ranker(collate([(context, request.candidates)], ranker.config))
        return torch.cat((torch.sigmoid(logits.double()), continuous.double()), -1)[0].numpy()

    context, events = request.context, np.arange(len(request.context))
    fewer = [*(context.rows(np.delete(events, place)) for place in events), replace(context, user_id=0)]
    changes = outputs(context) - np.stack([outputs(each) for each in fewer])
    scores = changes[..., : len(request.weights)] @ request.weights
    return scores, changes[..., : ranker.config.actions].astype(np.float32)
