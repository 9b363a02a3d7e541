"""The explorer's reasons are what /explain and /rank say: terms, the map, groups, the next post, attention, sweeps."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest

from tests.e2e.explore.explorer import EXAMPLE, NAMES, NEEDED, Explorer, Json, ranked

pytestmark = NEEDED
POSTS = [post["post_id"] for post in EXAMPLE["candidates"]]
CELLS = "rows => rows.map(row => [...row.cells].map(cell => cell.innerText))"
TWO_DIGITS, THREE_DIGITS = 0.0051, 6e-4


def numbers(texts: list[str]) -> list[float]:
    return [float(text.replace("−", "-").replace("+", "")) for text in texts]


@pytest.fixture
def why(tab: Explorer) -> Explorer:
    """The start, with the reasons of the first post open."""
    tab.open().why()
    tab.page.wait_for_selector(".heat")
    return tab


@pytest.fixture(scope="module")
def explained(client: httpx.Client) -> dict[str, Json]:
    """What /explain says of each post."""
    reply = client.post("/explain", json=EXAMPLE | {"explain": POSTS}).raise_for_status().json()
    return dict(zip(POSTS, reply["candidates"], strict=True))


def test_terms_add_up_to_the_score_and_to_its_lead_over_the_next(why: Explorer) -> None:
    (_, _, first), (_, _, second), *_ = why.shown()
    terms = numbers(why.page.locator(".detail:visible .terms tbody tr td:nth-child(4)").all_inner_texts())
    assert len(terms) == 8
    assert sum(terms) == pytest.approx(first, abs=TWO_DIGITS)
    terms = numbers(why.page.locator(".next tbody tr td:nth-child(2)").all_inner_texts())
    [total, *_] = numbers(why.page.locator(".next tfoot tr td:nth-child(2)").all_inner_texts())
    assert sum(terms) == pytest.approx(first - second, abs=TWO_DIGITS)
    assert total == pytest.approx(first - second, abs=THREE_DIGITS)


@pytest.mark.parametrize("story", ["", "story=corpus"])
def test_what_moved_a_score_is_what_explain_says(tab: Explorer, client: httpx.Client, story: str) -> None:
    tab.open(story).why()
    tab.forget()
    opened = tab.page.locator("li:has(.detail:not([hidden]))").first.evaluate("row => ({...row.dataset})")
    post, score = opened["post"], float(opened["score"])
    tab.page.wait_for_function("() => document.querySelector('.reasons').innerText.includes('9 more events')")
    sent = tab.sent()
    viewer = {key: sent[key] for key in ("user_id", "history", "impression_ts")}
    candidates = sent.get("candidates") or [found(client, sent, post)]
    body = viewer | {"candidates": candidates, "explain": [post]}
    reply = client.post("/explain", json=body).raise_for_status().json()["candidates"][0]
    assert reply["score"] == score
    rows = tab.page.locator(".reasons tr").evaluate_all(CELLS)
    told = {row[0]: numbers([row[3]])[0] for row in rows if len(row) > 3 and row[3] not in ("", "change")}
    for name, key in (("the user", "user"), ("not covered", "not_covered"), ("all at once", "everything")):
        assert told[name] == pytest.approx(reply["change"][key]["score"], abs=THREE_DIGITS)
    changes = reply["change"]["events"]["score"]
    largest = max(range(len(changes)), key=lambda place: abs(changes[place]))
    author = NAMES["authors"][sent["history"][largest]["author_id"]]["name"]
    assert rows[2][0] == f"{largest + 1} · {author}"
    assert numbers([rows[2][3]])[0] == pytest.approx(changes[largest], abs=THREE_DIGITS)
    shares = [float(row[2].removesuffix(" %")) for row in rows if row[2].endswith("%")]
    assert sum(shares) == pytest.approx(100, abs=3), "attention on the user, the events and the post, each rounded"


def found(client: httpx.Client, sent: Json, post: str) -> Json:
    """A post of the corpus as a candidate."""
    posts: list[Json] = client.post("/retrieve", json=sent).json()["posts"]
    row = next(each for each in posts if each["post_id"] == post)
    return {key: row[key] for key in ("post_id", "author_id", "created_at")}


def test_the_map_has_what_explain_says_of_each_event_and_post(why: Explorer, explained: dict[str, Json]) -> None:
    changes = [explained[post]["change"] for post, _, _ in why.shown()]
    for place in range(len(EXAMPLE["history"])):
        row = numbers(why.page.locator(f'.heat tr[data-event="{place}"] td').all_inner_texts())
        np.testing.assert_allclose(row, [each["events"]["score"][place] for each in changes], atol=TWO_DIGITS)
    for name, title in (("user", "the user"), ("not_covered", "not covered"), ("everything", "all at once")):
        cells = why.page.locator(".heat tr", has=why.page.get_by_text(title, exact=True)).locator("td")
        told = [each[name]["score"] for each in changes]
        np.testing.assert_allclose(numbers(cells.all_inner_texts()), told, atol=TWO_DIGITS)


def test_groups_are_what_rank_says_without_all_their_events(why: Explorer, client: httpx.Client) -> None:
    """All events of one author, of one topic, and the whole history."""
    history = EXAMPLE["history"]
    topics = [NAMES["authors"][event["author_id"]]["topic"] for event in history]
    authors = [NAMES["authors"][event["author_id"]]["name"] for event in history]
    left = {"the whole history": [False] * len(history)}
    for words, keys in (("all about", topics), ("all of", authors)):
        several = [key for key, count in Counter(keys).items() if count > 1]
        left |= {f"{words} {key}": [each != key for each in keys] for key in several}
    rows = why.page.locator(".groups tbody tr").evaluate_all(CELLS)
    assert {row[0] for row in rows} == left.keys()
    top, _, whole = why.shown()[0]
    for name, _, change, *_ in rows:
        kept = [event for event, stays in zip(history, left[name], strict=True) if stays]
        without = {post: score for post, _, score in ranked(client, EXAMPLE | {"history": kept})}
        assert numbers([change])[0] == pytest.approx(whole - without[top], abs=THREE_DIGITS), name


def test_authors_with_one_name_are_groups_of_their_own(routed: Explorer, client: httpx.Client) -> None:
    authors = {author: about | {"name": "Kim Lee"} for author, about in NAMES["authors"].items()}
    routed.carry(EXAMPLE, NAMES | {"authors": authors})
    routed.open().why()
    rows = routed.page.locator(".groups tbody tr:has-text('all of Kim Lee')")
    rows.first.wait_for()
    top, _, whole = routed.shown()[0]
    counts = Counter(event["author_id"] for event in EXAMPLE["history"])
    expected = []
    for author, count in counts.items():
        if count > 1:
            kept = [event for event in EXAMPLE["history"] if event["author_id"] != author]
            without = {post: score for post, _, score in ranked(client, EXAMPLE | {"history": kept})}
            expected.append((f"{count} events", whole - without[top]))
    told = [(events, *numbers([change])) for _, events, change, *_ in rows.evaluate_all(CELLS)]
    assert [events for events, _ in told] == [events for events, _ in expected]
    np.testing.assert_allclose([each for _, each in told], [each for _, each in expected], atol=THREE_DIGITS)


def test_a_large_part_that_is_not_covered_is_said_where_it_is(tab: Explorer, explained: dict[str, Json]) -> None:
    tab.open()
    changes = {post: each["change"] for post, each in explained.items()}
    shares = {post: abs(each["not_covered"]["score"] / each["everything"]["score"]) for post, each in changes.items()}
    assert min(shares.values()) < 0.3 < max(shares.values()), "the example has both"
    for post, share in shares.items():
        tab.why(post)
        said = tab.page.locator(f'.list li[data-post="{post}"] .warning').all_inner_texts()
        assert len(said) == (share > 0.3), share
        assert not said or said[0].startswith(f"{round(100 * share)} % of what user and history do together")


def test_a_row_lights_up_what_belongs_to_it(why: Explorer) -> None:
    event, row = why.page.locator('#events [data-event="3"]'), why.page.locator('.heat tr[data-event="3"]')
    cell = why.page.locator(f'.heat td[data-post="{POSTS[2]}"]').first
    post = why.page.locator(f'.list li[data-post="{POSTS[2]}"] strong').first
    for start, end in ((row.locator("th"), event), (event.locator("strong"), row), (post, cell)):
        why.page.mouse.move(0, 0)
        assert "lit" not in (end.get_attribute("class") or "")
        start.hover()
        assert "lit" in (end.get_attribute("class") or "")


def test_attention_is_drawn_for_each_head(why: Explorer, client: httpx.Client) -> None:
    why.page.locator(".attention summary").click()
    why.page.wait_for_selector(".heads-grid")
    body = EXAMPLE | {"explain": [why.shown()[0][0]]}
    reply: Any = client.post("/explain", json=body).json()["candidates"][0]["attention"]
    heads = np.array(reply["heads"])
    read = "all => all.map(one => [...one.querySelectorAll('rect')].map(bar => Number(bar.getAttribute('height'))))"
    drawn = np.array(why.page.locator(".heads-grid svg").evaluate_all(read))
    told = np.concatenate([np.array(reply["user"])[..., None], heads, np.array(reply["itself"])[..., None]], 2)
    assert drawn.shape[0] == heads.shape[0] * heads.shape[1] == 8
    np.testing.assert_allclose(drawn / 30, told.reshape(8, -1) / told.max(), atol=1e-6)


def test_a_sweep_shows_the_ranks_that_rank_gives(tab: Explorer, client: httpx.Client) -> None:
    tab.open().page.get_by_role("button", name="Sweep the weight of report").click()
    read = "all => all.map(one => [one.dataset.post, one.getAttribute('d')])"
    lines = tab.page.locator("#sweep path").evaluate_all(read)
    assert len(lines) == len(POSTS)
    weights = client.get("/info").json()["weights"]
    for weight in (-38.0, -6.5, 33.0):
        order = [post for post, _, _ in ranked(client, EXAMPLE | {"weights": weights | {"report": weight}})]
        place = 22 + (weight + 40) / 80 * (640 - 22 - 150)
        for post, path in lines:
            points = [tuple(map(float, point.split())) for point in path.lstrip("M").split("L")]
            pieces = zip(points[::2], points[1::2], strict=True)
            rank = next((y - 12) / 22 for (x0, y), (x1, _) in pieces if x0 <= place <= x1)
            assert order[round(rank)] == post, weight


def test_reasons_that_come_during_a_comparison_reach_their_list(tab: Explorer) -> None:
    reasons: list[Any] = []
    rankings: list[Any] = []
    tab.open().page.route("**/explain", lambda route: reasons.append(route))
    tab.page.route("**/rank", lambda route: rankings.append(route))
    with tab.page.expect_request("**/explain"):
        tab.page.get_by_role("button", name="Why").first.click()
    with tab.page.expect_request("**/rank"):
        tab.page.get_by_role("button", name="Compare").click()
    with tab.page.expect_response("**/explain"):
        reasons.pop().continue_()
    tab.page.wait_for_selector(".reasons")
    tab.page.route("**/rank", lambda route: route.continue_())  # those that come from now on
    tab.settle(lambda: [each.continue_() for each in rankings])
    tab.page.unroute_all()
    assert tab.shown(0) == tab.shown(1)


BUSY: Json = {"status": 429, "code": "overloaded", "title": "Overloaded", "detail": "The key is over its rate."}


@pytest.fixture
def routed(tab: Explorer) -> Iterator[Explorer]:
    """A tab whose routes end with the test."""
    yield tab
    tab.page.unroute_all()


def test_a_refused_group_is_asked_again_alone(routed: Explorer) -> None:
    asked: list[int] = []
    allowed: list[bool] = []

    def busy(route: Any) -> None:
        asked.append(len(json.loads(route.request.post_data)["requests"]))
        reply = route.fetch().json()
        if not allowed:
            reply["results"][0] = {"error": BUSY}
        route.fulfill(json=reply)

    routed.open().page.route("**/rank/batch", busy)
    rows = routed.page.locator(".groups tbody tr")
    routed.why()
    routed.page.wait_for_selector(".groups")
    assert "NaN" not in routed.page.locator("body").inner_text()
    assert rows.count() == routed.page.locator(".heat .group").count() - 3 == asked[0] - 1
    [said] = routed.page.locator(".detail:visible p").filter(has_text="rate").all_inner_texts()
    assert said.startswith("No numbers for “all of ")
    assert said.endswith("”: The key is over its rate. Trying again.")
    allowed.append(True)
    rows.nth(asked[0] - 1).wait_for()
    assert routed.page.get_by_text("over its rate").count() == 0
    assert set(asked[1:]) == {1}


@pytest.mark.parametrize("status", [503, 0])
def test_reasons_come_after_a_refusal_or_a_lost_connection(routed: Explorer, status: int) -> None:
    asked: list[str] = []

    def away(route: Any) -> None:
        asked.append(route.request.url)
        if len(asked) > 1:
            route.continue_()
        elif status:
            route.fulfill(status=status, headers={"retry-after": "1"}, json=BUSY | {"status": status})
        else:
            route.abort()

    routed.open().page.route("**/explain", away)
    routed.why()
    assert len(asked) == 2
    assert all("503" in each or "ERR_FAILED" in each for each in routed.complaints)
    routed.complaints.clear()


def test_a_side_that_waits_longer_holds_up_no_other(routed: Explorer) -> None:
    """Of two sides, each asks again when its own Retry-After allows it."""
    asked: list[int] = []

    def busy(route: Any) -> None:
        events = len(json.loads(route.request.post_data)["history"])
        asked.append(events)
        if events == len(EXAMPLE["history"]) and asked.count(events) > 1:
            route.continue_()
        else:
            seconds = "1" if events == len(EXAMPLE["history"]) else "600"
            route.fulfill(status=503, headers={"retry-after": seconds}, json=BUSY | {"status": 503})

    routed.open().page.route("**/explain", busy)
    routed.click("Compare")
    routed.forget()
    routed.page.locator(".list").first.get_by_role("button", name="Why").first.click()
    routed.page.locator(".list").first.locator(".reasons").wait_for()
    assert Counter(asked) == {len(EXAMPLE["history"]): 2, len(EXAMPLE["history"]) - 1: 1}
    routed.refusals(503)


def test_attention_comes_after_a_refusal(routed: Explorer) -> None:
    asked: list[str] = []

    def busy(route: Any) -> None:
        if len(json.loads(route.request.post_data)["explain"]) > 1:
            asked.append("reasons")
            route.continue_()
        else:
            asked.append("attention")
            again = asked.count("attention") > 1
            route.continue_() if again else route.fulfill(status=503, headers={"retry-after": "1"}, json=BUSY)

    routed.open().why()
    routed.page.route("**/explain", busy)
    routed.page.locator(".attention summary").click()
    routed.page.wait_for_selector(".heads-grid")
    assert asked == ["reasons", "attention", "attention"], "what was got is not asked again"
    routed.page.locator(".attention summary").click()
    routed.refusals(503)


def test_the_groups_are_asked_of_the_posts_in_the_map(routed: Explorer) -> None:
    """A long list of candidates, sent once for each group, is more than a call may hold."""
    many = [EXAMPLE["candidates"][at % 7] | {"post_id": str(10**18 + at)} for at in range(40)]
    routed.open().settle(lambda: routed.paste(EXAMPLE | {"candidates": many}))
    with routed.page.expect_request("**/rank/batch") as asked:
        routed.why()
    requests = json.loads(asked.value.post_data)["requests"]
    shown = [post for post, _, _ in routed.shown()][:12]
    assert [[post["post_id"] for post in each["candidates"]] for each in requests] == [shown] * len(requests)


def test_refused_groups_leave_the_reasons(routed: Explorer) -> None:
    large = {"status": 413, "code": "too_large", "title": "Too large", "detail": "The batch is too large."}
    routed.open().page.route("**/rank/batch", lambda route: route.fulfill(status=413, json=large))
    routed.why()
    [said] = routed.page.locator(".detail:visible p").filter(has_text="too large").all_inner_texts()
    assert said.endswith("”: The batch is too large.")
    assert routed.page.locator(".heat tr[data-event]").count() == len(EXAMPLE["history"])
    routed.refusals(413)


def test_posts_with_one_id_have_reasons_of_their_own(routed: Explorer, client: httpx.Client) -> None:
    first, second, _, other, *_ = EXAMPLE["candidates"]
    candidates = [first, first | {"author_id": other["author_id"]}, second]
    routed.open().settle(lambda: routed.paste(EXAMPLE | {"candidates": candidates}))
    routed.why()
    told: dict[float, Json] = {}  # by its score
    whole: dict[float, float] = {}
    for post in candidates:
        one = EXAMPLE | {"candidates": [post]}
        [found] = client.post("/explain", json=one | {"explain": [post["post_id"]]}).json()["candidates"]
        told[found["score"]] = found["change"]
        [(_, _, without)] = ranked(client, one | {"history": []})
        whole[found["score"]] = found["score"] - without
    shown = [score for _, _, score in routed.shown()]
    assert sorted(told) == sorted(shown)
    for name, values in {
        "the user": [told[score]["user"]["score"] for score in shown],
        "all at once": [told[score]["everything"]["score"] for score in shown],
        "the whole history left out at once": [whole[score] for score in shown],
    }.items():
        row = routed.page.locator(".heat tr", has=routed.page.get_by_role("rowheader", name=name, exact=True))
        np.testing.assert_allclose(numbers(row.locator("td").all_inner_texts()), values, atol=TWO_DIGITS)
    mine, theirs = told[shown[0]], told[shown[1]]
    apart = np.subtract(mine["events"]["score"], theirs["events"]["score"])
    largest = sorted([*apart, mine["user"]["score"] - theirs["user"]["score"]], key=abs)[:-3:-1]
    rows = routed.page.locator(".next tfoot tr:has-text('largest difference') td:nth-child(2)").all_inner_texts()
    np.testing.assert_allclose(numbers(rows), largest, atol=THREE_DIGITS)
