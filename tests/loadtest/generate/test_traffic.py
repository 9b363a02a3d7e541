"""The traffic model keeps its stated properties."""

from collections import Counter, defaultdict
from dataclasses import replace
from itertools import pairwise

import orjson
import pytest

from loadtest.generate.distributions import SizeBand, Sizes, Zipf
from loadtest.generate.traffic import Traffic, TrafficSettings, history_sizes

SMALL = TrafficSettings(users=2_000, posts=50_000)


@pytest.fixture(scope="module")
def stream():
    """One long stream for every property that only looks."""
    return Traffic(SMALL).take(2_500)


def columns(part):
    return part if isinstance(part, dict) else {name: [row[name] for row in part] for name in (part[0] if part else {})}


def contexts(requests):
    parsed = defaultdict(list)
    for request in requests:
        body = orjson.loads(request.body)
        parsed[request.user_id].append(
            (request, columns(body["history"]).get("post_id", []), columns(body["candidates"])["post_id"])
        )
    return parsed


def test_equal_seeds_give_equal_bytes_and_other_seeds_do_not():
    first, again = Traffic(SMALL).take(200), Traffic(SMALL).take(200)
    other = Traffic(TrafficSettings(users=2_000, posts=50_000, seed=2)).take(200)
    assert [request.body for request in first] == [request.body for request in again]
    assert not {request.body for request in first} & {request.body for request in other}


def test_nothing_is_sent_twice(stream):
    assert len({request.body for request in stream}) == 2_500


def test_pages_of_a_session_share_the_context_and_never_a_candidate(stream):
    pages = 0
    for requests in contexts(stream).values():
        for (_, history, shown), (request, next_history, next_shown) in pairwise(requests):
            if request.kind == "page":
                pages += 1
                assert next_history == history
                assert not set(shown) & set(next_shown)
    assert pages > 800


def test_a_history_grows_by_new_events_between_visits(stream):
    grown = prefixes = 0
    for requests in contexts(stream).values():
        for (_, history, _), (request, next_history, _) in pairwise(requests):
            if request.kind == "return_visit" and len(next_history) < SMALL.history_window:
                grown += next_history != history
                prefixes += next_history[: len(history)] == history
    assert grown > 100
    assert prefixes >= grown


def test_shares_and_sizes_are_the_stated_ones(stream):
    requests = stream
    kinds = Counter(request.kind for request in requests)
    assert 0.6 < kinds["page"] / 2_500 < 0.73  # a session of three pages on average has two that follow the first
    assert 0.55 < sum(request.candidates == 64 for request in requests) / 2_500 < 0.65
    assert max(request.candidates for request in requests) > 256
    assert {0, 127} <= {request.history for request in requests}


def test_popularity_is_skewed(stream):
    requests = [request for request in stream if request.kind != "page"]
    visits = Counter(request.user_id for request in requests)
    assert visits.most_common(1)[0][1] > 10
    authors = Counter()
    for request in requests[:300]:
        authors.update(columns(orjson.loads(request.body)["candidates"])["author_id"])
    hottest = sum(count for _, count in authors.most_common(SMALL.hot_authors))
    assert 0.15 < hottest / authors.total() < 0.45


def test_limits_of_the_server_are_kept():
    requests = Traffic(TrafficSettings(history_window=32, max_candidates=100)).take(500)
    assert max(request.candidates for request in requests) == 100
    assert max(request.history for request in requests) == 32


def test_first_visits_and_bursts():
    traffic = Traffic(SMALL)
    assert {traffic.first_visit().kind for _ in range(20)} == {"first_visit"}
    burst = [orjson.loads(request.body) for request in traffic.burst(5)]
    assert len({body["user_id"] for body in burst}) == 1
    assert len({orjson.dumps(columns(body["history"])) for body in burst}) == 1
    assert len({tuple(columns(body["candidates"])["post_id"]) for body in burst}) == 5


def test_full_histories_fill_the_window_of_every_user():
    traffic = Traffic(replace(SMALL, full_histories=True, history_window=63))
    assert {traffic.first_visit().history for _ in range(20)} == {63}


def test_impossible_settings_are_refused():
    with pytest.raises(ValueError, match="sum to 1"):
        Sizes([SizeBand(1, 2, 0.5)])
    with pytest.raises(ValueError, match="distinct posts"):
        Zipf(10, 1.0).draw_distinct(Traffic(SMALL)._random, 11, set())
    with pytest.raises(ValueError, match="mean_pages"):
        Traffic(TrafficSettings(mean_pages=0.5))


@pytest.mark.parametrize("window", [16, 127, 512, 1022])
def test_history_sizes_fit_every_window(window):
    bands = history_sizes(window).bands
    assert bands[0].high == 0
    assert bands[-1].high == window
