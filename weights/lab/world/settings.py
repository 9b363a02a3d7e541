"""The size and parameters of a world. The effects of single actions are in `behaviour`."""

from __future__ import annotations

from dataclasses import dataclass

DAY_SECONDS = 86_400
HOUR_SECONDS = 3_600
SURFACES = ("home", "following", "search", "video", "explore")


@dataclass(frozen=True, slots=True)
class WorldSettings:
    """Equal settings give equal worlds, to the last bit. Times are Unix seconds; appeal is in units of logits."""

    seed: int = 1
    users: int = 2000
    new_users: int = 100  # seen in the test period only
    authors: int = 160
    topics: int = 8
    days: int = 28
    test_days: int = 4
    start_ts: int = 1_780_272_000  # 2026-06-01 00:00 UTC
    sessions_per_day: float = 1.8
    slots: int = 24  # impressions in a session
    posts_per_author_day: float = 3.0
    archive_days: int = 20  # how long before the first impression posts begin

    # users
    interest_days: float = 250.0  # time constant of the drift
    interest_low: float = -0.6
    interest_high: float = 1.4
    interest_sharpness: float = 16.0
    activity_sd: float = 1.0
    surface_taste_sd: float = 0.4
    follows: int = 10
    follow_appeal: float = 0.7
    freshness_mean: float = 0.3  # how much users like new posts; below 0: they prefer older ones
    freshness_sd: float = 1.0
    regard_days: float = 3.0  # how long an act towards an author has an effect, roughly
    attach_appeal: float = 1.0  # after a reply, repost, quote, look at the profile or follow
    dislike_appeal: float = -2.5  # after not_interested
    reject_appeal: float = -5.0  # after mute, block or report

    # authors and posts
    author_quality_sd: float = 0.7
    post_quality_sd: float = 0.08
    stray_topic_share: float = 0.01  # posts that are not about their author's topic
    content_codes: bool = False  # whether posts have two codes: that of their topic, and one that says nothing
    new_posts: bool = False  # whether each impression shows a post under an id of its own, never seen before
    fresh_hours: float = 6.0  # mean wanted age; the author's last post of at least that age is shown
    classic_share: float = 0.12  # impressions of posts older than 80 hours

    # what a session shows
    followed_share: float = 0.3
    interest_share: float = 0.35
    reshow_share: float = 0.08  # share of slots for authors that the user recently rejected

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
