"""What the join read, what became of it, and what did not join, by reason."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from weights.lab.training.log import time_words
from weights.tables import TableError


@dataclass(slots=True)
class JoinCounts:
    """Counts of parts, rankings and events; every ranking and every event is in one of them.

    `rankings` = `joined_rankings` + those after it. `events` = `joined_events` + those after it. `earlier_events` were
    not read, because they are older than the rankings that were to be joined. `delay_seconds`: how long after their ranking the events
    happened that name a candidate and an action of the model, the 5th percentile and the median. `events_reach_ts`: when the newest ranking
    that an event names was served. It is never before that of the night before; the first night, never before the oldest ranking.
    `done_rankings`: those whose window is over, of the UTC days from `done_from_ts` on, which the next night reads again; `done_parts`: the
    rankings of each part of these days that was read, also of other models, by its name below the log's directory; None where an earlier
    version has joined. `late_rankings`: those of `earlier_rankings` in parts that the night before had not read, without repeated
    ones. `rankings_dated_ahead`: joined ones with an `impression_ts` of more than five minutes after they were served. Times are Unix
    seconds.
    """

    parts: int = 0
    open_parts: int = 0
    foreign_files: list[str] = field(default_factory=list)
    cut_parts: list[str] = field(default_factory=list)
    gone_parts: int = 0
    models: dict[str, int] = field(default_factory=dict)
    rankings: int = 0
    joined_rankings: int = 0
    open_rankings: int = 0
    earlier_rankings: int = 0
    future_rankings: int = 0
    other_model_rankings: int = 0
    repeated_rankings: int = 0
    ambiguous_rankings: int = 0
    rankings_without_history: int = 0
    rankings_never_shown: int = 0
    events: int = 0
    joined_events: int = 0
    repeated_events: int = 0
    events_without_ranking: int = 0
    events_of_left_out_rankings: int = 0
    events_without_candidate: int = 0
    events_of_unknown_actions: dict[str, int] = field(default_factory=dict)
    events_before_ranking: int = 0
    events_after_window: int = 0
    events_of_unseen_candidates: int = 0
    events_of_candidates_seen_late: int = 0
    candidates_seen_late: int = 0
    rankings_seen_late: int = 0
    candidates_without_post: int = 0
    rankings_dated_ahead: int = 0
    late_rankings: int = 0
    done_from_ts: int = 0
    done_rankings: int = 0
    done_parts: dict[str, int] | None = None
    impressions: int = 0
    contexts: int = 0
    observed: list[str] = field(default_factory=list)
    until_ts: int = 0
    earlier_events: int = 0
    events_reach_ts: int = 0
    newest_ranking_ts: int = 0
    delay_seconds: list[float] = field(default_factory=lambda: [0.0, 0.0])

    def as_json(self) -> dict[str, Any]:
        """The counts as JSON values."""
        return asdict(self)

    def lines(self) -> list[str]:
        """The counts for people: only those that are not 0. Nothing of the events where they were not read."""
        still_open = (
            f"their window is not over: events count as whole up to {time_words(self.until_ts)}, which --until decides"
        )
        lines = [
            f"{self.parts:,} parts, {self.rankings:,} rankings: {self.joined_rankings:,} joined",
            *_told(
                {
                    still_open: self.open_rankings,
                    "of an earlier night": self.earlier_rankings,
                    "served in the future by the clock of this machine": self.future_rankings,
                    "of another model": self.other_model_rankings,
                    "repeated": self.repeated_rankings,
                    "several have the same request_id": self.ambiguous_rankings,
                    "their history is not in their part": self.rankings_without_history,
                    "none of their posts was shown": self.rankings_never_shown,
                    "their posts were seen so late that their window is not over": self.rankings_seen_late,
                }
            ),
            *([f"{self.events:,} events: {self.joined_events:,} joined"] if self.events or self.earlier_events else []),
            *_told(
                {
                    "repeated": self.repeated_events,
                    "they name no ranking of the log": self.events_without_ranking,
                    "their ranking was left out": self.events_of_left_out_rankings,
                    "their post was not in the ranking": self.events_without_candidate,
                    **{
                        f"the model has no action {name!r}": count
                        for name, count in sorted(self.events_of_unknown_actions.items())
                    },
                    "before the ranking": self.events_before_ranking,
                    "after the window": self.events_after_window,
                    "their post was not shown": self.events_of_unseen_candidates,
                    "the window of their post is not over": self.events_of_candidates_seen_late,
                }
            ),
        ]
        if self.candidates_seen_late:
            lines.append(
                f"{self.candidates_seen_late:,} posts were seen so late that their window is not over: left out"
            )
        if self.candidates_without_post:
            lines.append(f"{self.candidates_without_post:,} posts were 0, which is no post: left out")
        if self.rankings_dated_ahead:
            lines.append(
                f"{self.rankings_dated_ahead:,} rankings have an impression_ts of more than five minutes after they were served: "
                "their time is when they were served"
            )
        if len(self.models) > 1:
            lines.append("models: " + ", ".join(f"{name} {count:,}" for name, count in sorted(self.models.items())))
        if self.open_parts:
            lines.append(f"{self.open_parts:,} parts are still being written")
        if self.gone_parts:
            lines.append(f"{self.gone_parts:,} parts were removed before they were read")
        if self.late_rankings:
            lines.append(
                f"WARNING: {self.late_rankings:,} rankings are in parts that came after their night was joined: no night has them"
            )
        lines += [f"WARNING: {line}" for line in self.left_out_files()]
        return lines

    def left_out_files(self) -> list[str]:
        """The files that were left out, for people: a sentence for each reason."""
        sentences = []
        for files, reason in (
            (self.foreign_files, "they are no parts of the log"),
            (self.cut_parts, "they cannot be read"),
        ):
            if files:
                more = f" and {len(files) - 3:,} more" if len(files) > 3 else ""
                sentences.append(f"{len(files):,} files are left out, {reason}: {', '.join(files[:3])}{more}")
        return sentences


class NothingJoins(TableError):
    """No ranking joins. `counts` says why."""

    def __init__(self, text: str, counts: JoinCounts) -> None:
        super().__init__(text)
        self.counts = counts


def _told(reasons: dict[str, int]) -> list[str]:
    return [f"  left out: {count:,}, {reason}" for reason, count in reasons.items() if count]
