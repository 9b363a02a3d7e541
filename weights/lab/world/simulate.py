"""Simulates a world session by session: what is shown, what users do, and what that changes. Returns log and truth."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from model.inputs import NO_CODES
from weights.lab.training.log import Log
from weights.lab.world.behaviour import (
    ACTION_NAMES,
    ATTACHMENTS,
    REJECTIONS,
    Circumstances,
    draw,
    log_dwell,
    recency,
    true_probabilities,
)
from weights.lab.world.population import (
    Authors,
    Floats,
    Ints,
    Posts,
    Users,
    draw_authors,
    draw_posts,
    draw_users,
    drift,
    interest,
    regard_now,
)  # fmt: skip
from weights.lab.world.settings import HOUR_SECONDS, SURFACES, WorldSettings
from weights.values import DAY_SECONDS

SILENT_CODES = 16  # values of the code that says nothing
OTHER_SURFACES = (0.45, 0.0, 0.15, 0.2, 0.2)  # shares for authors that the user does not follow


@dataclass(frozen=True, slots=True, eq=False)
class Truth:
    """The truth behind the log, for the impressions of the test period, in the order of the log.

    `probabilities` float32 `[n, A]`; `log_dwell` float32 `[n]`, the mean of log seconds; `affinity` float32 `[n]`, the part of the appeal
    that is the user's own, for topic and author; `topic` int64 `[n]`.
    """

    probabilities: Floats
    log_dwell: Floats
    affinity: Floats
    topic: Ints


@dataclass(frozen=True, slots=True, eq=False)
class Drawn:
    """The settings, authors, posts and users of a world."""

    settings: WorldSettings
    authors: Authors
    posts: Posts
    users: Users


@dataclass(frozen=True, slots=True, eq=False)
class World(Drawn):
    """A finished world. `truth`, `circumstances` and `interests` line up with the rows of `log` from `settings.test_ts` on.

    `circumstances`: of each row; `interests` float32 `[n, topics]`: what each topic adds to the appeal for the row's user.
    """

    log: Log
    truth: Truth
    circumstances: Circumstances
    interests: Floats

    def probabilities_without_topic(self) -> Floats:
        """The probability of every action for someone who knows all but the topic of the post, float32 `[n, A]`: the mean over topics.

        True if every topic is as frequent with every author (`stray_topic_share` of 1).
        """
        appeal = self.circumstances.appeal - self.interests[np.arange(len(self.interests)), self.truth.topic]
        topics = [
            true_probabilities(replace(self.circumstances, appeal=appeal + column)) for column in self.interests.T
        ]
        return np.asarray(np.mean(topics, 0), np.float32)


@dataclass(frozen=True, slots=True, eq=False)
class Session:
    """One session of each of several users: users, times `[n]`; posts, surfaces, affinity … `[n, slots]`; interests `[n, topics]`."""

    who: Ints
    now: Ints
    posts: Ints
    surface: Ints
    affinity: Floats
    circumstances: Circumstances
    actions: NDArray[np.bool_]
    seconds: Floats
    interests: Floats


def simulate(settings: WorldSettings, progress: Callable[[int, int], None] = lambda done, all_: None) -> World:
    """Draw a world. The r-th sessions of all users run together, because users do not influence each other."""
    rng = np.random.default_rng(settings.seed)
    authors = draw_authors(settings, rng)
    posts = draw_posts(settings, authors, rng)
    users = draw_users(settings, authors, rng)
    drawn = Drawn(settings, authors, posts, users)
    rounds = max(len(times) for times in users.session_ts)
    sessions = []
    for index in range(rounds):
        who = np.array([user for user, times in enumerate(users.session_ts) if len(times) > index])
        now = np.array([users.session_ts[user][index] for user in who])
        drift(users, who, now, settings, rng)
        session = _run(drawn, who, now, rng)
        remember(drawn, session)
        sessions.append(session)
        progress(index + 1, rounds)
    return _write(drawn, sessions)


def _run(drawn: Drawn, who: Ints, now: Ints, rng: np.random.Generator) -> Session:
    author = _choose_authors(drawn, who, now, rng)
    shown = choose_posts(drawn, author, now, rng)
    elsewhere = rng.choice(len(SURFACES), shown.shape, p=OTHER_SURFACES)
    surface = np.where(drawn.users.follows[who[:, None], author], SURFACES.index("following"), elsewhere)
    affinity, shown_in = circumstances(drawn, who, shown, surface, now)
    actions, seconds = draw(shown_in, rng)
    interests = interest(drawn.users.latent[who], drawn.settings)
    return Session(who, now, shown, surface, affinity, shown_in, actions, seconds, interests)


def circumstances(drawn: Drawn, who: Ints, shown: Ints, surface: Ints, now: Ints) -> tuple[Floats, Circumstances]:
    """The part of the appeal that is the user's own, for topic and author, `[n, c]`; and, flat, the circumstances in which users `who [n]`
    see posts `shown [n, c]` on surfaces `[n, c]` at `now [n]`."""
    settings, authors, posts, users = drawn.settings, drawn.authors, drawn.posts, drawn.users
    author, row = posts.author[shown], who[:, None]
    liking = np.take_along_axis(interest(users.latent[who], settings), posts.topic[shown], 1)
    follow = users.follows[row, author].astype(np.float32)
    affinity = liking + settings.follow_appeal * follow + regard_now(users, who, author, now, settings)
    appeal = affinity + users.surface_taste[row, surface] + authors.quality[author] + posts.quality[shown]
    youth = users.freshness[row] * recency(now[:, None] - posts.created_at[shown])
    activity = np.broadcast_to(users.activity[row], shown.shape)
    shown_in = Circumstances(
        appeal.ravel(), youth.ravel(), activity.ravel(), follow.ravel(), surface.ravel().astype(np.int64)
    )
    return affinity, shown_in


def _choose_authors(drawn: Drawn, who: Ints, now: Ints, rng: np.random.Generator) -> Ints:
    """Draw the author of every slot, `[n, slots]`."""
    settings, authors, users = drawn.settings, drawn.authors, drawn.users
    shape = (len(who), settings.slots)
    source = rng.random(shape)
    followed = source < settings.followed_share
    by_interest = (source >= settings.followed_share) & (source < settings.followed_share + settings.interest_share)
    popular = np.log(authors.popularity)
    keen = popular + 2 * interest(users.latent[who], settings)[:, authors.topic]
    author = rng.choice(settings.authors, shape, p=authors.popularity)
    author = np.where(by_interest, _sample_rows(keen, settings.slots, rng), author)
    author = np.where(followed, _sample_rows(np.where(users.follows[who], 0.0, -50.0), settings.slots, rng), author)
    everybody = np.broadcast_to(np.arange(settings.authors), (len(who), settings.authors))
    aversion = np.maximum(-regard_now(users, who, everybody, now, settings), 0)
    reshow = (rng.random(shape) < settings.reshow_share) & (aversion.max(1, keepdims=True) > 0.5)
    return np.where(reshow, _sample_rows(np.log(aversion + 1e-9), settings.slots, rng), author)


def _sample_rows(logits: NDArray[np.floating], count: int, rng: np.random.Generator) -> Ints:
    """`count` draws from the softmax of each row, int64 `[n, count]`."""
    mass = np.cumsum(np.exp(logits - logits.max(1, keepdims=True)), 1)
    points = rng.random((len(logits), count)) * mass[:, -1:]
    return np.stack([np.searchsorted(row, point, side="right") for row, point in zip(mass, points, strict=True)])


def choose_posts(drawn: Drawn, author: Ints, now: Ints, rng: np.random.Generator) -> Ints:
    """Choose a post of each author `[n, c]` at `now [n]`, about as old as a drawn age: mostly fresh, some classics of 80 to 400 hours."""
    settings, posts = drawn.settings, drawn.posts
    fresh = rng.exponential(settings.fresh_hours, author.shape)
    classic = rng.uniform(80, 400, author.shape)
    age = np.where(rng.random(author.shape) < settings.classic_share, classic, fresh) * HOUR_SECONDS
    # posts are sorted by author, then time: one search over author · span + time finds the last post before that time
    origin = settings.start_ts - settings.archive_days * DAY_SECONDS
    span = 2 * (settings.end_ts - origin)
    keys = posts.author * span + (posts.created_at - origin)
    latest = author * span + np.maximum(now[:, None] - age.astype(np.int64) - origin, 0)
    newest = np.searchsorted(keys, latest, side="right") - 1
    return np.maximum(newest, posts.first[author])


def remember(drawn: Drawn, session: Session) -> None:
    """Update follows and regards after a session; a complaint outweighs a friendly act on the same post."""
    settings, posts, users = drawn.settings, drawn.posts, drawn.users
    author = posts.author[session.posts].ravel()
    slots = session.posts.shape[1]
    user, now = np.repeat(session.who, slots), np.repeat(session.now, slots)

    def done(*names: str) -> NDArray[np.bool_]:
        return np.asarray(session.actions[:, [ACTION_NAMES.index(name) for name in names]].any(1))

    attached, disliked, rejected = done(*ATTACHMENTS), done("not_interested"), done(*REJECTIONS)
    followed = done("follow_author")
    users.follows[user[followed], author[followed]] = True
    users.follows[user[rejected], author[rejected]] = False
    acts = (
        (attached & ~disliked & ~rejected, settings.attach_appeal),
        (disliked & ~rejected, settings.dislike_appeal),
        (rejected, settings.reject_appeal),
    )
    for rows, appeal in acts:
        users.regard[user[rows], author[rows]] = appeal
        users.regard_ts[user[rows], author[rows]] = now[rows]


def _write(drawn: Drawn, sessions: list[Session]) -> World:
    """The world with all sessions as one log in time order, and the truth of its test period."""
    settings, authors, posts, users = drawn.settings, drawn.authors, drawn.posts, drawn.users
    post = np.concatenate([s.posts.ravel() for s in sessions])
    who = np.concatenate([np.repeat(s.who, settings.slots) for s in sessions])
    now = np.concatenate([np.repeat(s.now, settings.slots) for s in sessions])
    order = np.lexsort((who, now))
    post, who, now = post[order], who[order], now[order]
    starts = np.concatenate(([True], (who[1:] != who[:-1]) | (now[1:] != now[:-1])))
    log = Log(
        request_id=np.cumsum(starts).astype(np.uint64),
        impression_ts=now,
        user_id=users.ids[who],
        post_id=np.random.default_rng(settings.seed).permutation(len(post)).astype(np.uint64) + 10**18
        if settings.new_posts
        else posts.ids[post],
        author_id=authors.ids[posts.author[post]],
        product_surface=np.concatenate([s.surface.ravel() for s in sessions])[order],
        created_at=posts.created_at[post],
        dwell_seconds=np.concatenate([s.seconds for s in sessions])[order],
        actions=np.concatenate([s.actions for s in sessions])[order],
        action_names=ACTION_NAMES,
        codes=np.stack((1 + posts.topic[post], 1 + post % SILENT_CODES), 1) if settings.content_codes else NO_CODES,
    )
    test = order[now >= settings.test_ts]
    fields = ("appeal", "recency", "activity", "follow", "surface")
    tested = Circumstances(
        *(np.concatenate([getattr(s.circumstances, name) for s in sessions])[test] for name in fields)
    )
    affinity = np.concatenate([s.affinity.ravel() for s in sessions])[test]
    interests = np.concatenate([np.repeat(s.interests, settings.slots, 0) for s in sessions])[test]
    truth = Truth(true_probabilities(tested), log_dwell(tested), affinity, posts.topic[post[now >= settings.test_ts]])
    return World(settings, authors, posts, users, log, truth, tested, interests)
