"""The traffic model of all tools: which user asks for a page next, with which history and candidates."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import msgspec
import numpy as np
import orjson

from loadtest.generate.distributions import SizeBand, Sizes, Zipf, ids_of, mix

Kind = Literal["first_visit", "return_visit", "page"]
RETRIEVING = ("/retrieve", "/recommend")
KINDS: tuple[Kind, ...] = ("first_visit", "return_visit", "page")

USER_SALT, POST_SALT, AUTHOR_SALT, OWNER_SALT, AGE_SALT = 1, 2, 3, 4, 5
DAY_SECONDS = 86_400

HISTORY_BANDS_OF_WINDOW = (
    (0.0, 0.0, 0.05), (0.01, 0.125, 0.25), (0.125, 0.5, 0.30), (0.5, 0.99, 0.20), (1.0, 1.0, 0.20),
)  # fmt: skip
CANDIDATE_BANDS = ((16, 32, 0.15), (64, 64, 0.60), (65, 128, 0.17), (129, 256, 0.06), (257, 512, 0.02))
CANDIDATE_SIZES = Sizes([SizeBand(*band) for band in CANDIDATE_BANDS])
ACTION_SHARES = (
    ("click", 0.45), ("dwell", 0.35), ("favorite", 0.25), ("repost", 0.05), ("reply", 0.05), ("not_interested", 0.02),
)  # fmt: skip


@dataclass(frozen=True)
class TrafficSettings:
    """Parameters of the traffic. Shares lie in 0 … 1; `history_window` and `max_candidates` come from the server's `/info`.

    `new_user_share` of the sessions belong to a new user; the others to one drawn from `users` by a Zipf law.
    A session asks for a geometric number of pages, at least 1 and `mean_pages` on average. Between two visits a history grows
    by a Poisson number of events. `hot_author_share` of the posts belong to `hot_authors`. With `full_histories` every
    history fills the window. With `as_is`, sizes are not cut to the server's limits.
    """

    seed: int = 1
    users: int = 20_000
    user_exponent: float = 1.0
    new_user_share: float = 0.15
    posts: int = 200_000
    post_exponent: float = 0.8
    authors: int = 20_000
    hot_authors: int = 50
    hot_author_share: float = 0.2
    mean_pages: float = 3.0
    live_sessions: int = 64
    events_between_visits: float = 4.0
    objects_share: float = 0.1
    history_window: int = 127
    full_histories: bool = False
    as_is: bool = False
    max_candidates: int = 512
    candidates: Sizes = field(default=CANDIDATE_SIZES, repr=False)
    actions: tuple[str, ...] = tuple(name for name, _ in ACTION_SHARES)
    start_ts: int = 1_780_000_000

    @classmethod
    def production(cls, seed: int = 1) -> TrafficSettings:
        """The published service's own sizes: 1 022 events and 2 800 candidates in every request, in columns."""
        sizes = cls(seed=seed, history_window=1022, full_histories=True, as_is=True, objects_share=0.0)
        return sizes.with_fixed_candidates(2800)

    def with_fixed_candidates(self, count: int) -> TrafficSettings:
        """The same with exactly `count` candidates a page."""
        return replace(self, candidates=Sizes([SizeBand(count, count, 1.0)]), max_candidates=count)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values, for a run's metadata."""
        values = {name: value for name, value in vars(self).items() if name != "candidates"}
        return values | {"candidates": [[band.low, band.high, band.share] for band in self.candidates.bands]}


@dataclass(frozen=True, slots=True)
class RankRequest:
    """One body for `POST /rank`, with its user and the kind and sizes that reports need."""

    body: bytes
    kind: Kind
    user_id: int
    candidates: int
    history: int

    def for_path(self, path: str) -> bytes:
        """The body for an endpoint. /retrieve and /recommend get no candidates, but `k` = their number."""
        if path not in RETRIEVING:
            return self.body
        content = orjson.loads(self.body)
        del content["candidates"]
        return orjson.dumps(content | {"k": self.candidates})

    def is_answered(self, reply: bytes) -> bool:
        """Whether a reply is JSON with a result for each candidate, or for each of at most `k` posts that the corpus could show."""
        try:
            said = REPLY.decode(reply)
        except msgspec.DecodeError:
            return False
        return len(said.candidates or said.posts) == min(self.candidates, said.visible)


class _Said(msgspec.Struct):
    """What is read of a reply: its results, unread, and of how many posts they were found."""

    candidates: list[msgspec.Raw] = []
    posts: list[msgspec.Raw] = []
    visible: int = sys.maxsize


REPLY = msgspec.json.Decoder(_Said)

Columns = dict[str, list[Any]]


@dataclass(slots=True)
class _Person:
    """A user: an id, a history in columns, oldest first, and the number of finished visits."""

    user_id: int
    history: Columns
    visits: int = 0


@dataclass(slots=True)
class _Session:
    rank: int
    person: _Person
    pages_left: int
    shown: set[int] = field(default_factory=set)
    pages: int = 0


class Traffic(Iterator[RankRequest]):
    """An endless, seeded stream of requests. Equal settings give equal bytes. Sessions interleave, each in its own order."""

    def __init__(self, settings: TrafficSettings) -> None:
        if settings.mean_pages < 1:
            raise ValueError("mean_pages must be at least 1")
        self.settings = settings
        self.sent = 0
        self._random = np.random.default_rng(settings.seed)
        self._users = Zipf(settings.users, settings.user_exponent)
        self._posts = Zipf(settings.posts, settings.post_exponent)
        window = settings.history_window
        filled = Sizes([SizeBand(window, window, 1.0)])
        self._history_sizes = filled if settings.full_histories else history_sizes(window)
        self._candidate_sizes = settings.candidates.clipped(settings.max_candidates)
        self._people: dict[int, _Person] = {}
        self._new_users = 0
        self._live: list[_Session] = []
        self._live_users: set[int] = set()

    def __next__(self) -> RankRequest:
        while len(self._live) < self.settings.live_sessions:
            self._live.append(self._open(fresh=self._random.random() < self.settings.new_user_share))
        session = self._live[int(self._random.integers(len(self._live)))]
        request = self._page(session)
        if session.pages_left == 0:
            self._close(session)
        return request

    def first_visit(self) -> RankRequest:
        """The first page of a new user, after which the session ends."""
        return self.burst(1)[0]

    def session(self) -> Iterator[RankRequest]:
        """All pages of one session, in order; the history grows when it ends."""
        session = self._open(fresh=self._random.random() < self.settings.new_user_share)
        try:
            while session.pages_left:
                yield self._page(session)
        finally:
            self._close(session)

    def burst(self, pages: int) -> list[RankRequest]:
        """Several pages that one user asks for at once: one context, many candidate lists."""
        session = self._open(fresh=True)
        requests = [self._page(session) for _ in range(pages)]
        self._close(session)
        return requests

    def take(self, count: int) -> list[RankRequest]:
        """The next `count` requests."""
        return [next(self) for _ in range(count)]

    def _open(self, fresh: bool) -> _Session:
        settings = self.settings
        rank = settings.users + self._new_users
        if fresh:
            self._new_users += 1
        else:
            rank = int(self._users.draw(self._random, 1)[0])
            while rank in self._live_users:  # one session per person at a time
                rank = int(self._random.integers(settings.users))
        self._live_users.add(rank)
        if rank not in self._people:
            self._people[rank] = self._person(rank)
        pages = int(self._random.geometric(1 / settings.mean_pages))
        return _Session(rank, self._people[rank], pages)

    def _close(self, session: _Session) -> None:
        person = session.person
        person.visits += 1
        self._live = [live for live in self._live if live is not session]
        self._live_users.discard(session.rank)
        self._grow(person, int(self._random.poisson(self.settings.events_between_visits)))

    def _person(self, rank: int) -> _Person:
        history: Columns = {name: [] for name in ("post_id", "author_id", "actions", "product_surface", "dwell_time")}
        person = _Person(int(ids_of(np.array([rank]), USER_SALT)[0]), history)
        self._grow(person, self._history_sizes.draw(self._random))
        return person

    def _grow(self, person: _Person, events: int) -> None:
        """Append `events` new events and drop the oldest beyond the window, as a feed service's own store would."""
        posts = self._posts.draw(self._random, events)
        newest = {
            "post_id": ids_of(posts, POST_SALT).tolist(),
            "author_id": self._authors(posts),
            "product_surface": self._random.integers(0, 4, events).tolist(),
            "dwell_time": np.round(self._random.exponential(6.0, events), 1).tolist(),
            "actions": [self._actions() for _ in range(events)],
        }
        for name, column in person.history.items():
            column += newest[name]
            del column[: max(0, len(column) - self.settings.history_window)]

    def _actions(self) -> list[str]:
        shares = [(name, share) for name, share in ACTION_SHARES if name in self.settings.actions]
        if not shares:
            return [self.settings.actions[int(self._random.integers(len(self.settings.actions)))]]
        drawn = self._random.random(len(shares))
        return [name for (name, share), value in zip(shares, drawn, strict=True) if value < share]

    def _authors(self, posts: np.ndarray[Any, np.dtype[np.int64]]) -> list[int]:
        """The fixed author of each post. Hot authors own `hot_author_share` of the posts."""
        settings = self.settings
        owner = mix(posts, OWNER_SALT)
        hot = (owner % np.uint64(1000)).astype(np.float64) < 1000 * settings.hot_author_share
        pick = owner >> np.uint64(10)
        ranks = np.where(hot, pick % np.uint64(settings.hot_authors), pick % np.uint64(settings.authors))
        authors: list[int] = ids_of(ranks.astype(np.int64), AUTHOR_SALT).tolist()
        return authors

    def _page(self, session: _Session) -> RankRequest:
        settings = self.settings
        count = self._candidate_sizes.draw(self._random)
        ranks = self._posts.draw_distinct(self._random, count, session.shown)
        session.shown.update(ranks)
        posts = np.array(ranks, dtype=np.int64)
        ages = (mix(posts, AGE_SALT) % np.uint64(2 * DAY_SECONDS)).astype(np.int64)
        candidates: Columns = {
            "post_id": ids_of(posts, POST_SALT).tolist(),
            "author_id": self._authors(posts),
            "product_surface": self._random.integers(0, 4, count).tolist(),
            "created_at": (settings.start_ts - ages).tolist(),
        }
        history = session.person.history
        shaped = objects_of if self._random.random() < settings.objects_share else dict
        content = {
            "user_id": str(session.person.user_id),
            "history": shaped(history),
            "candidates": shaped(candidates),
            "impression_ts": settings.start_ts + self.sent // 64,
        }
        first: Kind = "return_visit" if session.person.visits else "first_visit"
        kind: Kind = "page" if session.pages else first
        session.pages += 1
        session.pages_left = max(0, session.pages_left - 1)
        self.sent += 1
        return RankRequest(orjson.dumps(content), kind, session.person.user_id, count, len(history["post_id"]))


def fresh_seed() -> int:
    """A seed that no earlier run has used. With a used one, the server's context cache would know the users."""
    return time.time_ns() % 2**48


def history_sizes(window: int) -> Sizes:
    """The distribution of history lengths for a window: 5 % are empty, 20 % fill it."""
    bands = HISTORY_BANDS_OF_WINDOW
    return Sizes([SizeBand(round(low * window), round(high * window), share) for low, high, share in bands])


def objects_of(columns: Columns) -> Sequence[dict[str, Any]]:
    """The same rows as objects."""
    rows = zip(*columns.values(), strict=True)
    return [dict(zip(columns, row, strict=True)) for row in rows]
