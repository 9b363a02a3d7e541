"""A Kafka topic as the feed, before the broker that librdkafka carries for tests: no real one can be had here."""

from __future__ import annotations

import ctypes
import time
from pathlib import Path
from typing import Any

import pytest

from app.feeds.adapters import open_feed
from app.feeds.source import MAX_ENTRY_BYTES, FeedGap, NotKept

kafka = pytest.importorskip("confluent_kafka")


class Broker:
    """librdkafka's own, by its C interface: the Python client cannot make a topic of one partition in it."""

    def __init__(self) -> None:
        (path,) = Path(kafka.__file__).parents[1].glob("confluent_kafka.libs/librdkafka-*")
        self._library = library = ctypes.CDLL(str(path))
        library.rd_kafka_new.restype = library.rd_kafka_mock_cluster_new.restype = ctypes.c_void_p
        library.rd_kafka_mock_cluster_new.argtypes = [ctypes.c_void_p, ctypes.c_int]
        library.rd_kafka_mock_cluster_bootstraps.argtypes = [ctypes.c_void_p]
        library.rd_kafka_mock_cluster_bootstraps.restype = ctypes.c_char_p
        library.rd_kafka_mock_topic_create.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int, ctypes.c_int]
        owner = library.rd_kafka_new(0, None, ctypes.create_string_buffer(200), ctypes.c_size_t(200))
        self._cluster = library.rd_kafka_mock_cluster_new(owner, 1)
        self.address = library.rd_kafka_mock_cluster_bootstraps(self._cluster).decode()
        self.producer = kafka.Producer({"bootstrap.servers": self.address, "linger.ms": 0})

    def topic(self, name: str, partitions: int = 1) -> str:
        """The URL of a new topic."""
        assert not self._library.rd_kafka_mock_topic_create(self._cluster, name.encode(), partitions, 1)
        return f"kafka://{self.address}/{name}"

    def is_down(self, is_down: bool) -> None:
        set_down = self._library.rd_kafka_mock_broker_set_down if is_down else self._library.rd_kafka_mock_broker_set_up
        assert not set_down(ctypes.c_void_p(self._cluster), 1)

    def delay(self, milliseconds: int) -> None:
        """Each reply comes so much later."""
        assert not self._library.rd_kafka_mock_broker_set_rtt(ctypes.c_void_p(self._cluster), 1, milliseconds)

    def refuse(self, topic: str, error: int) -> None:
        self._library.rd_kafka_mock_topic_set_error(ctypes.c_void_p(self._cluster), topic.encode(), error)

    def write(self, topic: str, *bodies: str) -> None:
        for body in bodies:
            self.producer.produce(topic, body, partition=0)
        assert not self.producer.flush(10)


@pytest.fixture(scope="module")
def broker() -> Broker:
    return Broker()


def after(feed: Any, position: str, most: int = 100) -> list[Any]:
    """What comes, for as long as it takes a new consumer to join."""
    for _ in range(50):
        if found := feed.after(position, most, 0.2):
            return list(found)
    return []


def test_messages_come_in_order_behind_a_position(broker: Broker) -> None:
    feed = open_feed(broker.topic("posts"))
    broker.write("posts", *"abcde")
    found = after(feed, "", 3)
    assert [(entry.position, entry.body) for entry in found] == [("0-0", b"a"), ("0-1", b"b"), ("0-2", b"c")]
    assert [entry.body for entry in after(feed, "0-2")] == [b"d", b"e"]
    assert [entry.body for entry in after(feed, "0-0")] == [b"b", b"c", b"d", b"e"], "again from an earlier one"
    assert feed.after("0-4", 10, 0.1) == []
    broker.write("posts", "f")
    assert [entry.body for entry in after(feed, "0-4")] == [b"f"]
    with pytest.raises(FeedGap, match="holds offsets 0 to 6, and 10 comes next"):
        feed.after("0-9", 10, 0.1)
    feed.close()


def test_a_topic_of_several_partitions_has_no_order(broker: Broker) -> None:
    url = broker.topic("wide", partitions=2)
    with pytest.raises(ValueError, match="2 partitions; changes keep their order in one alone"):
        open_feed(url).after("", 10, 0.1)


def test_an_unreadable_message_is_buried(broker: Broker) -> None:
    feed, dead = open_feed(broker.topic("odd")), open_feed(broker.topic("odd.unreadable"))
    broker.write("odd", "x")
    (entry,) = after(feed, "")
    feed.bury(entry, "is no JSON")
    feed.bury(entry._replace(position="0-1", body=b"x" * (MAX_ENTRY_BYTES + 1)), "is too long")
    found = after(dead, "")
    found += after(dead, "0-0") if len(found) < 2 else []
    assert [len(entry.body) for entry in found] == [1, MAX_ENTRY_BYTES + 1]


def test_without_a_topic_for_unreadable_messages_the_feed_does_not_stand_still(broker: Broker) -> None:
    """Only the first one waits for a topic that the broker may be creating."""
    feed = open_feed(broker.topic("alone"))
    broker.write("alone", *"xyz")
    broker.refuse("alone.unreadable", kafka.KafkaError.UNKNOWN_TOPIC_OR_PART)
    first, *others = after(feed, "")
    with pytest.raises(NotKept, match="nknown topic"):
        feed.bury(first, "is no JSON")
    began = time.monotonic()
    for entry in others:
        with pytest.raises(NotKept, match="nknown topic"):
            feed.bury(entry, "is no JSON")
    assert time.monotonic() - began < 1


def test_a_broker_that_is_gone_is_not_a_topic_that_has_ended(broker: Broker) -> None:
    feed = open_feed(broker.topic("gone"))
    broker.write("gone", "a")
    assert [entry.body for entry in feed.after("", 10, 0.2)] == [b"a"]
    assert feed.after("0-0", 10, 0.2) == []
    broker.is_down(True)
    try:
        for _ in range(2):
            with pytest.raises(kafka.KafkaException):
                feed.after("0-0", 10, 0.2)
    finally:
        broker.is_down(False)
    broker.write("gone", "b")
    assert [entry.body for entry in feed.after("0-0", 10, 0.2)] == [b"b"]


def test_fewer_messages_than_asked_for_mean_that_there_are_no_more(broker: Broker) -> None:
    """However long the first one takes to come, and in however many pieces they come."""
    feed = open_feed(broker.topic("slow"))
    broker.write("slow", *("x" * 400_000 for _ in range(12)))
    broker.delay(300)
    try:
        found = feed.after("", 100, 0.05)
        assert [entry.position for entry in found] == [f"0-{number}" for number in range(12)]
        assert feed.after("0-11", 100, 0.05) == []
    finally:
        broker.delay(0)


def test_a_position_of_another_feed_is_a_gap(broker: Broker) -> None:
    feed = open_feed(broker.topic("other"))
    broker.write("other", *"abc")
    with pytest.raises(FeedGap, match="1764000000000-1 is none of the topic other"):
        feed.after("1764000000000-1", 10, 0.2)
