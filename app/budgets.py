"""Limits shared by all callers of a process, and the most memory that they can lead to."""

from __future__ import annotations

from app.settings import Settings
from model.config import ModelConfig

MAX_CHANGED, MAX_CHANGE_VALUES = 10_000, 60_000  # posts in one change; searches wait while these are indexed
BUFFER_BYTES = 2**20  # of waiting log lines: about three thousand, a few seconds at full load
CONNECTION_BYTES = 48 * 2**10  # of one connection: its objects, its parser and the reply being written
WRITE_HIGH_BYTES = 2**14  # of replies that a connection may buffer uncounted
CHUNK_BYTES = 64  # overhead of one received piece of a body
VALUE_BYTES = 256  # a parsed JSON value, plain and typed
CANDIDATE_BYTES = 256  # an admitted candidate: its ids as sent and as numbers, and its scores
REQUEST_BYTES = 2**14  # an admitted request without its candidates and history

BACKLOG = 2048  # connections that may wait to be accepted
MAX_HEADER_BYTES = 32_768  # of all headers of a request
EXCLUDED_IDS = 2**20  # post ids excluded by all waiting searches together, by name or as history
CHANGES = 4  # changes of posts that wait or are being made, one at a time
SCAN_REQUESTS = 32  # searches that share one scan of the corpus
TOPIC_FILTERS = 32  # `model.retrieval.corpus.KEPT_TOPICS`, a bit a post for each
USER_VECTOR_BYTES = 16 * 2**20  # of the cache of user vectors
EXPLANATIONS = 1  # computed at the same time; more would crowd out ranking
MAX_EXPLAINED = 32  # candidates of one request
MAX_EXPLAINED_EVENTS = 256  # newest history items that an explanation leaves out, one at a time
SHADOW_WAITING = 16  # answered requests that wait to be scored by the second checkpoint
CALL_CONNECTIONS = 256  # over gRPC
POST_BYTES = 512  # a post that is found or changed: its columns, its topic, its share of a reply
CALL_COPIES = 3  # copies of a gRPC message: as received, as bytes, as tensors
CALL_AHEAD_BYTES = 16 * 1024  # how much of a call a client may send before the server has looked at it

REST_FROM_SECONDS = 0.002  # a caller whose request held the event loop for longer
REST_TIMES = 4.0  # waits this many times as long before its next request is read
MOST_REST_SECONDS = 0.25
REFUSED_SECONDS = 0.00025  # roughly what reading and refusing a bad request takes


class Budget:
    """An amount shared by the whole process, such as bytes of bodies. Used by the event loop only."""

    __slots__ = ("limit", "refused", "used")

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0
        self.refused = 0

    def take(self, amount: int) -> bool:
        """Take this much if there is room; return whether there was."""
        if self.used + amount > self.limit:
            self.refused += 1
            return False
        self.used += amount
        return True

    def give(self, amount: int) -> None:
        """Give back what `take` took."""
        self.used -= amount


def rest_seconds(held_seconds: float) -> float:
    """How long a caller's next request waits after one of its requests held the event loop this long."""
    return REST_TIMES * held_seconds if held_seconds > REST_FROM_SECONDS else 0.0


def shared_rest_seconds(held_seconds: float, resting: int) -> float:
    """The same for a request that ranks nothing, while so many connections rest: all of them together leave four fifths of the event loop
    to who ranks, however cheap each request is."""
    return min(REST_TIMES * held_seconds * max(1, resting), MOST_REST_SECONDS)


def calls_of_a_connection(settings: Settings) -> int:
    """The most gRPC calls on one connection: a quarter of all, so that one connection cannot take every place."""
    return max(1, settings.batching.max_requests // 4)


def attention_bytes(config: ModelConfig, candidates: int) -> int:
    """The most that attention of so many candidates takes on the plain path: four copies of a layer's fp32 logits, the activations of
    one layer or, where they are more, the embeddings under way, and the rows that come of it."""
    tokens = 1 + config.history_length + candidates
    logits = 4 * config.query_heads * tokens * tokens
    layer = 6 * config.width + 3 * config.ffn_width + (8 * config.query_heads + 2) * config.head_width
    activations = tokens * max(layer, 16 * config.width)
    rows = config.layers * config.query_heads * candidates * (2 + config.history_length)
    return 4 * (logits + activations + 2 * rows)


def _explanation_bytes(config: ModelConfig, reply: int) -> int:
    """Memory of one explanation: attention, the scores of all its contexts, and its reply at 24 letters a number."""
    events = min(config.history_length, MAX_EXPLAINED_EVENTS)
    numbers = MAX_EXPLAINED * ((events + 4) * (1 + config.actions) + config.layers * (3 * config.query_heads + events))
    scores = MAX_EXPLAINED * (events + 3) * reply
    return attention_bytes(config, MAX_EXPLAINED) + scores + 24 * numbers


def _retrieval_bytes(settings: Settings, towers: ModelConfig, posts: int, token: int) -> int:
    """Of searches: contexts and excluded ids of those that wait, the rows that a batch may see, what is found, user vectors seen before."""
    batch = SCAN_REQUESTS
    waiting = (settings.queue.max_requests // 4 + batch) * (REQUEST_BYTES + (1 + towers.history_length) * token)
    masks = (batch + TOPIC_FILTERS) * posts // 8 + 2 * posts
    found = (
        batch + 2
    ) * settings.limits.max_retrieved + settings.queue.max_candidates  # and rendered, and waiting for their scores
    return waiting + 8 * EXCLUDED_IDS + masks + found * POST_BYTES + USER_VECTOR_BYTES


def _shadow_bytes(settings: Settings, token: int, tokens: int, reply: int) -> int:
    """Memory of a second checkpoint: waiting requests with their scores, the one being scored, and its context cache."""
    one = REQUEST_BYTES + tokens * token + settings.limits.max_candidates * (CANDIDATE_BYTES + reply)
    return (SHADOW_WAITING + 2) * one + settings.cache.host_bytes


def most_bytes(
    settings: Settings, config: ModelConfig, towers: ModelConfig | None = None, posts: int = 0
) -> dict[str, int]:
    """The most memory that the process takes beside its code, its models, its corpus and the engines' work space, by what takes it.

    `towers` and the number of posts are those of retrieval, where it serves.
    """
    limits, queue, batching = settings.limits, settings.queue, settings.batching
    token = 40 + 4 * config.actions
    reply = 128 + 14 * config.actions + 48 * config.continuous_actions  # of one candidate
    parts = {
        "connections": settings.budgets.connections * (CONNECTION_BYTES + MAX_HEADER_BYTES + WRITE_HIGH_BYTES),
        "bodies": 2 * limits.buffered_bytes,  # in pieces, and in one
        "parsing": limits.max_body_bytes + limits.max_values * VALUE_BYTES,  # one at a time
        "queue": queue.max_requests * REQUEST_BYTES + queue.max_candidates * CANDIDATE_BYTES + queue.max_context_tokens * token,
        "batches": (limits.batch_candidates + 2 * limits.max_batch_candidates) * reply,
        "replies": limits.buffered_bytes + 2 * (batching.max_candidates + limits.max_candidates) * reply,
        "retrieval": 0 if towers is None else _retrieval_bytes(settings, towers, posts, token),
        "changes": 0 if towers is None or settings.admin.port is None
        else CHANGES * MAX_CHANGED * (POST_BYTES + 8 * towers.width) + MAX_CHANGE_VALUES * VALUE_BYTES,
        "grpc": 0 if settings.grpc.port is None
        else batching.max_requests * CALL_COPIES * limits.max_body_bytes
        + CALL_CONNECTIONS * calls_of_a_connection(settings) * CALL_AHEAD_BYTES,
        "explanations": settings.explores * EXPLANATIONS * _explanation_bytes(config, reply),
        "second": 0 if settings.shadow.checkpoint is None
        else _shadow_bytes(settings, token, 1 + config.history_length, reply),
        "cache": settings.cache.host_bytes,
        "log": BUFFER_BYTES,
    }  # fmt: skip
    return parts | {"total": sum(parts.values())}
