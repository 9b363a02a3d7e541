"""A typed client of the Phoenix ranking server, blocking and for asyncio. It imports nothing of the server.

    with RankerClient("http://ranker:8000") as ranker:
        ranking = ranker.rank(7, [Candidate(90, 5), Candidate(91, 6)], [Event(17, 5, ["favorite"])], timeout_seconds=0.2)
        best = min(ranking.candidates, key=lambda candidate: candidate.rank)

One deadline bounds a call with all its attempts, and each attempt tells the server how much of it is left. 429, 503 and broken
connections are retried after the delay that the server asks for.
"""

from phoenix_ranker_client.asynchronous import AsyncRankerClient
from phoenix_ranker_client.blocking import RankerClient
from phoenix_ranker_client.calls import routing_key
from phoenix_ranker_client.messages import (
    Candidate,
    ContextUnknown,
    DeadlineExceeded,
    Event,
    Explained,
    Explanation,
    NoCorpus,
    Ranked,
    RankerError,
    Ranking,
    RankingRequest,
    Recommendation,
    Recommended,
    RequestRefused,
    Retrieval,
    RetrievalRequest,
    RetrievedPost,
    ServerFault,
    Unavailable,
    UnexpectedReply,
)

__all__ = [
    "AsyncRankerClient",
    "Candidate",
    "ContextUnknown",
    "DeadlineExceeded",
    "Event",
    "Explained",
    "Explanation",
    "NoCorpus",
    "Ranked",
    "RankerClient",
    "RankerError",
    "Ranking",
    "RankingRequest",
    "Recommendation",
    "Recommended",
    "RequestRefused",
    "Retrieval",
    "RetrievalRequest",
    "RetrievedPost",
    "ServerFault",
    "Unavailable",
    "UnexpectedReply",
    "routing_key",
]
