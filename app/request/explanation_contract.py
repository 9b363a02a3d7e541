"""What a request to explain and its reply are, as pydantic models. `contract` is what they share with a request to rank."""

from __future__ import annotations

from typing import Annotated, Any, Self

from pydantic import Field, model_validator

from app.request.contract import Id, ModelVersion, RankRequest, Reply, Strict, Timings


class ExplainRequest(RankRequest):
    """A request of /rank, and which of its candidates to explain."""

    explain: Annotated[list[Id], Field(min_length=1, examples=[[90]])]
    """Post ids of candidates; where several have the same one, the first is meant."""

    @model_validator(mode="after")
    def _among_the_candidates(self) -> Self:
        listed: Any = self.candidates
        posts = [candidate.post_id for candidate in listed] if isinstance(listed, list) else listed.post_id
        if not set(map(int, self.explain)) <= set(map(int, posts)):
            raise ValueError("explain must name candidates")
        return self


class LeftOut(Strict):
    """The history items that were left out one by one, oldest first; an entry an item."""

    place: list[int]
    """Their places in the request's history, from 0."""
    post_id: list[str]
    """Their decimal post ids."""


class Change(Strict):
    """What one thing changes: the numbers with it less those without it."""

    score: float
    """Of the combined score."""
    probabilities: list[float]
    """One for each of the reply's `actions`."""


class Changes(Strict):
    """What each of several things changes; an entry a thing."""

    score: list[float]
    """Of the combined score."""
    probabilities: list[list[float]]
    """A row a thing; a row has one for each of the reply's `actions`."""


class CandidateChanges(Strict):
    """What /rank says of a candidate, less what it says of the request without one thing."""

    events: Changes
    """Without one history item, for each of the reply's `events`."""
    user: Change
    """Without the user: `user_id` 0."""
    everything: Change
    """With neither user nor history."""
    not_covered: Change
    """`everything` less `user` and all `events`: how far the changes are from adding up."""


class AttentionShares(Strict):
    """Shares of a candidate's attention. Those on user, history and itself add up to 1 for each head."""

    user: list[list[float]]
    """On the user: a row a layer, an entry a head."""
    history: list[list[float]]
    """On all of the history that the model sees: a row a layer, an entry a head."""
    itself: list[list[float]]
    """On the candidate: a row a layer, an entry a head."""
    events: list[list[float]]
    """On each of the reply's `events`, the mean over heads: a row a layer, an entry an event."""


class ExplainedCandidate(Strict):
    """One candidate: what /rank says of it, what would change it, and what it attends to."""

    post_id: Id
    """As it was sent."""
    score: float
    """Σ weight × probability over the weights in force."""
    rank: int
    """Among all candidates of the request; 1 is best."""
    probabilities: list[float]
    """One for each of the reply's `actions`."""
    change: CandidateChanges
    """What each thing changes: positive where it raises the number."""
    attention: AttentionShares
    """What the model looks at, which is no explanation by itself."""


class ExplainTimings(Timings):
    """Where the time went, in milliseconds. `queue` is that of the request itself, `forward` that of all contexts together."""

    attention: float
    """The plain path."""


class ExplainReply(Reply):
    """Why candidates stand where they stand."""

    model: ModelVersion
    """What computed it."""
    actions: list[str]
    """Names of the probability columns."""
    events: LeftOut
    """What was left out one by one."""
    candidates: list[ExplainedCandidate]
    """In the order of the request's `explain`."""
    timings_ms: ExplainTimings
    """Where the time went."""
