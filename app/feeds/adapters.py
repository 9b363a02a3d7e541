"""The feed that a URL names. Each adapter is one module; its client library is an extra, and is imported where it is wanted."""

from __future__ import annotations

from app.feeds.source import Source, parts_of


def open_feed(url: str) -> Source:
    """The feed of this URL; connects when it is first read. Raises ImportError without its extra."""
    base, name = parts_of(url)
    if base.startswith("kafka"):
        from app.feeds.kafka import KafkaFeed

        return KafkaFeed(base.removeprefix("kafka://"), name)
    from app.feeds.redis import RedisFeed

    return RedisFeed(base, name)
