"""The people of the demo: who comes, which posts could be shown, what a ranking is worth to them, and what they do. Ranks nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loadtest.loop.settings import REWARD, WORLD, LoopSettings
from weights.lab.training.log import Log
from weights.lab.world.behaviour import ACTION_NAMES, draw, true_probabilities
from weights.lab.world.population import draw_authors, draw_posts, draw_users, drift, interest
from weights.lab.world.settings import SURFACES, WorldSettings
from weights.lab.world.simulate import OTHER_SURFACES, Drawn, Session, choose_posts, circumstances, remember
from weights.values import DAY_SECONDS

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
WORTH = np.array([REWARD.get(name, 0.0) for name in ACTION_NAMES])
KEPT_EVENTS = 40
"""So many events of a user the application remembers and sends."""
FOLLOWED = 1.0
"""How much likelier a followed author is a candidate, as a logarithm."""


@dataclass(frozen=True, slots=True, eq=False)
class Visits:
    """One visit of each of n users, with C candidates each. `who` and `now` `[n]`; `posts`, rows of the world's posts, and `surface`
    `[n, C]`; `reward` float64 `[n, C]`: what is to be expected of each candidate, if it is shown, by the truth of the world."""

    who: Ints
    now: Ints
    posts: Ints
    surface: Ints
    reward: Floats


@dataclass(frozen=True, slots=True, eq=False)
class Acts:
    """What followed: `posts` and `surface` `[n, k]`, `actions` bool `[n, k, A]`, `seconds` of dwell float32 `[n, k]`."""

    posts: Ints
    surface: Ints
    actions: NDArray[np.bool_]
    seconds: NDArray[np.float32]


class People:
    """A world whose users visit day by day. It changes: what was shown changes histories, follows and regards."""

    def __init__(self, settings: LoopSettings) -> None:
        self.settings = settings
        self.rng = np.random.default_rng(settings.seed)
        world = WorldSettings(
            seed=settings.seed,
            users=settings.all_users,
            new_users=0,
            authors=settings.all_authors,
            days=settings.warm_up_days + settings.days,
            test_days=settings.days,
            **WORLD,
        )
        authors = draw_authors(world, self.rng)
        posts = draw_posts(world, authors, self.rng)
        users = draw_users(world, authors, self.rng)
        users.latent_ts[:] = world.start_ts
        self.world = Drawn(world, authors, posts, users)
        self.histories: list[list[dict[str, Any]]] = [[] for _ in range(settings.all_users)]

    def start_of(self, day: int) -> int:
        """The first second of a day, which is below 0 before the demo begins."""
        return self.world.settings.test_ts + day * DAY_SECONDS

    def change_tastes(self) -> None:
        """Everybody's interests are drawn anew, authors become better or worse, and old posts are liked rather than new ones."""
        users, authors = self.world.users, self.world.authors
        users.latent[:] = self.rng.standard_normal(users.latent.shape, np.float32)
        users.freshness[:] = -users.freshness
        self.world = Drawn(
            self.world.settings,
            replace(authors, quality=self.rng.permutation(authors.quality)),
            self.world.posts,
            users,
        )

    def visits(self, day: int) -> list[Visits]:
        """The visits of a day: every user who has arrived comes once in each of them."""
        settings, part = self.settings, DAY_SECONDS // self.settings.visits
        return [self._visits(day, self.start_of(day) + visit * part, part) for visit in range(settings.visits)]

    def _visits(self, day: int, start: int, seconds: int) -> Visits:
        settings, world, rng = self.settings, self.world, self.rng
        arrived = settings.users + settings.new_users * max(day, 0)
        now = np.sort(rng.integers(start, start + seconds, arrived))
        who = rng.permutation(arrived)
        drift(world.users, who, now, world.settings, rng)
        present = settings.authors + settings.new_authors * max(day, 0)
        pull = np.log(world.authors.popularity) + FOLLOWED * world.users.follows[who]
        pull[:, present:] = -np.inf
        drawn = pull + rng.gumbel(size=pull.shape)
        author = np.argsort(-drawn, 1)[:, : settings.candidates]
        posts = choose_posts(world, author, now, rng)
        elsewhere = rng.choice(len(SURFACES), posts.shape, p=OTHER_SURFACES)
        surface = np.where(world.users.follows[who[:, None], author], SURFACES.index("following"), elsewhere)
        _, situations = circumstances(world, who, posts, surface, now)
        reward = true_probabilities(situations).astype(np.float64) @ WORTH
        return Visits(who, now, posts, surface, reward.reshape(posts.shape))

    def act(self, visits: Visits, places: Ints) -> Acts:
        """What the users do with the candidates at `places [n, k]`, which were shown to them, the best first."""
        world = self.world
        posts = np.take_along_axis(visits.posts, places, 1)
        surface = np.take_along_axis(visits.surface, places, 1)
        affinity, situations = circumstances(world, visits.who, posts, surface, visits.now)
        actions, seconds = draw(situations, self.rng)
        interests = interest(world.users.latent[visits.who], world.settings)
        session = Session(visits.who, visits.now, posts, surface, affinity, situations, actions, seconds, interests)
        remember(world, session)
        acts = Acts(posts, surface, actions.reshape(*posts.shape, -1), seconds.reshape(posts.shape))
        self._keep(visits, acts)
        return acts

    def _keep(self, visits: Visits, acts: Acts) -> None:
        """Remember the events, as an application would."""
        posts, authors = self.world.posts, self.world.authors
        for row, place in zip(*np.nonzero(acts.actions.any(2)), strict=True):
            post = acts.posts[row, place]
            history = self.histories[int(visits.who[row])]
            history.append(
                {
                    "post_id": str(posts.ids[post]),
                    "author_id": str(authors.ids[posts.author[post]]),
                    "product_surface": int(acts.surface[row, place]),
                    "actions": [ACTION_NAMES[action] for action in np.flatnonzero(acts.actions[row, place])],
                    "dwell_time": round(float(acts.seconds[row, place]), 1),
                }
            )
            del history[:-KEPT_EVENTS]

    def body(self, visits: Visits, row: int, name: str) -> dict[str, Any]:
        """The request for one visit, as the application sends it."""
        posts, settings = self.world.posts, self.settings
        candidates = [
            {
                "post_id": str(posts.ids[post]),
                "author_id": str(self.world.authors.ids[posts.author[post]]),
                "product_surface": surface,
                "created_at": int(posts.created_at[post]),
            }
            for post, surface in zip(visits.posts[row].tolist(), visits.surface[row].tolist(), strict=True)
        ]
        user = int(visits.who[row])
        return {
            "request_id": name, "user_id": str(self.world.users.ids[user]), "history": self.histories[user],
            "candidates": candidates, "impression_ts": int(visits.now[row]), "top_k": settings.shown,
            "explore": {"temperature": settings.temperature},
        }  # fmt: skip

    def log_of(self, rounds: Sequence[tuple[Visits, Acts]]) -> Log:
        """What was shown in these visits as a log to train on, in time order."""
        posts, authors, users = self.world.posts, self.world.authors, self.world.users
        k = self.settings.shown
        who, now = (np.concatenate([np.repeat(getattr(v, name), k) for v, _ in rounds]) for name in ("who", "now"))
        post, surface = (np.concatenate([getattr(a, name).ravel() for _, a in rounds]) for name in ("posts", "surface"))
        request = np.repeat(np.arange(len(who) // k, dtype=np.uint64) + np.uint64(1), k)
        log = Log(
            request_id=request,
            impression_ts=now,
            user_id=users.ids[who],
            post_id=posts.ids[post],
            author_id=authors.ids[posts.author[post]],
            product_surface=surface,
            created_at=posts.created_at[post],
            dwell_seconds=np.concatenate([a.seconds.ravel() for _, a in rounds]),
            actions=np.concatenate([a.actions.reshape(-1, len(ACTION_NAMES)) for _, a in rounds]),
            action_names=ACTION_NAMES,
        )
        return log.take(np.lexsort((request, now)))


def best(scores: Floats, count: int) -> Ints:
    """The places of the `count` candidates with the highest scores, `[n, C]` → `[n, count]`, the best first."""
    return np.argsort(-scores, 1, kind="stable")[:, :count]
