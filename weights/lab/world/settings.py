"""The size and parameters of a world. The effects of single actions are in `behaviour`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from weights.lab.training.settings import COUNT, FACTOR, SEED, SHARE, WEIGHT, Within, check_fields
from weights.values import DAY_SECONDS

HOUR_SECONDS = 3_600
SURFACES = ("home", "following", "search", "video", "explore")
DAYS = Within(1, 10_000)
TIME_CONSTANT = Within(0, 1_000_000, excluded=0)
EFFECT = Within(-1000, 1000)
"""Of an act or a trait, in logits."""


@dataclass(frozen=True, slots=True)
class WorldSettings:
    """Equal settings give equal worlds, to the last bit. Times are Unix seconds; appeal is in units of logits.

    Raises ValueError for a value that a field may not have; the message names the field.
    """

    seed: Annotated[int, SEED] = 1
    users: Annotated[int, COUNT] = 2000
    new_users: Annotated[int, Within(0, COUNT.high)] = 100  # seen in the test period only
    authors: Annotated[int, COUNT] = 160
    topics: Annotated[int, Within(3, COUNT.high)] = 8
    days: Annotated[int, DAYS] = 28
    test_days: Annotated[int, DAYS] = 4
    start_ts: Annotated[int, Within(DAYS.high * DAY_SECONDS, 2**32)] = 1_780_272_000  # 2026-06-01 00:00 UTC
    sessions_per_day: Annotated[float, FACTOR] = 1.8
    slots: Annotated[int, COUNT] = 24  # impressions in a session
    posts_per_author_day: Annotated[float, FACTOR] = 3.0
    archive_days: Annotated[int, DAYS] = 20  # how long before the first impression posts begin

    # users
    interest_days: Annotated[float, TIME_CONSTANT] = 250.0  # time constant of the drift
    interest_low: Annotated[float, EFFECT] = -0.6
    interest_high: Annotated[float, EFFECT] = 1.4
    interest_sharpness: Annotated[float, EFFECT] = 16.0
    activity_sd: Annotated[float, WEIGHT] = 1.0
    surface_taste_sd: Annotated[float, WEIGHT] = 0.4
    follows: Annotated[int, Within(0, COUNT.high)] = 10
    follow_appeal: Annotated[float, EFFECT] = 0.7
    freshness_mean: Annotated[float, EFFECT] = 0.3  # how much users like new posts; below 0: they prefer older ones
    freshness_sd: Annotated[float, WEIGHT] = 1.0
    regard_days: Annotated[float, TIME_CONSTANT] = 3.0  # how long an act towards an author has an effect, roughly
    attach_appeal: Annotated[float, EFFECT] = 1.0  # after a reply, repost, quote, look at the profile or follow
    dislike_appeal: Annotated[float, EFFECT] = -2.5  # after not_interested
    reject_appeal: Annotated[float, EFFECT] = -5.0  # after mute, block or report

    # authors and posts
    author_quality_sd: Annotated[float, WEIGHT] = 0.7
    post_quality_sd: Annotated[float, WEIGHT] = 0.08
    stray_topic_share: Annotated[float, SHARE] = 0.01  # posts that are not about their author's topic
    content_codes: bool = False  # whether posts have two codes: that of their topic, and one that says nothing
    new_posts: bool = False  # whether each impression shows a post under an id of its own, never seen before
    fresh_hours: Annotated[float, FACTOR] = 6.0  # mean wanted age; the author's last post of at least that age is shown
    classic_share: Annotated[float, SHARE] = 0.12  # impressions of posts older than 80 hours

    # what a session shows
    followed_share: Annotated[float, SHARE] = 0.3
    interest_share: Annotated[float, SHARE] = 0.35
    reshow_share: Annotated[float, SHARE] = 0.08  # share of slots for authors that the user recently rejected

    def __post_init__(self) -> None:
        check_fields(self)
        if self.test_days > self.days:
            raise ValueError(f"test_days must be at most days, which is {self.days}, got {self.test_days}")

    @property
    def test_ts(self) -> int:
        """The first second of the test period."""
        return self.start_ts + (self.days - self.test_days) * DAY_SECONDS

    @property
    def end_ts(self) -> int:
        """The first second after the world."""
        return self.start_ts + self.days * DAY_SECONDS

    @property
    def all_users(self) -> int:
        """Users of both periods; the new ones are the last."""
        return self.users + self.new_users
