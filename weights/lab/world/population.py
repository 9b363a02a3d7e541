"""Draws users, authors and posts of a world with their hidden traits. Draws no impressions."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from weights.lab.world.settings import SURFACES, WorldSettings
from weights.values import DAY_SECONDS

Floats = NDArray[np.float32]
Ints = NDArray[np.int64]
Ids = NDArray[np.uint64]


@dataclass(frozen=True, slots=True, eq=False)
class Authors:
    """ids uint64 `[a]`; topic int64 `[a]`; quality float32 `[a]`; popularity, shares that sum to 1, float64 `[a]`."""

    ids: Ids
    topic: Ints
    quality: Floats
    popularity: NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class Posts:
    """Sorted by author, then time. `first[a] … first[a + 1]` are the posts of author a. created_at in Unix seconds."""

    ids: Ids
    author: Ints
    topic: Ints
    quality: Floats
    created_at: Ints
    first: Ints


@dataclass(eq=False, slots=True)
class Users:
    """Users' traits, and the state that sessions change: interests drift, follows and regards come and go.

    activity `[u]`; surface_taste `[u, surfaces]`; latent `[u, topics]`, the drifting interest; follows bool `[u, a]`;
    regard and regard_ts `[u, a]`: the appeal left by the last act towards an author that matters (negative for a complaint), and its time.
    freshness `[u]`: how much the youth of a post counts; no single event of a history shows it.
    """

    ids: Ids
    activity: Floats
    freshness: Floats
    surface_taste: Floats
    latent: Floats
    latent_ts: Ints
    follows: NDArray[np.bool_]
    regard: Floats
    regard_ts: Ints
    session_ts: list[Ints]


def snowflakes(rng: np.random.Generator, count: int, low: int, high: int) -> Ids:
    """Distinct 64-bit ids, in random order within `low … high`."""
    ids = np.unique(rng.integers(low, high, 2 * count + 64, np.uint64))
    return np.asarray(rng.permutation(ids)[:count], np.uint64)


def draw_authors(settings: WorldSettings, rng: np.random.Generator) -> Authors:
    """Draw authors. Topics are spread evenly; popularity depends on quality and chance."""
    count = settings.authors
    quality = (settings.author_quality_sd * rng.standard_normal(count)).astype(np.float32)
    weight = np.exp(0.5 * quality.astype(np.float64) + 0.5 * rng.standard_normal(count))
    topic = np.arange(count, dtype=np.int64) % settings.topics
    return Authors(snowflakes(rng, count, 10**17, 9 * 10**17), topic, quality, weight / weight.sum())


def draw_posts(settings: WorldSettings, authors: Authors, rng: np.random.Generator) -> Posts:
    """Draw posts. Every author writes at a steady rate, from `archive_days` before the first impression to the end."""
    start = settings.start_ts - settings.archive_days * DAY_SECONDS
    days = (settings.end_ts - start) / DAY_SECONDS
    counts = np.maximum(rng.poisson(settings.posts_per_author_day * days, settings.authors), 8)
    author = np.repeat(np.arange(settings.authors), counts)
    created = rng.integers(start, settings.end_ts, len(author))
    created = created[np.lexsort((created, author))]
    stray = rng.random(len(author)) < settings.stray_topic_share
    topic = np.where(stray, rng.integers(0, settings.topics, len(author)), authors.topic[author])
    quality = (settings.post_quality_sd * rng.standard_normal(len(author))).astype(np.float32)
    ids = snowflakes(rng, len(author), 10**18, 9 * 10**18)
    return Posts(ids, author, topic, quality, created, np.concatenate(([0], np.cumsum(counts))))


def draw_users(settings: WorldSettings, authors: Authors, rng: np.random.Generator) -> Users:
    """Draw users. New users, the last ones, have sessions only in the test period."""
    count, shape = settings.all_users, (settings.all_users, settings.authors)
    latent = rng.standard_normal((count, settings.topics), np.float32)
    pull = 1.5 * interest(latent, settings)[:, authors.topic] + np.log(authors.popularity).astype(np.float32)
    chosen = np.argsort(-(pull + rng.gumbel(size=shape)), 1)[:, : settings.follows]
    follows = np.zeros(shape, bool)
    np.put_along_axis(follows, chosen, True, 1)
    sessions = []
    for user in range(count):
        start = settings.start_ts if user < settings.users else settings.test_ts
        number = 1 + rng.poisson(settings.sessions_per_day * (settings.end_ts - start) / DAY_SECONDS)
        sessions.append(np.sort(rng.integers(start, settings.end_ts, number)))
    return Users(
        ids=snowflakes(rng, count, 10**18, 9 * 10**18),
        activity=(settings.activity_sd * rng.standard_normal(count)).astype(np.float32),
        freshness=(settings.freshness_mean + settings.freshness_sd * rng.standard_normal(count)).astype(np.float32),
        surface_taste=(settings.surface_taste_sd * rng.standard_normal((count, len(SURFACES)))).astype(np.float32),
        latent=latent,
        latent_ts=np.array([times[0] for times in sessions]),
        follows=follows,
        regard=np.zeros(shape, np.float32),
        regard_ts=np.zeros(shape, np.int64),
        session_ts=sessions,
    )


def interest(latent: Floats, settings: WorldSettings) -> Floats:
    """Appeal of topics `[u, topics]`: high for each user's two topics with the highest latent, low for the others.

    The step is soft, halfway between the second and the third; as latents drift, topics overtake each other.
    """
    ranked = np.sort(latent, 1)
    middle = (ranked[:, -2:-1] + ranked[:, -3:-2]) / 2
    keen = 0.5 + 0.5 * np.tanh(settings.interest_sharpness / 2 * (latent - middle))
    return np.asarray(settings.interest_low + (settings.interest_high - settings.interest_low) * keen, np.float32)


def drift(users: Users, who: Ints, now: Ints, settings: WorldSettings, rng: np.random.Generator) -> None:
    """Move the interests of `who` to the time `now`: an Ornstein–Uhlenbeck step of the elapsed length."""
    days = (now - users.latent_ts[who]) / DAY_SECONDS
    keep = np.exp(-days / settings.interest_days).astype(np.float32)[:, None]
    noise = rng.standard_normal((len(who), settings.topics), np.float32)
    users.latent[who] = keep * users.latent[who] + np.sqrt(1 - keep**2) * noise
    users.latent_ts[who] = now


def regard_now(users: Users, who: Ints, authors: Ints, now: Ints, settings: WorldSettings) -> Floats:
    """The regard of users `who [n]` for authors `[n, c]` left at `now [n]`, in appeal: it lasts, then fades, as exp(−days²)."""
    days = (now[:, None] - users.regard_ts[who[:, None], authors]) / DAY_SECONDS
    return np.asarray(users.regard[who[:, None], authors] * np.exp(-((days / settings.regard_days) ** 2)), np.float32)
