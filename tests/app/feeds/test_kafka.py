"""A Kafka topic as the feed, before the broker that librdkafka carries for tests: no real one can be had here."""

from __future__ import annotations

from typing import Any

import pytest

from app.feeds.source import FeedGap, open_feed

kafka = pytest.importorskip("confluent_kafka")


@pytest.fixture
def broker() -> tuple[Any, str]:
    """A producer, and the address of the broker inside it."""
    producer = kafka.Producer({"test.mock.num.brokers": 1, "bootstrap.servers": "", "linger.ms": 0})
    (found,) = producer.list_topics(timeout=10).brokers.values()
    return producer, f"{found.host}:{found.port}"


def write(producer: Any, *bodies: str, topic: str = "posts", partition: int = 0) -> None:
    for body in bodies:
        producer.produce(topic, body, partition=partition)
    assert not producer.flush(10)


def after(feed: Any, position: str, most: int = 100) -> list[Any]:
    """What comes, for as long as it takes a new consumer to join."""
    for _ in range(50):
        if found := feed.after(position, most, 0.2):
            return list(found)
    return []


def one_partition(address: str, topic: str = "posts") -> None:
    from confluent_kafka.admin import AdminClient, NewTopic

    (made,) = AdminClient({"bootstrap.servers": address}).create_topics([NewTopic(topic, 1, 1)]).values()
    made.result(10)


def test_messages_come_in_order_behind_a_position(broker: tuple[Any, str]) -> None:
    producer, address = broker
    one_partition(address)
    write(producer, *"abcde")
    feed = open_feed(f"kafka://{address}/posts")
    found = after(feed, "", 3)
    assert [(entry.position, entry.body) for entry in found] == [("0-0", b"a"), ("0-1", b"b"), ("0-2", b"c")]
    assert [entry.body for entry in after(feed, "0-2")] == [b"d", b"e"]
    assert [entry.body for entry in after(feed, "0-0")] == [b"b", b"c", b"d", b"e"], "again from an earlier one"
    assert feed.after("0-4", 10, 0.1) == []
    write(producer, "f")
    assert [entry.body for entry in after(feed, "0-4")] == [b"f"]
    with pytest.raises(FeedGap, match="holds offsets 0 to 6, and 10 comes next"):
        feed.after("0-9", 10, 0.1)
    feed.close()


def test_a_topic_of_several_partitions_has_no_order(broker: tuple[Any, str]) -> None:
    producer, address = broker
    write(producer, "a")  # made by writing, with the broker's four partitions
    with pytest.raises(ValueError, match="partitions; changes keep their order in one alone"):
        open_feed(f"kafka://{address}/posts").after("", 10, 0.1)


def test_an_unreadable_message_is_buried(broker: tuple[Any, str]) -> None:
    producer, address = broker
    one_partition(address)
    one_partition(address, "posts.unreadable")
    write(producer, "x")
    feed = open_feed(f"kafka://{address}/posts")
    feed.bury(after(feed, "")[0], "is no JSON")
    dead = after(open_feed(f"kafka://{address}/posts.unreadable"), "")
    assert [entry.body for entry in dead] == [b"x"]
