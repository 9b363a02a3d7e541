"""What a ranker is measured against: simple predictions that read the same log before the split, and the same histories after it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from weights.lab.counts import (
    MOST_ROWS,
    Floats,
    Ints,
    count_probabilities,
    of_users,
    popularity,
    rates,
)
from weights.lab.training.examples import Examples
from weights.lab.training.log import Log

POPULARITY, NEWEST, COUNTS = "popularity", "newest first", "counts"
FACTORS, BOOSTED = "factorisation", "boosted trees"
BASELINES = {
    POPULARITY: "the post's rate of the action before the split, pulled towards its author's rate",
    NEWEST: "the newest post first; absent where the log has no created_at",
    COUNTS: "logistic regression on the rates of post and author and on what the user did with posts of that author",
    FACTORS: "logistic regression on popularity and on how similar the post is to the user's history (truncated SVD)",
    BOOSTED: "gradient boosting on popularity, similarity and counts of the user's history",
}
FEATURES = (
    "post rate", "post count", "author rate", "author count", "user rate", "user count", "user's rate of the author",
    "user's count of the author", "user's count of the post", "likeness to the history", "likeness to what was liked",
    "likeness to the last event", "age", "surface", "posts shown together", "seconds since the last event",
)  # fmt: skip
SIMPLE = (POPULARITY, NEWEST, COUNTS)
"""Baselines that are fitted in a moment; `train` compares with them."""
DIMENSIONS = 32
VECTOR_SHARE = 0.75


def baselines(
    examples: Examples,
    split: int,
    actions: list[int],
    seed: int = 1,
    progress: Callable[[int, int], None] = lambda done, total: None,
    names: Sequence[str] = tuple(BASELINES),
) -> dict[str, dict[int, Floats]]:
    """Each baseline's probabilities of the actions (places in the log) for the rows from request `split` on, by name and action.

    `names`: which of BASELINES. NEWEST is left out where the log has no `created_at`. Users' histories go on after the split, as they do
    for the ranker.
    """
    frozen = int(examples.starts[split])
    learned = _learned(examples, frozen, actions, seed, progress) if {FACTORS, BOOSTED} & set(names) else {}
    probabilities = {
        POPULARITY: {action: popularity(examples.log, frozen, action)[frozen:] for action in actions},
        COUNTS: {action: count_probabilities(examples, frozen, action, seed)[frozen:] for action in actions},
        **learned,
    }
    if (examples.log.created_at > 0).any():
        probabilities[NEWEST] = {action: newest_first(examples, frozen, action) for action in actions}
    return {name: probabilities[name] for name in BASELINES if name in probabilities and name in names}


def newest_first(examples: Examples, frozen: int, action: int) -> Floats:
    """A number that falls with the age of the post, for the rows from `frozen` on, float32. Posts of unknown age come last.

    It is the action's rate for a post of median age, so that its mean can be held against the other baselines'.
    """
    log = examples.log
    age = np.where(log.created_at > 0, np.maximum(log.impression_ts - log.created_at, 0), np.inf)
    finite = age[np.isfinite(age)]
    middle = max(float(np.median(finite)), 1.0)
    rate = log.take(slice(0, frozen)).shares[action]
    return np.asarray(2 * rate / (1 + age[frozen:] / middle), np.float32)


def _learned(
    examples: Examples, frozen: int, actions: list[int], seed: int, progress: Callable[[int, int], None]
) -> dict[str, dict[int, Floats]]:
    """The factorisation and the trees. They are fitted on the last quarter of the rows before `frozen`, with post vectors from the other
    three. Otherwise the vector of a post would hold the very action that it is to predict.
    """
    from sklearn.ensemble import HistGradientBoostingClassifier
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler
    from threadpoolctl import threadpool_limits

    rng = np.random.default_rng(seed)
    early = max(1, int(frozen * VECTOR_SHARE))
    rows = np.sort(early + rng.permutation(frozen - early)[:MOST_ROWS])
    vectors = [post_vectors(examples.log.take(np.arange(end)), seed) for end in (early, frozen)]
    probabilities: dict[str, dict[int, Floats]] = {FACTORS: {}, BOOSTED: {}}
    likeness = [FEATURES.index(name) for name in FEATURES if "likeness" in name or name == "post rate"]
    for done, action in enumerate(actions):
        before, features = (history_features(examples, frozen, action, of_posts) for of_posts in vectors)
        rows_known = rows[examples.log.known_rows(action)[rows]]
        happened = examples.log.actions[rows_known, action]
        if happened.all() or not happened.any():
            probabilities[FACTORS][action] = probabilities[BOOSTED][action] = features[
                frozen:, FEATURES.index("post rate")
            ]
            continue
        linear = make_pipeline(StandardScaler(), LogisticRegression())
        linear.fit(np.nan_to_num(before[rows_known][:, likeness]), happened)
        probabilities[FACTORS][action] = _second(linear.predict_proba(np.nan_to_num(features[frozen:, likeness])))
        progress(3 * done + 1, 3 * len(actions))
        has_value = ~np.isnan(before[rows_known]).all(0)  # scikit-learn takes no column without any value
        trees = HistGradientBoostingClassifier(max_iter=150, learning_rate=0.06, early_stopping=False)
        with threadpool_limits(1):  # of several, each waits for the slowest at every leaf
            trees.fit(before[rows_known][:, has_value], happened)
            probabilities[BOOSTED][action] = _second(trees.predict_proba(features[frozen:, has_value]))
        progress(3 * done + 3, 3 * len(actions))
    return probabilities


def _second(probabilities: NDArray[np.float64]) -> Floats:
    return np.asarray(probabilities[:, 1], np.float32)


def history_features(
    examples: Examples, frozen: int, action: int, vectors: tuple[NDArray[np.uint64], Floats]
) -> Floats:
    """What is known of each row of the log when it is ranked, float32 `[n, F]`, as FEATURES names it; NaN where unknown.

    Posts and authors are counted over all impressions, up to row `frozen`; users over what they engaged with, as the ranker's histories
    have it, to the end. `vectors`: as `post_vectors` gives them.
    """
    log, request = examples.log, examples.request_of_rows
    happened, is_known = log.actions[:, action], log.known_rows(action)
    engaged = log.actions.any(1) & (log.user_id != 0) & is_known
    post, author, prior = rates(log, frozen, happened, is_known)
    user, pair, again = of_users(log, happened, engaged)
    seconds = (log.impression_ts - log.created_at).astype(np.float32)
    told = examples.last > examples.first
    since = np.full(len(examples), np.nan)
    since[told] = examples.times[told] - examples.events.impression_ts[examples.last[told] - 1]
    columns = [
        post.rate(author.rate(prior)), np.log1p(post.shown), author.rate(prior), np.log1p(author.shown),
        user.rate(float(happened[engaged].sum() / max(engaged.sum(), 1))), np.log1p(user.shown),
        pair.rate(user.rate(prior)), np.log1p(pair.shown), again.shown,
        *_likeness(examples, request, action, *vectors),
        np.where(log.created_at > 0, seconds, np.nan), log.product_surface, (examples.stops - examples.starts)[request],
        since[request],
    ]  # fmt: skip
    return np.stack(columns, 1).astype(np.float32)


def post_vectors(log: Log, seed: int = 1) -> tuple[NDArray[np.uint64], Floats]:
    """The posts that users engaged with in the log, sorted, and a vector of length 1 for each, float32 `[P, d]`.

    By truncated SVD of the matrix of users × posts, 1 where a user engaged with a post, each row scaled to length 1.
    """
    from scipy.sparse import csr_matrix
    from sklearn.decomposition import TruncatedSVD
    from sklearn.preprocessing import normalize

    engaged = np.flatnonzero(log.actions.any(1) & (log.user_id != 0))
    users, of_user = np.unique(log.user_id[engaged], return_inverse=True)
    posts, of_post = np.unique(log.post_id[engaged], return_inverse=True)
    if not len(posts):
        return posts, np.zeros((0, 1), np.float32)
    matrix = csr_matrix((np.ones(len(engaged), np.float32), (of_user, of_post)), (len(users), len(posts)))
    matrix.data[:] = 1
    size = min(DIMENSIONS, min(matrix.shape) - 1)
    if size < 1:
        return posts, np.zeros((len(posts), 1), np.float32)
    model = TruncatedSVD(size, random_state=seed).fit(normalize(matrix))
    weighted = model.components_.T * np.sqrt(model.singular_values_)
    return posts, np.asarray(normalize(weighted), np.float32)


def _likeness(
    examples: Examples, request: Ints, action: int, posts: NDArray[np.uint64], vectors: Floats
) -> list[Floats]:
    """Cosines of each row's post with the mean of all earlier events of its user, of those with the action, and with the last event.

    NaN where the post was not met before the split, or there is no such event.
    """
    log, events = examples.log, examples.events
    padded = np.concatenate((vectors, np.zeros((1, vectors.shape[1]), np.float32)))
    mine, theirs = (padded[_place(posts, ids)] for ids in (log.post_id, events.post_id))
    has_vector = _place(posts, log.post_id) < len(posts)
    cosines = []
    for weights in (np.ones(len(events), np.float32), events.actions[:, action].astype(np.float32)):
        sums = np.concatenate(
            (np.zeros((1, vectors.shape[1]), np.float64), np.cumsum(theirs * weights[:, None], 0, np.float64))
        )
        mean = (sums[examples.last] - sums[examples.first]).astype(np.float32)
        cosines.append(_cosine(mine, mean, request, has_vector))
    newest, told = np.zeros((len(examples), vectors.shape[1]), np.float32), examples.last > examples.first
    newest[told] = theirs[examples.last[told] - 1]
    return [*cosines, _cosine(mine, newest, request, has_vector)]


def _cosine(mine: Floats, of_request: Floats, request: Ints, has_vector: NDArray[np.bool_]) -> Floats:
    length = np.linalg.norm(of_request, axis=1)
    unit = of_request / np.maximum(length, 1e-9)[:, None]
    return np.where(has_vector & (length > 0)[request], np.einsum("nd,nd->n", mine, unit[request]), np.nan).astype(
        np.float32
    )


def _place(sorted_ids: NDArray[np.uint64], ids: NDArray[np.uint64]) -> Ints:
    """The place of each id among the sorted ones; their number for an id that is not among them."""
    if not len(sorted_ids):
        return np.zeros(len(ids), np.int64)
    place = np.searchsorted(sorted_ids, ids)
    nearest = np.minimum(place, len(sorted_ids) - 1)
    return np.asarray(np.where(sorted_ids[nearest] == ids, nearest, len(sorted_ids)), np.int64)
