"""Measures retrieval on a world whose truth is known: recall of the best posts and of the ranker's first ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.table import Table

from model.create import EngineOptions, create_engine
from model.engine import Item
from model.inputs import Candidates, Context, age_bucket
from model.ranker import Ranker
from model.retrieval.towers import Towers
from weights.actions import weight_vector
from weights.lab.training.log import Log
from weights.lab.world.behaviour import ACTION_NAMES, true_probabilities
from weights.lab.world.settings import SURFACES
from weights.lab.world.simulate import World, circumstances
from weights.values import DAY_SECONDS

POPULARITY = "author popularity, test period included"
BEST, FIRST = 100, 20
DEPTHS = (100, 200, 500)
HOME = SURFACES.index("home")
Floats = NDArray[np.float32]


def newest_posts(world: World, days: int) -> NDArray[np.int64]:
    """Rows of `world.posts` from the last `days` days, oldest first."""
    created = world.posts.created_at
    rows = np.flatnonzero(created >= world.settings.end_ts - days * DAY_SECONDS)
    return rows[np.argsort(created[rows], kind="stable")]


def evaluate_retrieval(
    world: World, towers: Towers, ranker: Ranker, posts: NDArray[np.int64], weights: Mapping[str, float]
) -> dict[str, Any]:
    """Figures over these posts at the end of the world: means over the users not used in training.

    `recall@k`: the share of the 100 posts with the highest true expected score that are among the best k of a source. `ranker's
    first 20`: the share of the ranker's first 20 of all posts that are among the best k of the towers. Posts in a user's history
    are excluded.
    """
    settings, log = world.settings, world.log
    held_out = np.arange(settings.users, settings.all_users)
    values = weight_vector(weights, ACTION_NAMES)
    ids, authors = world.posts.ids[posts], world.authors.ids[world.posts.author[posts]]
    vectors, created = towers.encode_posts(ids, authors).numpy(), world.posts.created_at[posts]
    liked = dict(zip(*np.unique(log.author_id[log.actions.any(1)], return_counts=True), strict=True))
    chance = np.random.default_rng(settings.seed)
    engine = create_engine(ranker, EngineOptions(device="cpu", dtype="float32", threads=1))
    candidates = Candidates(
        ids, authors, np.zeros(len(ids), np.int64), age_bucket(settings.end_ts, created, ranker.config)
    )
    recalls: dict[str, list[list[float]]] = {name: [] for name in ("towers", POPULARITY, "recency", "random")}
    shares_of_first: list[list[float]] = []
    for user in held_out.tolist():
        context = history_of(log, int(world.users.ids[user]), ranker.config.history_length)
        if not len(context):
            continue
        seen = np.isin(ids, context.post_ids)
        best = _top(np.where(seen, -np.inf, true_values(world, user, posts) @ values), BEST)
        vector = towers.encode_users([context])[0].numpy()
        sources = {
            "towers": vectors @ vector,
            POPULARITY: np.array([liked.get(author, 0) for author in authors], np.float64),
            "recency": created.astype(np.float64),
            "random": chance.random(len(ids)),
        }
        orders = {name: _top(np.where(seen, -np.inf, scores), max(DEPTHS)) for name, scores in sources.items()}
        for name, order in orders.items():
            recalls[name].append([len(np.intersect1d(best, order[:depth])) / BEST for depth in DEPTHS])
        scores = engine.forward([Item(context, candidates)])[0].scores.probabilities
        first = _top(np.where(seen, -np.inf, scores @ values), FIRST)
        shares_of_first.append([len(np.intersect1d(first, orders["towers"][:depth])) / FIRST for depth in DEPTHS])
    engine.close()
    figures: dict[str, Any] = {"users": len(shares_of_first), "posts": len(posts), "depths": list(DEPTHS)}
    figures |= {f"recall of {name}": _means(rows) for name, rows in recalls.items()}
    return figures | {"ranker's first 20": _means(shares_of_first)}


def as_table(figures: Mapping[str, Any]) -> Table:
    """The figures of `evaluate_retrieval` as a table."""
    title = f"{figures['users']} users who were not trained on, {figures['posts']} posts: share among the best"
    table = Table("", *map(str, figures["depths"]), title=title)
    for name, shares in figures.items():
        if isinstance(shares, list) and name != "depths":
            table.add_row(name, *(f"{share:.3f}" for share in shares))
    return table


def true_values(world: World, user: int, posts: NDArray[np.int64]) -> Floats:
    """The probability of every action, `[n, A]`, if each post were shown to the user on the home surface at the end of the world."""
    shown, now = posts[None], np.array([world.settings.end_ts])
    _, shown_in = circumstances(world, np.array([user]), shown, np.full(shown.shape, HOME), now)
    return true_probabilities(shown_in)


def history_of(log: Log, user_id: int, length: int) -> Context:
    """The last `length` events that a user engaged with in the log."""
    rows = np.flatnonzero((log.user_id == user_id) & log.actions.any(1))[-length:]
    return Context(
        user_id,
        log.post_id[rows],
        log.author_id[rows],
        log.actions[rows].astype(np.float32),
        log.product_surface[rows],
        log.dwell_seconds[rows],
    )


def _top(scores: NDArray[Any], count: int) -> NDArray[np.int64]:
    return np.argsort(-scores, kind="stable")[:count]


def _means(rows: list[list[float]]) -> list[float]:
    return [round(float(mean), 3) for mean in np.mean(rows, 0)]
