"""Measures retrieval on a log: how many of the posts that users came to like are among the first that a source returns for them.

Each held-out request with a liked post is a query: the user and the history before it, as the service would be asked. A source orders all
posts of the log. Posts in that history, which has the newest events that the model reads, are left out, as `/retrieve` leaves out what it
is sent. Impressions of nobody without a history are no queries: `/retrieve` refuses them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from math import isnan
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.table import Table

from model.retrieval.towers import Towers
from weights.lab.evaluate.metrics import Figure, Means, Sampled, draws_of
from weights.lab.report import plain
from weights.lab.training.examples import Examples
from weights.lab.training.log import Log
from weights.tables import TableError

DEPTHS = (10, 100, 500)
SEED = 1
TOWERS, POPULARITY, FACTORS = "towers", "popularity", "factorisation, history folded in"
DIMENSIONS = 16  # of the factorisation: the best of 8 to 128 on MovieLens
QUERIES = 128  # scored at a time
Floats = NDArray[np.float32]
Flags = NDArray[np.bool_]
Ints = NDArray[np.int64]
Source = Callable[[Ints], Floats]
"""Scores of all posts, float32 `[n, P]`, for n requests of the examples."""


@dataclass(frozen=True, slots=True, eq=False)
class Posts:
    """All posts of a log, sorted by id: `ids`, `authors` uint64 `[P]`, `codes` int64 `[P, q]`, each as the post's last row has it."""

    ids: NDArray[np.uint64]
    authors: NDArray[np.uint64]
    codes: Ints

    @classmethod
    def of(cls, log: Log) -> Posts:
        """The posts of all rows."""
        ids, last = np.unique(log.post_id[::-1], return_index=True)
        rows = len(log) - 1 - last
        return cls(ids, log.author_id[rows], log.codes[rows])

    def __len__(self) -> int:
        return len(self.ids)

    def places(self, post_ids: NDArray[np.uint64]) -> Ints:
        """The places of posts that are among them, int64 `[n]`."""
        return np.asarray(np.searchsorted(self.ids, post_ids), np.int64)

    def known_places(self, post_ids: NDArray[np.uint64]) -> Ints:
        """The places of those of these posts that are among them, int64 `[m]`."""
        return self.places(post_ids[np.isin(post_ids, self.ids)])


@dataclass(frozen=True, slots=True)
class Recalls:
    """How many liked posts are among the first k, by source, group and k, each with its interval by resampling users.

    `leads`: of the towers over each other source, at each k. `queries`, `users`, `liked`: the requests, their users and their liked posts
    that were measured, without what the history holds already. `posts`: all posts of the log.
    """

    queries: int
    users: int
    posts: int
    liked: int
    recalls: Mapping[str, Mapping[str, Mapping[int, Figure]]]
    leads: Mapping[str, Mapping[int, Figure]]

    def record(self) -> dict[str, Any]:
        """The figures as JSON values; null for what has no value."""
        figures: dict[str, Any] = plain(asdict(self))
        return figures

    def tables(self) -> list[Table]:
        """One table for each group of liked posts."""
        tables = []
        for group in self.recalls[TOWERS]:
            table = Table("source", *(f"recall@{depth}" for depth in DEPTHS), title=group)
            for source, groups in self.recalls.items():
                table.add_row(source, *(str(groups[group][depth]) for depth in DEPTHS))
            tables.append(table)
        return tables

    def verdict(self) -> str:
        """One sentence: whether the towers find more liked posts than each other source among the first 100."""
        words = {1: "ahead of", 0: "level with", -1: "BEHIND"}
        said = []
        for source, lead in self.leads.items():
            figure = lead[100]
            if isnan(figure.low):
                said.append(f"too few users to compare with {source} ({figure})")
                continue
            side = int(figure.low > 0) - int(figure.high < 0)
            said.append(f"{words[side]} {source} by {figure}" if side else f"{words[side]} {source} ({figure})")
        return f"recall@100 of the towers is {self.recalls[TOWERS]['all'][100]}: {'; '.join(said)}."


def evaluate_recall(
    examples: Examples,
    split: int,
    worth: NDArray[np.floating],
    towers: Towers,
    *,
    most_queries: int = 5000,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Recalls:
    """Recall of the requests from `split` on. `worth` `[n]`: what each row of the log is worth; above 0 it was liked.

    At most `most_queries` requests are measured, drawn at random. Raises TableError if no held-out request has a liked post, or each is in
    its user's history already.
    """
    log, posts = examples.log, Posts.of(examples.log)
    request = examples.request_of_rows
    frozen = int(examples.starts[split])
    is_asked = (log.user_id != 0) | (examples.history_lengths[request] > 0)
    liked_rows = np.flatnonzero((worth > 0) & is_asked & (np.arange(len(log)) >= frozen))
    queries = np.unique(request[liked_rows])
    if not len(queries):
        raise TableError("the test period holds no post that was liked, so there is nothing to find")
    if len(queries) > most_queries:
        queries = np.sort(np.random.default_rng(SEED).choice(queries, most_queries, replace=False))
        liked_rows = liked_rows[np.isin(request[liked_rows], queries)]
    sources: dict[str, Source] = {
        TOWERS: towers_source(examples, posts, towers),
        POPULARITY: popularity_source(log, posts, frozen, worth),
        FACTORS: factors_source(examples, posts, frozen),
    }
    ranks, rows = _ranks(examples, posts, queries, request, liked_rows, sources, progress)
    if not len(rows):
        raise TableError(
            "each post that was liked in the test period is in its user's history already, so there is nothing to find"
        )
    users, of_row = np.unique(log.people[rows], return_inverse=True)
    draws = draws_of(len(users), SEED)
    new_user = ~np.isin(log.people[rows], log.people[:frozen])
    new_post = ~np.isin(log.post_id[rows], log.post_id[:frozen])
    groups = {
        "all": np.ones(len(rows), bool), "known users": ~new_user, "new users": new_user,
        "known posts": ~new_post, "new posts": new_post,
    }  # fmt: skip

    def sampled(source: str, inside: Flags, depth: int) -> Sampled:
        hits = (ranks[source][inside] < depth).astype(np.float64)
        sums, counts = np.bincount(of_row[inside], hits, len(users)), np.bincount(of_row[inside], minlength=len(users))
        return Sampled.of(Means(np.asarray(sums, np.float64), counts), draws)

    return Recalls(
        len(np.unique(request[rows])),
        len(users),
        len(posts),
        len(rows),
        {
            source: {
                name: {depth: sampled(source, inside, depth).figure() for depth in DEPTHS}
                for name, inside in groups.items()
            }
            for source in sources
        },
        {
            source: {
                depth: (sampled(TOWERS, groups["all"], depth) - sampled(source, groups["all"], depth)).figure()
                for depth in DEPTHS
            }
            for source in sources
            if source != TOWERS
        },
    )


def _ranks(
    examples: Examples,
    posts: Posts,
    queries: Ints,
    request: Ints,
    liked_rows: Ints,
    sources: Mapping[str, Source],
    progress: Callable[[int, int], None],
) -> tuple[dict[str, NDArray[np.float64]], Ints]:
    """The places of the liked posts in each source's order, from 0, and their rows; a post that is in the history already does not count.
    Posts with equal scores share their places."""
    ranks: dict[str, list[NDArray[np.float64]]] = {name: [] for name in sources}
    counted: list[Ints] = []
    of_query: Ints = np.asarray(np.searchsorted(queries, request[liked_rows]), np.int64)
    places = posts.places(examples.log.post_id[liked_rows])
    for first in range(0, len(queries), QUERIES):
        part = queries[first : first + QUERIES]
        seen = np.zeros((len(part), len(posts)), bool)
        for row, index in enumerate(part):
            seen[row, posts.known_places(examples.history_posts(int(index)))] = True
        inside = np.flatnonzero((of_query >= first) & (of_query < first + len(part)))
        inside = inside[~seen[of_query[inside] - first, places[inside]]]
        query, place = of_query[inside] - first, places[inside]
        counted.append(liked_rows[inside])
        for name, source in sources.items():
            scores = np.where(seen, -np.inf, source(part))
            own = scores[query, place][:, None]
            better, equal = (scores[query] > own).sum(1), (scores[query] == own).sum(1)
            ranks[name].append(better + (equal - 1) / 2)
        progress(min(first + QUERIES, len(queries)), len(queries))
    return {name: np.concatenate(parts) for name, parts in ranks.items()}, np.concatenate(counted)


def towers_source(examples: Examples, posts: Posts, towers: Towers) -> Source:
    """The product of the user's and the posts' vectors."""
    vectors = towers.encode_posts(posts.ids, posts.authors, posts.codes).numpy()

    def scores(requests: Ints) -> Floats:
        users = towers.encode_users([examples.context(int(index)) for index in requests]).numpy()
        return np.asarray(users @ vectors.T, np.float32)

    return scores


def popularity_source(log: Log, posts: Posts, frozen: int, worth: NDArray[np.floating]) -> Source:
    """How often each post was liked before row `frozen`; a post that was not shown then has the mean of its author's posts, 0 if its
    author is unknown."""
    liked = np.flatnonzero(worth[:frozen] > 0)
    counts = np.bincount(posts.places(log.post_id[liked]), minlength=len(posts)).astype(np.float64)
    was_shown = np.isin(posts.ids, log.post_id[:frozen])
    _, author = np.unique(posts.authors, return_inverse=True)
    means = np.bincount(author[was_shown], counts[was_shown], author.max() + 1) / np.maximum(
        np.bincount(author[was_shown], minlength=author.max() + 1), 1
    )
    means[author[posts.authors == 0]] = 0
    scores = np.where(was_shown, counts, means[author]).astype(np.float32)
    return lambda requests: np.broadcast_to(scores, (len(requests), len(posts)))


def factors_source(examples: Examples, posts: Posts, frozen: int) -> Source:
    """A truncated SVD of users × posts engaged with before row `frozen`, into which each history is folded (PureSVD, Cremonesi 2010)."""
    from scipy.sparse import csr_matrix
    from sklearn.utils.extmath import randomized_svd

    log = examples.log
    engaged = np.flatnonzero(log.actions[:frozen].any(1) & (log.user_id[:frozen] != 0))
    _, user = np.unique(log.user_id[engaged], return_inverse=True)
    shape = (int(user.max()) + 1 if len(user) else 1, len(posts))
    matrix = csr_matrix((np.ones(len(engaged), np.float32), (user, posts.places(log.post_id[engaged]))), shape)
    matrix.data[:] = 1
    _, _, directions = randomized_svd(matrix, min(DIMENSIONS, *matrix.shape), random_state=SEED)
    factors = np.ascontiguousarray(directions.T, np.float32)

    def scores(requests: Ints) -> Floats:
        folded = np.stack(
            [factors[posts.known_places(examples.history_posts(int(index)))].sum(0) for index in requests]
        )
        return np.asarray(folded @ factors.T, np.float32)

    return scores
