"""The explorer in a real browser, on the real service with the demo: every edit shows what /rank says of the request behind it."""

from __future__ import annotations

import copy
import hashlib
import json
import re
import shlex
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from pydantic import SecretStr

from app.settings import Auth, Queue, Reload, Settings
from loadtest.server import DEMO
from tests.app.api.live import QUIET, Live, listening, ready, until
from tests.e2e.explore.explorer import EXAMPLE, NAMES, NEEDED, WEIGHTS, Explorer, Json, ranked
from tests.support.bodies import good
from tests.support.fakes import FakeEngine, Gate
from weights.synthetic.small_checkpoint import example_request, write_small_checkpoint

pytestmark = NEEDED

CANDIDATE = EXAMPLE["candidates"][0]
ACTOR, REPORTED = EXAMPLE["history"][0]["author_id"], EXAMPLE["history"][-1]["author_id"]
FRIEND = next(user for user, about in NAMES["users"].items() if about["likes"] == ["football", "history"])
ROW, OLDEST = f'.list li[data-post="{CANDIDATE["post_id"]}"]', '#events [data-event="0"]'
VIEWER = {name: EXAMPLE[name] for name in ("user_id", "history", "impression_ts")}
WITHOUT = EXAMPLE | {"history": EXAMPLE["history"][:-1]}


def with_event(author: str, post: str, *actions: str, dwell: float) -> Json:
    event = {"post_id": post, "author_id": author, "actions": list(actions), "dwell_time": dwell}
    return EXAMPLE | {"history": [*EXAMPLE["history"], event]}


def edited(actions: list[str]) -> Json:
    """The example with other actions in its oldest event."""
    changed = copy.deepcopy(EXAMPLE)
    changed["history"][0]["actions"] = actions
    return changed


CONTROLS: dict[str, tuple[Callable[[Any], Any], Json]] = {
    "remove an event": (lambda page: page.locator("#events .remove").first.click(), WITHOUT),
    "move an event": (
        lambda page: page.locator("#events .earlier").first.click(),
        EXAMPLE | {"history": [*EXAMPLE["history"][:-2], *EXAMPLE["history"][:-3:-1]]},
    ),
    "remove an action": (
        lambda page: page.locator(OLDEST).get_by_role("button", name="Remove favorite").click(),
        edited(EXAMPLE["history"][0]["actions"][1:]),
    ),
    "add an action": (
        lambda page: page.locator(OLDEST).locator("select").select_option("block_author"),
        edited([*EXAMPLE["history"][0]["actions"], "block_author"]),
    ),
    "report an author": (
        lambda page: page.locator(ROW).get_by_role("button", name="Report").click(),
        with_event(CANDIDATE["author_id"], CANDIDATE["post_id"], "report", dwell=1),
    ),
    "like a post": (
        lambda page: page.locator(ROW).get_by_role("button", name="Like").click(),
        with_event(CANDIDATE["author_id"], CANDIDATE["post_id"], "favorite", "dwell", dwell=12),
    ),
    "move the time": (
        lambda page: page.locator("#clock").fill("240"),
        EXAMPLE | {"impression_ts": EXAMPLE["impression_ts"] + 240 * 3600},
    ),
    "drag a weight": (
        lambda page: page.locator('[data-action="reply"]').fill("-2"),
        EXAMPLE | {"weights": WEIGHTS | {"reply": -4.0}},
    ),
    "write a weight": (
        lambda page: page.locator('[data-weight="reply"]').fill("-3.25") or page.keyboard.press("Tab"),
        EXAMPLE | {"weights": WEIGHTS | {"reply": -3.25}},
    ),
    "switch the user": (lambda page: page.locator("#user").select_option(FRIEND), EXAMPLE | {"user_id": FRIEND}),
    "be nobody": (lambda page: page.locator("#user").select_option("0"), EXAMPLE | {"user_id": "0"}),
}


@pytest.mark.slow
def test_every_control_changes_the_ranking_as_the_api_says(tab: Explorer, client: httpx.Client) -> None:
    first = tab.open().shown()
    assert first == ranked(client, EXAMPLE)
    for control, (act, request) in CONTROLS.items():
        tab.settle(partial(act, tab.page))
        assert tab.shown() == ranked(client, request) != first, control
        tab.settle(lambda: tab.page.locator("#restart").click())
        assert tab.shown() == first, control


def test_an_event_is_added_by_its_form(tab: Explorer, client: httpx.Client) -> None:
    author = CANDIDATE["author_id"]
    tab.open().page.locator("#author").select_option(author)
    tab.page.locator("#action").select_option("mute_author")
    tab.click("Add", exact=True)
    post = tab.sent()["history"][-1]["post_id"]
    assert tab.shown() == ranked(client, with_event(author, post, "mute_author", dwell=0))


def test_a_liked_topic_is_an_event_with_a_post_of_it(tab: Explorer, client: httpx.Client) -> None:
    tab.open().click("chess")
    event = tab.sent()["history"][-1]
    asked = {"user_id": EXAMPLE["user_id"], "k": 2000, "topics": ["chess"]}
    assert event["post_id"] in {post["post_id"] for post in client.post("/retrieve", json=asked).json()["posts"]}
    assert tab.shown() == ranked(client, EXAMPLE | {"history": [*EXAMPLE["history"], event]})


@pytest.mark.slow
def test_nobody_without_a_history_can_like_any_topic(tab: Explorer, client: httpx.Client) -> None:
    tab.open("story=unknown")
    for topic in tab.page.locator(".topic.chip").all_inner_texts():
        tab.open("story=unknown").click(topic, exact=True)
        request = tab.sent()
        (event,) = request["history"]
        assert NAMES["authors"][event["author_id"]]["topic"] == topic
        assert tab.shown() == ranked(client, request)


def test_a_made_up_post_has_the_id_of_no_other(tab: Explorer, text_tab: Explorer) -> None:
    """Authors and posts may have the same ids, as films and genres of MovieLens do."""
    names = {
        "users": {"1": {"name": "User one"}},
        "authors": {"18": {"name": "Western", "topic": "Western"}},
        "posts": {"18": {"name": "Four Rooms"}, "2": {"name": "GoldenEye"}},
        "topics": ["Western"],
    }
    for each, user in ((tab, "0"), (text_tab, "1")):
        example = {"user_id": user, "history": [], "candidates": [{"post_id": "60", "author_id": "1"}]}
        each.carry(example, names)
        assert each.open().page.locator('#user option[value="1"]').inner_text() == "User one"
        each.click("Western")
        each.page.locator("#author").select_option("18")
        each.click("Add", exact=True)
        each.page.locator("#posts > summary").click()
        each.click("Add a post")
        request = each.sent()
        made = {post["post_id"] for post in (*request["history"], request["candidates"][1])}
        assert len(made) == 3
        assert not made & {*names["posts"], "60"}
        assert {event["author_id"] for event in request["history"]} == {"18"}
        with httpx.Client(base_url=each.url) as client:
            assert each.shown() == ranked(client, request)
        each.page.unroute_all()


def test_events_beyond_the_window_are_marked_at_once(tab: Explorer, client: httpx.Client) -> None:
    window = client.get("/info").json()["architecture"]["history_length"]
    events = [EXAMPLE["history"][0] | {"post_id": str(10**18 + at)} for at in range(window + 7)]
    long = EXAMPLE | {"history": events}
    assert client.post("/rank", json=long).json()["history_dropped"] == 7
    dropped = tab.page.locator("#events .dropped")
    tab.open().settle(lambda: tab.paste(long))
    assert dropped.count() == 7
    for control, count in {"Add": 8, "Start over": 0, "Undo": 8}.items():
        tab.click(control, exact=True)
        assert dropped.count() == count, control


def test_candidates_are_edited_by_hand(tab: Explorer, client: httpx.Client) -> None:
    tab.open().page.locator("#posts > summary").click()
    rows, posts = tab.page.locator("#candidates li"), copy.deepcopy(EXAMPLE["candidates"])
    tab.settle(lambda: rows.first.get_by_role("spinbutton").fill("48") or tab.page.keyboard.press("Tab"))
    posts[0]["created_at"] = EXAMPLE["impression_ts"] - 48 * 3600
    assert tab.shown() == ranked(client, EXAMPLE | {"candidates": posts})
    author = rows.nth(1).get_by_role("combobox")
    author.focus()  # only then are all authors listed
    tab.settle(lambda: author.select_option(REPORTED))
    posts[1]["author_id"] = REPORTED
    assert tab.shown() == ranked(client, EXAMPLE | {"candidates": posts})
    tab.settle(lambda: rows.nth(2).get_by_role("button", name="Remove").click())
    del posts[2]
    assert tab.shown() == ranked(client, EXAMPLE | {"candidates": posts})
    tab.click("Add a post")
    assert len(tab.shown()) == len(EXAMPLE["candidates"])


def test_an_edited_post_is_shown_and_liked_as_it_is_now(tab: Explorer) -> None:
    tab.open().page.locator("#posts > summary").click()
    edited, row = tab.page.locator(f'#candidates [data-post="{CANDIDATE["post_id"]}"]'), tab.page.locator(ROW)
    author = edited.get_by_role("combobox")
    author.focus()
    tab.settle(lambda: author.select_option(REPORTED))
    about = NAMES["authors"][REPORTED]
    assert [row.locator(part).text_content() for part in ("strong", ".topic")] == [about["name"], about["topic"]]
    tab.settle(lambda: edited.get_by_role("spinbutton").fill("288") or tab.page.keyboard.press("Tab"))
    assert row.locator(".about").text_content() == "12 d old"
    tab.settle(lambda: row.get_by_role("button", name="Like").click())
    event = tab.sent()["history"][-1]
    assert (event["post_id"], event["author_id"]) == (CANDIDATE["post_id"], REPORTED)


def test_two_posts_of_one_id_both_have_a_row_and_reasons(tab: Explorer, client: httpx.Client) -> None:
    other = CANDIDATE | {"author_id": REPORTED}
    twice = EXAMPLE | {"candidates": [*EXAMPLE["candidates"][:2], other]}
    tab.open("story=corpus").settle(lambda: tab.paste(twice))
    assert tab.shown() == ranked(client, twice)
    assert "authors of" not in tab.page.locator("#legend").inner_text()
    names = [NAMES["authors"][post["author_id"]]["name"] for post in (CANDIDATE, other)]
    for name, order in zip(names, ([0, 1, 2], [2, 0, 1]), strict=True):
        asked = twice | {"candidates": [twice["candidates"][at] for at in order], "explain": [CANDIDATE["post_id"]]}
        (found,) = client.post("/explain", json=asked).json()["candidates"]
        row = tab.page.locator(".list li").filter(has=tab.page.get_by_text(name, exact=True)).first
        row.get_by_role("button", name="Why").click()
        change = f"{found['change']['everything']['score']:.3f}".replace("-", "−")
        row.locator(".reasons tfoot").get_by_text(change, exact=True).wait_for()


def test_the_posts_order_changes_no_score_and_the_page_says_so(tab: Explorer) -> None:
    before = {post: score for post, _, score in tab.open().shown()}
    tab.page.locator("#posts > summary").click()
    rows = tab.page.locator("#candidates li")
    moves: dict[int, Callable[[], Any]] = {
        0: lambda: rows.nth(4).locator(".grip").drag_to(rows.nth(0)),
        3: lambda: rows.nth(4).get_by_role("button", name="up").click(),
    }
    for place, move in moves.items():
        moved = rows.nth(4).get_attribute("data-post")
        tab.settle(move)
        assert rows.nth(place).get_attribute("data-post") == moved
        assert {post: score for post, _, score in tab.shown()} == before
        assert "every score has the same bits" in tab.page.locator("#caption").inner_text()


def test_an_own_request_may_be_in_any_form_that_rank_reads(tab: Explorer, client: httpx.Client) -> None:
    columns = {
        "user_id": int(EXAMPLE["user_id"]),
        "history": {"post_id": [9223372036854775809], "author_id": [int(ACTOR)], "actions": [["0", "dwell"]]},
        "candidates": {key: [int(each[key]) for each in EXAMPLE["candidates"]] for key in ("post_id", "author_id")},
    }
    tab.open().settle(lambda: tab.paste(columns | {"top_k": 2}))
    assert tab.shown() == ranked(client, columns)
    for actions in (2**18 + 1, ["favorite", "2"], {"favorite": 0.5, "18": 1}):
        event = {"post_id": "17", "author_id": ACTOR, "actions": actions}
        own = EXAMPLE | {"history": [event], "weights": {"0": 7, "report": -3}}
        tab.settle(partial(tab.paste, own))
        assert tab.shown() == ranked(client, own), actions
    assert tab.page.locator('[data-weight="favorite"]').input_value() == "7"


def test_of_an_own_request_that_explores_the_scores_are_shown(tab: Explorer, client: httpx.Client) -> None:
    explore = {"explore": {"temperature": 0.1}}
    tab.open().settle(lambda: tab.paste(WITHOUT | explore))
    assert tab.shown() == ranked(client, WITHOUT)
    tab.why()
    tab.settle(lambda: tab.paste(VIEWER | explore))
    assert tab.page.locator("#problem").is_hidden()
    assert len(tab.shown()) > len(EXAMPLE["candidates"])


REFUSED: dict[str, str | Json] = {
    "This is not a request": "{",
    "give each weight by its action": EXAMPLE | {"weights": "x-2026-09"},
    "give user_id and history instead": EXAMPLE | {"context": "2f5ddb690f8f80243917d06266bae65e"},
    "has bits beyond the 19 actions": EXAMPLE | {"history": [{"post_id": "1", "author_id": "1", "actions": 2**19}]},
}


def test_what_the_page_cannot_show_is_refused_where_it_is_pasted(tab: Explorer) -> None:
    before = tab.open().shown()
    for sentence, request in REFUSED.items():
        tab.paste(request)
        assert sentence in tab.page.get_by_role("alert").last.inner_text()
        tab.page.get_by_role("button", name="Cancel").click()
        assert tab.shown() == before, sentence


@pytest.fixture(scope="module")
def text_tab(browser: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Explorer]:
    """A tab on a checkpoint whose ids are texts. It complains of nothing."""
    path: Path = tmp_path_factory.mktemp("texts") / "text"
    write_small_checkpoint(path, 0, ids="text")
    settings = Settings(port=0, checkpoint=path, threads=1, logs=QUIET)
    with ready(settings) as live, Explorer(browser, live.url, viewport={"width": 1440, "height": 900}) as explorer:
        yield explorer
        assert explorer.complaints == []


TEXTS: Any = example_request(0, ids="text")


def test_with_text_ids_nobody_is_not_offered(text_tab: Explorer) -> None:
    text_tab.open()
    user = text_tab.page.locator("#user")
    assert user.locator("option").evaluate_all("all => all.map(each => each.value)") == [TEXTS["user_id"]]
    assert text_tab.page.locator("#stories a").all_inner_texts() == ["Not interested"]
    text_tab.open("story=unknown")
    assert "There is no story “unknown” here" in text_tab.page.locator("#notice").inner_text()
    text_tab.settle(
        lambda: text_tab.paste(TEXTS | {"user_id": "0", "candidates": [{"post_id": "p", "author_id": "0"}]})
    )
    assert user.inner_text() == "user 0"
    assert text_tab.page.locator(".list li strong").all_text_contents() == ["author 0"]


def test_text_ids_may_be_names_that_every_object_has(text_tab: Explorer) -> None:
    ids = ["constructor", "__proto__", "toString"]
    candidates = [{"post_id": each, "author_id": each} for each in ids]
    for name in ids:
        event = {"post_id": name, "author_id": name, "actions": ["favorite"]}
        own = TEXTS | {"user_id": name, "history": [event], "candidates": candidates}
        text_tab.open().settle(partial(text_tab.paste, own))
        with httpx.Client(base_url=text_tab.url) as client:
            assert text_tab.shown() == ranked(client, own)
        called = {"constructor": "…uctor", "__proto__": "…oto__", "toString": "toString"}
        assert text_tab.page.locator("#user").inner_text() == f"user {called[name]}"
        assert text_tab.page.locator("#events strong").inner_text() == f"author {called[name]}"
        authors = sorted(text_tab.page.locator(".list li strong").all_text_contents())
        assert authors == sorted(f"author {each}" for each in called.values())
    assert text_tab.complaints == []


LACKING: dict[str, Json] = {
    "user_id is missing": {name: value for name, value in TEXTS.items() if name != "user_id"},
    "author_id of candidates[1] is missing": TEXTS | {"candidates": [TEXTS["candidates"][0], {"post_id": "p"}]},
    "post_id of candidates[0] is missing": TEXTS | {"candidates": {"author_id": ["a", "b"]}},
    "author_id of history[0] is missing": TEXTS | {"history": [{"post_id": "p", "actions": ["favorite"]}]},
}


def test_a_pasted_request_without_an_id_is_refused(text_tab: Explorer) -> None:
    before = text_tab.open().shown()
    for sentence, request in LACKING.items():
        text_tab.paste(request)
        assert f"This is not a request: {sentence}" in text_tab.page.get_by_role("alert").last.inner_text()
        text_tab.page.get_by_role("button", name="Cancel").click()
        assert text_tab.shown() == before, sentence


def test_a_request_that_cannot_be_drawn_changes_nothing(tab: Explorer) -> None:
    before, sent = tab.open().shown(), tab.sent()
    told, user = tab.page.locator("#story-text").inner_text(), tab.page.locator("#user").input_value()
    for codes in (5, "x"):
        tab.paste(WITHOUT | {"user_id": "7", "candidates": [CANDIDATE | {"codes": codes}]})
        assert "This is not a request: the page cannot show it" in tab.page.get_by_role("alert").last.inner_text()
        tab.page.get_by_role("button", name="Cancel").click()
        assert (tab.shown(), tab.sent()) == (before, sent)
        assert (tab.page.locator("#story-text").inner_text(), tab.page.locator("#user").input_value()) == (told, user)
    tab.forget()
    tab.settle(lambda: tab.page.keyboard.press("Control+z"))
    assert (tab.shown(), tab.sent()) == (before, sent), "it is no step to undo"


def test_a_refusal_of_the_service_is_shown_and_can_be_left(tab: Explorer, client: httpx.Client) -> None:
    tab.open()
    for way in ("Undo", "Open the start"):
        tab.paste(EXAMPLE | {"impression_ts": -1})
        problem = tab.page.locator("#problem")
        problem.get_by_role("button", name=way).wait_for()
        assert "impression_ts" in problem.inner_text()
        problem.get_by_role("button", name=way).click()
        tab.page.wait_for_selector("#problem", state="hidden")
        tab.page.wait_for_function("() => !('stale' in document.body.dataset)")
        assert tab.shown() == ranked(client, EXAMPLE)
    tab.refusals(422)


def test_undo_and_redo_by_buttons_and_keys(tab: Explorer, client: httpx.Client) -> None:
    first = tab.open().shown()
    tab.forget()
    second = tab.shown()
    tab.settle(lambda: tab.page.locator("#user").select_option("0"))
    third = tab.shown()
    assert len({str(each) for each in (first, second, third)}) == 3
    keys = {"Control+z": second, "Control+Z": first, "Control+Shift+z": second, "Control+y": third}
    for key, expected in keys.items():
        tab.settle(partial(tab.page.keyboard.press, key.replace("Z", "z")))
        assert tab.shown() == expected, key
    tab.settle(lambda: tab.page.locator("#undo").click())
    assert tab.shown() == second
    tab.settle(lambda: tab.page.locator("#restart").click())
    assert tab.shown() == first
    tab.settle(lambda: tab.page.locator("#undo").click())
    assert tab.shown() == second, "the start can be undone too"


def test_an_edit_is_told_in_a_sentence(tab: Explorer) -> None:
    tab.open().forget()
    told = tab.page.locator("#caption").inner_text()
    gained = tab.page.locator(".list li").first.locator(".delta").text_content()
    assert told.startswith(
        f"{gained}: removed the report of Kaja Moreau, and Kaja Moreau rises 6 places, from 7th to 1st"
    )
    tab.open().settle(
        lambda: tab.page.locator('[data-weight="favorite"]').fill("1.0001") or tab.page.keyboard.press("Tab")
    )
    assert "no post moved. The largest change of a score:" in tab.page.locator("#caption").inner_text()
    for _ in range(2):
        tab.click("Reset weights")
    assert "no score changed; every score has the same bits" in tab.page.locator("#caption").inner_text()
    assert set(tab.page.locator(".list .delta").all_text_contents()) == {"="}
    [(first, *_), *_] = tab.shown()
    tab.page.locator("#posts > summary").click()
    tab.settle(
        lambda: tab.page.locator(f'#candidates [data-post="{first}"]').get_by_role("button", name="Remove").click()
    )
    assert set(tab.page.locator(".list .move").all_text_contents()) == {"▲1"}
    assert "no score changed; every score has the same bits" in tab.page.locator("#caption").inner_text()


def test_the_corpus_shows_the_best_post_of_each_author(tab: Explorer, client: httpx.Client) -> None:
    tab.open("story=corpus")
    posts = client.post("/retrieve", json=VIEWER | {"k": 500}).json()["posts"]
    authors = {post["post_id"]: post["author_id"] for post in posts}
    best: dict[str, tuple[str, int, float]] = {}
    for each in client.post("/recommend", json=VIEWER | {"k": 500}).json()["candidates"]:
        best.setdefault(authors[each["post_id"]], (each["post_id"], each["rank"], each["score"]))
    assert 5 < len(best) < 60
    assert tab.shown() == list(best.values())
    tab.page.locator("#one").uncheck()
    assert [rank for _, rank, _ in tab.shown()] == list(range(1, 501))


def test_two_requests_stand_side_by_side(tab: Explorer, client: httpx.Client) -> None:
    tab.open().click("Compare")
    tab.forget()
    assert (tab.shown(0), tab.shown(1)) == (ranked(client, EXAMPLE), ranked(client, WITHOUT))
    tab.page.get_by_text("A", exact=True).click()
    tab.page.locator("#hold").check()
    tab.settle(lambda: tab.page.locator("#user").select_option("0"))
    assert tab.shown(0) == ranked(client, EXAMPLE), "A is held"
    tab.settle(lambda: tab.page.locator("#hold").uncheck())
    assert tab.shown(0) == ranked(client, EXAMPLE | {"user_id": "0"})


@pytest.mark.parametrize("source", ["these posts", "all posts"])
def test_curl_and_python_say_what_the_page_says(tab: Explorer, source: str) -> None:
    tab.open()
    if source == "all posts":
        tab.settle(lambda: tab.page.get_by_text(source).click())
    tab.forget()
    shown = set(tab.shown())
    curl = shlex.split(tab.copied("#curl"))
    reply = json.loads(subprocess.run(curl, capture_output=True, check=True).stdout)
    assert shown <= {(each["post_id"], each["rank"], each["score"]) for each in reply["candidates"]}
    program = [sys.executable, "-c", tab.copied("#python")]
    told = subprocess.run(program, capture_output=True, check=True, text=True).stdout
    lines = [line.split() for line in told.splitlines()]
    assert shown <= {(post, int(rank), float(score)) for rank, post, score in lines}


def test_a_list_says_that_it_is_old_while_the_service_is_away(tab: Explorer, client: httpx.Client) -> None:
    tab.open().page.route("**/rank", lambda route: route.abort())
    tab.page.locator("#events .remove").first.click()
    tab.page.wait_for_selector("#problem", state="visible")
    told = tab.page.locator("#problem").inner_text()
    assert re.search(r"cannot be reached.* ranking of \d\d:\d\d:\d\d, and may be out of date. Trying again", told)
    assert tab.page.evaluate("'stale' in document.body.dataset")
    tab.settle(lambda: tab.page.unroute_all())
    assert tab.shown() == ranked(client, WITHOUT)
    assert not tab.page.evaluate("'stale' in document.body.dataset")
    assert tab.page.locator("#problem").is_hidden()
    assert all("ERR_FAILED" in each for each in tab.complaints)
    tab.complaints.clear()


def test_edits_without_a_reply_yet_are_said_together(tab: Explorer, client: httpx.Client) -> None:
    caption, events = tab.page.locator("#caption"), tab.page.locator("#events .remove")
    held: list[Any] = []
    tab.open().page.route("**/rank", lambda route: held.append(route))  # it sets an attribute of what it is given
    with tab.page.expect_request("**/rank"):
        events.first.click()  # the report
    events.last.click()
    with tab.page.expect_request("**/rank"):
        tab.settle(lambda: held[0].continue_())
    assert "emoved the report of" in caption.inner_text()
    assert "emoved event 1" not in caption.inner_text(), "this reply does not know of the second edit"
    tab.settle(lambda: held[1].continue_())
    both = re.compile(r"emoved the report of .*, then removed event 1 with ")
    assert both.search(caption.inner_text())
    tab.page.unroute_all()
    tab.forget()
    assert "then" not in caption.inner_text(), "the edits before were answered"

    problem = {"title": "Not ready", "status": 503, "code": "not_ready", "detail": "The engine is warming up."}
    tab.open().page.route(
        "**/rank", lambda route: route.fulfill(status=503, headers={"retry-after": "1"}, json=problem)
    )
    events.first.click()
    tab.page.get_by_text("The engine is warming up.").wait_for()
    with tab.page.expect_response("**/rank"):
        events.last.click()
    tab.settle(tab.page.unroute_all)
    assert both.search(caption.inner_text())
    assert tab.shown() == ranked(client, EXAMPLE | {"history": EXAMPLE["history"][1:-1]})
    tab.refusals(503)


def test_an_event_is_moved_far_by_keyboard(tab: Explorer) -> None:
    *older, newest = [event["post_id"] for event in EXAMPLE["history"]]
    tab.open().page.locator("#events .earlier").first.focus()
    for _ in range(3):
        tab.settle(lambda: tab.page.keyboard.press("Enter"))
    assert [event["post_id"] for event in tab.sent()["history"]] == [*older[:-3], newest, *older[-3:]]
    twice = EXAMPLE["history"] * 2
    tab.settle(lambda: tab.paste(EXAMPLE | {"history": twice}))
    keys = tab.page.locator("#events [data-key]").evaluate_all("all => all.map(each => each.dataset.key)")
    assert len(set(keys)) == len(keys) > 4 * len(twice), "two events with one post do not share the focus"


BUSY = {  # to the page's request: a full queue, or an engine that makes no progress
    429: (Queue(max_candidates=8, max_wait_seconds=0), "the queue is full"),
    503: (Queue(stall_seconds=0.2), "has finished no forward"),
}


@pytest.mark.slow
@pytest.mark.parametrize("status", BUSY)
def test_the_page_says_that_the_service_is_busy_and_recovers(browser: Any, status: int) -> None:
    queue, said = BUSY[status]
    gate = Gate()
    with listening(FakeEngine(before=gate), queue=queue) as live:
        url = f"http://127.0.0.1:{live.port}"
        other = threading.Thread(target=httpx.post, args=(f"{url}/rank",), kwargs={"json": good(), "timeout": 60})
        other.start()
        assert gate.entered.wait(10)
        with Explorer(browser, url) as tab:
            tab.page.goto(f"{url}/explore")
            try:
                tab.page.wait_for_function(
                    "said => document.querySelector('#problem').innerText.includes(said)", arg=said
                )
                assert tab.page.locator("#skeleton").is_visible()
                assert tab.page.locator(".list li").count() == 0
            finally:
                gate.opened.set()
                other.join()
            tab.page.wait_for_selector("body[data-ranked]")
            assert tab.page.locator("#problem").is_hidden()
            assert len(tab.shown()) > 1
            tab.refusals(status)


@pytest.mark.slow
def test_the_page_asks_again_when_retry_after_allows_it(browser: Any, server: Live, client: httpx.Client) -> None:
    problem = {"title": "Not ready", "status": 503, "code": "not_ready", "detail": "The engine is warming up."}
    asked: list[str] = []

    def busy(route: Any) -> None:
        asked.append(route.request.url)
        route.fulfill(status=503, headers={"retry-after": "30"}, json=problem)

    with Explorer(browser, server.url) as tab:
        tab.page.clock.install()
        tab.open().page.route("**/rank", busy)
        tab.page.locator("#events .remove").first.click()
        tab.page.get_by_text("The engine is warming up.").wait_for()
        assert "Trying again in 30 s." in tab.page.locator("#problem").inner_text()
        tab.page.clock.run_for(25_000)
        assert len(asked) == 1
        with tab.page.expect_response("**/rank"):
            tab.page.clock.run_for(6_000)
        with tab.page.expect_response("**/rank"):
            tab.page.locator("#user").select_option("0")  # a change is asked at once
        tab.page.unroute_all()
        tab.settle(lambda: tab.page.clock.run_for(31_000))
        assert tab.shown() == ranked(client, WITHOUT | {"user_id": "0"})
        assert len(asked) == 3
        tab.refusals(503)


def test_a_page_of_a_proxy_is_told_in_a_sentence(tab: Explorer, client: httpx.Client) -> None:
    tab.open().page.route("**/rank", lambda route: route.fulfill(content_type="text/html", body="<h1>Sign in</h1>"))
    tab.page.locator("#events .remove").first.click()
    problem = tab.page.locator("#problem")
    problem.wait_for()
    assert "The answer is not from the service" in problem.inner_text()
    assert problem.get_by_role("button").count() == 0, "undoing an edit would not help"
    tab.page.unroute_all()
    tab.page.route("**/rank", lambda route: route.fulfill(status=502, content_type="text/html", body="Bad gateway"))
    tab.page.locator("#clock").fill("240")
    problem.get_by_text("The service cannot be reached: a proxy before it answered 502.").wait_for()
    tab.refusals(502)
    tab.page.unroute_all()
    tab.settle(lambda: tab.page.locator("#undo").click())
    tab.settle(lambda: tab.page.locator("#user").select_option("0"))
    assert problem.is_hidden()
    assert tab.shown() == ranked(client, WITHOUT | {"user_id": "0"})


def test_the_skip_link_moves_the_focus_alone(tab: Explorer, client: httpx.Client) -> None:
    tab.open().forget()
    tab.page.locator(".skip").focus()
    tab.page.keyboard.press("Enter")
    tab.page.wait_for_function("() => document.activeElement.id === 'ranking-title'")
    tab.settle(lambda: tab.page.locator("#user").select_option("0"))
    assert tab.page.locator("#notice").is_hidden()
    assert tab.shown() == ranked(client, WITHOUT | {"user_id": "0"}), "the edit before is still there"


def lead(link: Path, target: Path) -> None:
    """Let the link lead there, in one step."""
    link.with_suffix(".new").symlink_to(target)
    link.with_suffix(".new").replace(link)


def serve_next(live: Live, link: Path, target: Path) -> None:
    """Let the link lead there, and wait until that checkpoint serves."""
    lead(link, target)
    digest = json.loads((target / "manifest.json").read_text())["digest"]
    until(lambda: bool(httpx.get(f"{live.url}/info").json()["checkpoint"]["digest"] == digest), 60)


def watching(link: Path) -> Settings:
    return Settings(port=0, checkpoint=link, threads=1, logs=QUIET, reload=Reload(watch_seconds=0.25))


@pytest.mark.slow
def test_another_model_is_said_and_has_its_own_names(browser: Any, tmp_path: Path) -> None:
    small, link = tmp_path / "small", tmp_path / "link"
    write_small_checkpoint(small, 0)
    (small / "names.json").write_text(json.dumps({"authors": {REPORTED: {"name": "Nina Novak"}}}))
    lead(link, DEMO)
    with ready(watching(link)) as live, Explorer(browser, live.url) as tab:
        tab.open().click("Compare")
        serve_next(live, link, small)
        tab.forget()
        assert tab.page.locator("#notice").inner_text().startswith("Another model answers now: random ")
        caption = tab.page.locator("#caption").inner_text()
        assert "emoved" not in caption, "what the model changed is not blamed on the edit"
        spoken = "told => document.querySelector('#spoken').textContent.includes(told)"
        tab.page.wait_for_function(spoken, arg=caption)
        words = tab.page.locator("body").text_content()
        assert "Nina Novak" in words
        assert not [name for name in (each["name"] for each in NAMES["authors"].values()) if name in words]
        assert "A request of your own." in tab.page.locator("#story-text").inner_text()
        with httpx.Client(base_url=live.url) as client:
            assert (tab.shown(0), tab.shown(1)) == (ranked(client, EXAMPLE), ranked(client, WITHOUT))
            tab.forget()
            assert "emoved" in tab.page.locator("#caption").inner_text(), "the same model answered twice"
            tab.settle(lambda: tab.page.locator("#restart").click())
            assert tab.shown() == ranked(client, json.loads((small / "example.json").read_text()))
        assert tab.complaints == []


@pytest.mark.slow
def test_another_model_that_explains_is_said(browser: Any, tmp_path: Path) -> None:
    small, link = tmp_path / "small", tmp_path / "link"
    write_small_checkpoint(small, 0)
    lead(link, DEMO)
    with ready(watching(link)) as live, Explorer(browser, live.url) as tab:
        tab.open()
        serve_next(live, link, small)
        tab.page.get_by_role("button", name="Why").first.click()
        tab.page.get_by_text("Another model answers now: random ").wait_for()
        tab.page.locator(".reasons").wait_for()
        with httpx.Client(base_url=live.url) as client:
            assert tab.shown() == ranked(client, EXAMPLE)
        assert tab.complaints == []


def test_a_refusal_by_another_model_leads_to_its_start(browser: Any, tmp_path: Path) -> None:
    text, link = tmp_path / "text", tmp_path / "link"
    write_small_checkpoint(text, 0, ids="text")
    lead(link, text)
    with ready(watching(link)) as live, Explorer(browser, live.url) as tab:
        tab.open()
        serve_next(live, link, DEMO)
        tab.page.locator("#events .remove").first.click()
        tab.settle(lambda: tab.page.get_by_role("button", name="Open the start").click())
        with httpx.Client(base_url=live.url) as client:
            assert tab.shown() == ranked(client, EXAMPLE)
        assert NAMES["authors"][REPORTED]["name"] in tab.page.locator(".list li strong").all_text_contents()
        tab.refusals(422)


def test_without_an_example_the_page_uses_the_models_weights(browser: Any) -> None:
    with listening() as live, Explorer(browser, f"http://127.0.0.1:{live.port}") as tab:
        info = httpx.get(f"{tab.open().url}/info").json()
        assert "weights" not in tab.sent()
        read = "all => all.map(each => [each.dataset.weight, Number(each.value)])"
        weights = dict(tab.page.locator("[data-weight]").evaluate_all(read))
        assert weights == {name: info["weights"].get(name, 0) for name in info["actions"]}
        assert "carries no example" in tab.page.locator("#story-text").inner_text()
        assert tab.complaints == []


@pytest.mark.slow
def test_the_page_asks_for_a_key_and_keeps_it_out_of_its_address(browser: Any) -> None:
    auth = Auth(keys={"me": SecretStr(hashlib.sha256(b"open sesame").hexdigest())})
    with listening(auth=auth) as live, Explorer(browser, f"http://127.0.0.1:{live.port}") as tab:
        tab.page.goto(f"{tab.url}/explore")
        tab.page.locator("#key").fill("open\u2011sesame")
        tab.page.get_by_role("button", name="Use it").click()
        assert "Copy it again" in tab.page.locator("#request").get_by_role("alert").inner_text()
        tab.page.locator("#key").fill("open sesame")
        tab.click("Use it")
        assert len(tab.shown()) > 1
        assert "sesame" not in tab.page.url
        tab.refusals(401)
