"""A typed client of the ranking service, sync and async, for the feed service. Imports nothing of the server.

    with RankerClient("http://ranker:8000") as ranker:
        ranking = ranker.rank(7, [Candidate(90, 5), Candidate(91, 6)], [Event(17, 5, ["favorite"])], timeout_seconds=0.2)
        best = min(ranking.candidates, key=lambda candidate: candidate.rank)

One timeout bounds a call with all its retries; each attempt tells the server how much of it is left. Refusals for want of
room (429, 503) and connections that could not be made are tried again, after the time that the server asks for.
"""

from app.client.clients import AsyncRankerClient, RankerClient
from app.client.messages import (
    Candidate,
    DeadlineExceeded,
    Event,
    Ranked,
    RankerError,
    Ranking,
    RankingRequest,
    RequestRefused,
    ServerFault,
    Unavailable,
)

__all__ = [
    "AsyncRankerClient",
    "Candidate",
    "DeadlineExceeded",
    "Event",
    "Ranked",
    "RankerClient",
    "RankerError",
    "Ranking",
    "RankingRequest",
    "RequestRefused",
    "ServerFault",
    "Unavailable",
]
