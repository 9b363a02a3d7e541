"""What all callers together may take of the process, and the most memory that comes of it."""

from __future__ import annotations

from app.settings import Settings
from model.config import ModelConfig

CONNECTION_BYTES = 48 * 2**10  # objects of one connection, its parser and the reply that it begins
WRITE_HIGH_BYTES = 2**14  # of replies that a connection keeps without being counted
CHUNK_BYTES = 64  # a piece of a body beside its bytes
VALUE_BYTES = 256  # a JSON value, typed and plain
CANDIDATE_BYTES = 256  # an admitted candidate: ids as sent and as numbers, its scores
REQUEST_BYTES = 2**14  # an admitted request beside its candidates and history

REST_FROM_SECONDS = 0.002  # a caller whose request held the event loop for longer
REST_TIMES = 4.0  # rests for so many times as long before the next one


class Budget:
    """So much of something, for the whole process. Belongs to the event loop."""

    __slots__ = ("limit", "refused", "used")

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0
        self.refused = 0

    def take(self, amount: int) -> bool:
        """Whether there was room, which is taken then."""
        if self.used + amount > self.limit:
            self.refused += 1
            return False
        self.used += amount
        return True

    def give(self, amount: int) -> None:
        """Take back what was taken."""
        self.used -= amount


def rest_seconds(held_seconds: float) -> float:
    """How long a caller's next request waits for those of others when one has held the event loop for so long."""
    return REST_TIMES * held_seconds if held_seconds > REST_FROM_SECONDS else 0.0


def attention_bytes(config: ModelConfig, candidates: int) -> int:
    """The most that attention of so many candidates takes on the plain path: four copies of a layer's fp32 logits, the activations of
    one layer, and the rows that come of it."""
    tokens = 1 + config.history_length + candidates
    logits = 4 * config.query_heads * tokens * tokens
    activations = tokens * (8 * config.width + 3 * config.ffn_width + 6 * config.query_heads * config.head_width)
    rows = config.layers * config.query_heads * candidates * (2 + config.history_length)
    return 4 * (logits + activations + 2 * rows)


def _explanation_bytes(settings: Settings, config: ModelConfig, reply: int) -> int:
    """Of one explanation: attention, the scores of all its contexts, and its reply, of 24 letters a number."""
    wanted = settings.explore
    events = min(config.history_length, wanted.max_events)
    numbers = wanted.max_candidates * (
        (events + 4) * (1 + config.actions) + config.layers * (3 * config.query_heads + events)
    )
    scores = wanted.max_candidates * (events + 3) * reply
    return attention_bytes(config, wanted.max_candidates) + scores + 24 * numbers


def most_bytes(settings: Settings, config: ModelConfig) -> dict[str, int]:
    """The most memory that the process takes beside its code, its model and the engine's work space, by what takes it."""
    limits, queue, budgets, batching = settings.limits, settings.queue, settings.budgets, settings.batching
    token = 40 + 4 * config.actions
    reply = 128 + 14 * config.actions + 48 * config.continuous_actions  # of one candidate
    parts = {
        "connections": budgets.connections * (CONNECTION_BYTES + settings.connections.max_header_bytes + WRITE_HIGH_BYTES),
        "bodies": 2 * budgets.body_bytes,  # in pieces, and in one
        "parsing": limits.max_body_bytes + limits.max_values * VALUE_BYTES,  # one at a time
        "queue": queue.max_requests * REQUEST_BYTES + queue.max_candidates * CANDIDATE_BYTES + queue.max_context_tokens * token,
        "batches": (budgets.batch_candidates + 2 * limits.max_batch_candidates) * reply,
        "replies": budgets.reply_bytes + 2 * (batching.max_candidates + limits.max_candidates) * reply,
        "explanations": settings.explores * settings.explore.concurrent * _explanation_bytes(settings, config, reply),
        "cache": settings.cache.host_bytes,
        "log": settings.logs.buffer_bytes,
    }  # fmt: skip
    return parts | {"total": sum(parts.values())}
