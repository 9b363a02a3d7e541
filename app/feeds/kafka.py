"""A Kafka topic of one partition as the feed; a message's position is its partition and offset. Needs the extra `kafka`."""

from __future__ import annotations

import json
import time
from typing import Any

from confluent_kafka import Consumer, KafkaError, KafkaException, Producer, TopicPartition

from app.feeds.source import Entry, FeedGap, NotKept

NETWORK_SECONDS = 5.0
CREATION_SECONDS = 2.0  # how long a topic may be unknown after a broker was asked to create it
MOST_BYTES = 10**9  # of a message, as the producer allows; the broker has its own limit
UNREADABLE = ".unreadable"  # behind the topic's name: the topic of messages that nobody can read


class KafkaFeed:
    """As `Source`. Replicas need no group: each assigns itself the partition and keeps its own offset."""

    def __init__(self, servers: str, topic: str) -> None:
        self.topic = topic
        self._servers = {"bootstrap.servers": servers}
        self._consumer: Any = None
        self._producer: Any = None
        self._next = -1  # the next offset that the consumer returns
        self._end = -1  # the offset at which the topic ended when the consumer last reached its end

    def after(self, position: str, most: int, wait_seconds: float) -> list[Entry]:
        """As `Source.after`."""
        partition, _, last = position.partition("-")
        if partition not in ("", "0"):
            raise FeedGap(f"The position {position} is none of the topic {self.topic}, whose positions begin with 0-.")
        offset = int(last) + 1 if position else 0
        try:
            if offset != self._next:
                self._begin(offset)
            messages = self._messages(offset, most, wait_seconds)
        except BaseException:
            self._next = -1
            raise
        self._next = messages[-1].offset() + 1 if messages else offset
        return [Entry(f"0-{one.offset()}", one.value() or b"", one.timestamp()[1] / 1000) for one in messages]

    def _messages(self, offset: int, most: int, wait_seconds: float) -> list[Any]:
        """As `after`. Raises TimeoutError or KafkaException where the broker does not say that the topic ends: a consumer that cannot
        reach it returns nothing."""
        place, found, came_at = TopicPartition(self.topic, 0), list[Any](), time.monotonic()
        while len(found) < most:
            came = self._consumer.consume(most - len(found), timeout=wait_seconds)
            for message in came:
                if message.error() is None:
                    found.append(message)
                elif message.error().code() == KafkaError._PARTITION_EOF:
                    self._end = message.offset()
                else:
                    raise KafkaException(message.error())
            following = found[-1].offset() + 1 if found else offset
            if found and following >= self._consumer.get_watermark_offsets(place, cached=True)[1]:
                self._end = max(self._end, following)
            if self._end >= following:
                break
            if came:
                came_at = time.monotonic()
            elif time.monotonic() - came_at > NETWORK_SECONDS:
                raise TimeoutError(f"topic {self.topic} gave nothing in {NETWORK_SECONDS:.0f} s and did not end")
        if not found:
            self._consumer.get_watermark_offsets(place, timeout=NETWORK_SECONDS)
        return found

    def _begin(self, offset: int) -> None:
        """Read from there. Raises FeedGap where the topic begins behind it or ends before it, ValueError where messages have no order."""
        if self._consumer is None:
            self._consumer = Consumer(
                self._servers
                | {"group.id": "phoenix-ranker", "enable.auto.commit": False, "auto.offset.reset": "error"}
                | {
                    "isolation.level": "read_committed",
                    "queued.max.messages.kbytes": 16_384,
                    "enable.partition.eof": True,
                }
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
        self._end = -1
        self._consumer.assign([TopicPartition(self.topic, 0, offset)])

    def bury(self, entry: Entry, reason: str) -> None:
        """As `Source.bury`: in the topic `TOPIC.unreadable`, keyed by the position; each replica writes it."""
        if self._producer is None:  # one for all: it remembers that there is no such topic
            times = {"topic.metadata.propagation.max.ms": round(1000 * CREATION_SECONDS)}
            self._producer = Producer(self._servers | times | {"message.max.bytes": MOST_BYTES})
        refused = list[Any]()
        heads: dict[str, str | bytes | None] = {"reason": json.dumps(reason)}
        try:
            self._producer.produce(self.topic + UNREADABLE, entry.body, entry.position, headers=heads,
                                   on_delivery=lambda error, _: refused.append(error))  # fmt: skip
        except KafkaException as error:
            raise NotKept(error.args[0].str()) from error
        if self._producer.flush(NETWORK_SECONDS):
            self._producer = None  # and the message with it
            raise TimeoutError(f"topic {self.topic}{UNREADABLE} does not take a message")
        if refused[0] is not None:
            raise NotKept(refused[0].str())

    def close(self) -> None:
        """As `Source.close`."""
        if self._consumer is not None:
            self._consumer.close()
