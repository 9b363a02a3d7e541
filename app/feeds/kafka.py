"""A Kafka topic of one partition as the feed; a message's position is its partition and offset. Needs the extra `kafka`."""

from __future__ import annotations

import json
from typing import Any

from confluent_kafka import Consumer, KafkaException, Producer, TopicPartition

from app.feeds.source import Entry, FeedGap, NotKept

NETWORK_SECONDS = 5.0
MOST_BYTES = 10**9  # of a message, as the producer allows; the broker has its own limit
UNREADABLE = ".unreadable"  # behind the topic's name: the topic of messages that nobody can read


class KafkaFeed:
    """As `Source`. Replicas need no group: each assigns itself the partition and keeps its own offset."""

    def __init__(self, servers: str, topic: str) -> None:
        self.topic = topic
        self._servers = {"bootstrap.servers": servers}
        self._consumer: Any = None
        self._next = -1  # the next offset that the consumer returns

    def after(self, position: str, most: int, wait_seconds: float) -> list[Entry]:
        """As `Source.after`."""
        offset = int(position.partition("-")[2]) + 1 if position else 0
        try:
            if offset != self._next:
                self._begin(offset)
            messages = self._consumer.consume(most, timeout=wait_seconds)
            for message in messages:
                if message.error() is not None:
                    raise KafkaException(message.error())
        except BaseException:
            self._next = -1
            raise
        self._next = messages[-1].offset() + 1 if messages else offset
        return [Entry(f"0-{one.offset()}", one.value() or b"", one.timestamp()[1] / 1000) for one in messages]

    def _begin(self, offset: int) -> None:
        """Read from there. Raises FeedGap where the topic begins behind it or ends before it, ValueError where messages have no order."""
        if self._consumer is None:
            self._consumer = Consumer(
                self._servers
                | {"group.id": "phoenix-ranker", "enable.auto.commit": False, "auto.offset.reset": "error"}
                | {"isolation.level": "read_committed", "queued.max.messages.kbytes": 16_384}
            )
        found = self._consumer.list_topics(self.topic, timeout=NETWORK_SECONDS).topics[self.topic]
        if found.error is not None:
            raise KafkaException(found.error)
        if len(found.partitions) != 1:
            raise ValueError(
                f"topic {self.topic} has {len(found.partitions)} partitions; changes keep their order in one alone"
            )
        first, end = self._consumer.get_watermark_offsets(TopicPartition(self.topic, 0), timeout=NETWORK_SECONDS)
        if not first <= offset <= end:
            raise FeedGap(
                f"The topic {self.topic} holds offsets {first} to {end}, and {offset} comes next: begin with a newer snapshot of the "
                "corpus, or restore the topic."
            )
        self._consumer.assign([TopicPartition(self.topic, 0, offset)])

    def bury(self, entry: Entry, reason: str) -> None:
        """As `Source.bury`: in the topic `TOPIC.unreadable`, keyed by the position; each replica writes it."""
        producer, refused = Producer(self._servers | {"message.max.bytes": MOST_BYTES}), list[Any]()
        heads: dict[str, str | bytes | None] = {"reason": json.dumps(reason)}
        producer.produce(self.topic + UNREADABLE, entry.body, entry.position, headers=heads,
                         on_delivery=lambda error, _: refused.append(error))  # fmt: skip
        if producer.flush(NETWORK_SECONDS):
            raise TimeoutError(f"topic {self.topic}{UNREADABLE} does not take a message")
        if refused[0] is not None:
            raise NotKept(refused[0].str())

    def close(self) -> None:
        """As `Source.close`."""
        if self._consumer is not None:
            self._consumer.close()
