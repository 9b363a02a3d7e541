"""The pages in a real browser, on the real service with the demo: what they show is what the API says.

Needs Debian's chromium (`.ci/debian chromium-headless-shell`). With `SCREENSHOTS=docs/images` the test of pictures writes them there.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import shlex
import statistics
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from app.settings import Auth, Queue, Settings
from tests.app.fakes import FakeEngine, Gate
from tests.app.serving import good, listening, port_of
from tests.e2e.explorer import EXAMPLE, NAMES, NEEDED, Explorer, Json, ranked
from tests.e2e.process import DEMO, Server
from weights.evaluate.compare import explorer_link

Image = pytest.importorskip("PIL.Image", reason="needs pillow, which matplotlib brings")
pytestmark = NEEDED

PLANT = """() => {
  const select = document.querySelector('#user'); select.closest('label').replaceWith(select);
  document.querySelector('.soft.number').style.color = 'rgb(128 128 128 / 20%)';
}"""
SIZES = {"light": (1440, 900), "dark": (1440, 900), "phone": (390, 844)}


def changed(**fields: Any) -> Json:
    copy: Json = json.loads(json.dumps(EXAMPLE))
    return copy | fields


def without_event(place: int) -> Json:
    history = list(EXAMPLE["history"])
    del history[place]
    return changed(history=history)


def with_event(author: str, post: str, *actions: str, dwell: float) -> Json:
    event = {"post_id": post, "author_id": author, "actions": list(actions), "dwell_time": dwell}
    return changed(history=[*EXAMPLE["history"], event])


def edited(place: int, actions: list[str]) -> Json:
    copy = changed()
    copy["history"][place]["actions"] = actions
    return copy


WEIGHTS: dict[str, float] = json.loads((DEMO / "manifest.json").read_text())["score_weights"]
CANDIDATE = EXAMPLE["candidates"][0]
FRIEND = next(user for user, about in NAMES["users"].items() if about["likes"] == ["football", "history"])
ACTOR = EXAMPLE["history"][0]["author_id"]
ROW = f'.list li[data-post="{CANDIDATE["post_id"]}"]'
OLDEST = '#events [data-event="0"]'

CONTROLS: dict[str, tuple[Callable[[Any], Any], Json]] = {
    "remove the report": (lambda page: page.locator("#events .remove").first.click(), without_event(-1)),
    "remove an action": (
        lambda page: page.locator(OLDEST).get_by_role("button", name="Remove favorite").click(),
        edited(0, EXAMPLE["history"][0]["actions"][1:]),
    ),
    "add an action": (
        lambda page: page.locator(OLDEST).locator("select").select_option("block_author"),
        edited(0, [*EXAMPLE["history"][0]["actions"], "block_author"]),
    ),
    "report an author": (
        lambda page: page.locator(ROW).get_by_role("button", name="Report").click(),
        with_event(CANDIDATE["author_id"], CANDIDATE["post_id"], "report", dwell=1),
    ),
    "like a post": (
        lambda page: page.locator(ROW).get_by_role("button", name="Like").click(),
        with_event(CANDIDATE["author_id"], CANDIDATE["post_id"], "favorite", "dwell", dwell=12),
    ),
    "drag the time": (
        lambda page: page.locator("#clock").fill("240"),
        changed(impression_ts=EXAMPLE["impression_ts"] + 240 * 3600),
    ),
    "change a weight": (
        lambda page: page.locator('[data-action="reply"]').fill("-2"),
        changed(weights=WEIGHTS | {"reply": -4.0}),
    ),
    "switch the user": (lambda page: page.locator("#user").select_option(FRIEND), changed(user_id=FRIEND)),
    "be nobody": (lambda page: page.locator("#user").select_option("0"), changed(user_id="0")),
}


def test_every_control_changes_the_ranking_as_the_api_says(tab: Explorer, client: httpx.Client) -> None:
    first = tab.of_the_request().shown()
    assert first == ranked(client, EXAMPLE)
    for control, (act, request) in CONTROLS.items():
        tab.settle(lambda act=act: act(tab.page))
        assert tab.shown() == ranked(client, request) != first, control
        tab.settle(lambda: tab.page.locator("#restart").click())
        assert tab.shown() == first, control


def test_an_event_is_added_by_its_form(tab: Explorer, client: httpx.Client) -> None:
    author = CANDIDATE["author_id"]
    tab.of_the_request().page.locator("#author").select_option(author)
    tab.page.locator("#action").select_option("mute_author")
    tab.settle(lambda: tab.page.get_by_role("button", name="Add", exact=True).click())
    post = tab.sent()["history"][-1]["post_id"]
    assert tab.shown() == ranked(client, with_event(author, post, "mute_author", dwell=0))


def test_a_liked_topic_is_an_event_with_a_post_of_it(tab: Explorer, client: httpx.Client) -> None:
    tab.of_the_request()
    tab.settle(lambda: tab.page.get_by_role("button", name="chess").click())
    event = tab.sent()["history"][-1]
    of_it = client.post("/retrieve", json={"user_id": EXAMPLE["user_id"], "k": 2000, "topics": ["chess"]}).json()[
        "posts"
    ]
    assert event["post_id"] in {post["post_id"] for post in of_it}
    assert tab.shown() == ranked(client, changed(history=[*EXAMPLE["history"], event]))


def test_a_request_of_ones_own_in_arrays_and_with_long_numbers(tab: Explorer, client: httpx.Client) -> None:
    own = {
        "user_id": int(EXAMPLE["user_id"]),
        "history": {"post_id": [9223372036854775809], "author_id": [int(ACTOR)], "actions": [["0", "dwell"]]},
        "candidates": {key: [int(each[key]) for each in EXAMPLE["candidates"]] for key in ("post_id", "author_id")},
        "top_k": 2,
    }
    tab.open().page.get_by_role("button", name="Request…").click()
    tab.page.locator("#text").fill(json.dumps(own))
    tab.settle(lambda: tab.page.locator("#use").click())
    whole = {key: value for key, value in own.items() if key != "top_k"}
    assert tab.shown() == [(str(post), rank, score) for post, rank, score in ranked(client, whole)]
    tab.page.get_by_role("button", name="Request…").click()
    tab.page.locator("#text").fill("{")
    tab.page.locator("#use").click()
    assert "no request" in tab.page.get_by_role("alert").last.inner_text()


def use(tab: Explorer, request: Json) -> None:
    tab.page.get_by_role("button", name="Request…").click()
    tab.page.locator("#text").fill(json.dumps(request))
    tab.page.locator("#use").click()


@pytest.mark.parametrize("columns", [False, True])
def test_an_event_has_the_actions_that_rank_reads(tab: Explorer, client: httpx.Client, columns: bool) -> None:
    tab.open()
    for weight, actions in enumerate((0, 5, 2**18 + 1, ["favorite", "2"], {"favorite": 0.5, "18": 1}, []), 2):
        event = {"post_id": "17", "author_id": ACTOR, "actions": actions}
        own = EXAMPLE | {"history": {key: [value] for key, value in event.items()} if columns else [event]}
        own |= {"weights": {"0": weight, "report": -3}, "score": "offset"}
        tab.settle(lambda own=own: use(tab, own))
        assert tab.shown() == ranked(client, {key: value for key, value in own.items() if key != "score"}), actions
        assert tab.page.locator('[data-weight="favorite"]').input_value() == str(weight)


REFUSED: dict[str, Json] = {
    "give each weight by its action": {"weights": "x-2026-09"},
    "give user_id and history in its place": {"context": "2f5ddb690f8f80243917d06266bae65e"},
    "has bits beyond the 19 actions": {"history": [{"post_id": "1", "author_id": "1", "actions": 2**19}]},
}


def test_what_the_page_cannot_show_is_refused_where_it_is_pasted(tab: Explorer) -> None:
    tab.of_the_request()
    before = tab.shown()
    for sentence, changes in REFUSED.items():
        use(tab, EXAMPLE | changes)
        assert sentence in tab.page.get_by_role("alert").last.inner_text()
        tab.page.get_by_role("button", name="Cancel").click()
        assert tab.shown() == before, sentence


@pytest.mark.parametrize("width", [1440, 1000, 390])
def test_a_long_score_is_whole(tab: Explorer, width: int) -> None:
    tab.page.set_viewport_size({"width": width, "height": 900})
    tab.open()
    tab.settle(lambda: use(tab, EXAMPLE | {"weights": {"favorite": -999.999, "click": -2000}}))
    ranges = """all => all.map(one => {
      const range = document.createRange(); range.selectNodeContents(one);
      return [one.clientWidth, range.getBoundingClientRect().width] })"""
    sizes = tab.page.locator(".list .score").evaluate_all(ranges)
    tab.page.set_viewport_size({"width": 1440, "height": 900})
    assert len(sizes) == len(EXAMPLE["candidates"])
    assert all(taken <= room for room, taken in sizes), sizes


def test_a_refusal_is_shown_until_a_request_is_served(tab: Explorer) -> None:
    tab.of_the_request()
    for request, refused in ((changed(impression_ts=-1), True), (EXAMPLE, False)):
        tab.page.get_by_role("button", name="Request…").click()
        tab.page.locator("#text").fill(json.dumps(request))
        tab.page.locator("#use").click()
        tab.page.wait_for_selector("#problem", state="visible" if refused else "hidden")
    assert "impression_ts" in (tab.page.locator("#problem").text_content() or "")
    assert len(tab.complaints) == 1
    assert "422" in tab.complaints.pop()  # the browser's own line for the reply


def test_the_corpus_shows_the_best_of_each_author(tab: Explorer, client: httpx.Client) -> None:
    tab.of_the_corpus()
    asked = {key: EXAMPLE[key] for key in ("user_id", "history", "impression_ts")} | {"k": 500}
    authors = {post["post_id"]: post["author_id"] for post in client.post("/retrieve", json=asked).json()["posts"]}
    best: dict[str, tuple[str, int, float]] = {}
    for each in client.post("/recommend", json=asked).json()["candidates"]:
        best.setdefault(authors[each["post_id"]], (each["post_id"], each["rank"], each["score"]))
    assert 5 < len(best) < 60
    assert tab.shown() == list(best.values())
    tab.page.locator("#one").uncheck()
    assert [rank for _, rank, _ in tab.shown()] == list(range(1, 501))


def test_the_link_restores_the_state(tab: Explorer, browser: Any, server: Server) -> None:
    tab.of_the_request()
    tab.settle(lambda: tab.page.locator('[data-action="dwell"]').fill("3"))
    tab.settle(lambda: tab.page.locator("#events .remove").nth(3).click())
    tab.settle(lambda: tab.page.get_by_role("button", name="Compare").click())
    tab.settle(lambda: tab.page.locator("#user").select_option(FRIEND))
    tab.page.locator(".list").first.get_by_role("button", name="Why").first.click()
    tab.page.wait_for_timeout(300)  # the link follows 120 ms after
    tab.page.locator("#link").click()
    link = tab.page.evaluate("navigator.clipboard.readText()")
    other = Explorer(browser, server.url)
    other.open(link.removeprefix(server.url))
    for side in (0, 1):
        assert other.shown(side) == tab.shown(side)
    assert other.page.locator("#viewer").inner_text() == tab.page.locator("#viewer").inner_text()
    assert other.page.locator("#events").inner_text() == tab.page.locator("#events").inner_text()
    assert other.page.locator(".detail:visible").count() == tab.page.locator(".detail:visible").count() > 0
    assert other.complaints == []
    other.context.close()


def test_two_requests_stand_side_by_side(tab: Explorer, client: httpx.Client) -> None:
    tab.of_the_request()
    tab.settle(lambda: tab.page.get_by_role("button", name="Compare").click())
    tab.settle(lambda: tab.page.locator("#events .remove").first.click())
    assert (tab.shown(0), tab.shown(1)) == (ranked(client, EXAMPLE), ranked(client, without_event(-1)))
    tab.page.get_by_text("A", exact=True).click()
    tab.page.locator("#hold").check()
    tab.settle(lambda: tab.page.locator("#user").select_option("0"))
    assert tab.shown(0) == ranked(client, EXAMPLE), "A is held"
    tab.settle(lambda: tab.page.locator("#hold").uncheck())
    assert tab.shown(0) == ranked(client, changed(user_id="0"))


def test_reasons_that_come_while_a_comparison_begins_find_its_list(tab: Explorer) -> None:
    tab.of_the_request()
    reasons: list[Any] = []
    rankings: list[Any] = []
    tab.page.route("**/explain", lambda route: reasons.append(route))
    tab.page.route("**/rank", lambda route: rankings.append(route))
    with tab.page.expect_request("**/explain"):
        tab.page.get_by_role("button", name="Why").first.click()
    with tab.page.expect_request("**/rank"):
        tab.page.get_by_role("button", name="Compare").click()
    with tab.page.expect_response("**/explain"):
        reasons.pop().continue_()
    tab.page.wait_for_selector(".reasons")
    tab.page.route("**/rank", lambda route: route.continue_())  # what comes from now on
    tab.settle(lambda: [each.continue_() for each in rankings])
    tab.page.unroute_all()
    assert tab.shown(0) == tab.shown(1)
    assert tab.complaints == []


@pytest.mark.parametrize("source", ["these posts", "all posts"])
def test_curl_and_python_say_what_the_page_says(tab: Explorer, source: str) -> None:
    tab.of_the_request()
    if source == "all posts":
        tab.settle(lambda: tab.page.get_by_text(source).click())
    tab.settle(lambda: tab.page.locator("#events .remove").first.click())
    shown = {(post, rank, score) for post, rank, score in tab.shown()}
    tab.page.locator("#curl").click()
    curl = tab.page.evaluate("navigator.clipboard.readText()")
    reply = json.loads(subprocess.run(shlex.split(curl), capture_output=True, check=True).stdout)
    assert shown <= {(each["post_id"], each["rank"], each["score"]) for each in reply["candidates"]}
    tab.page.locator("#python").click()
    program = tab.page.evaluate("navigator.clipboard.readText()")
    told = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True, text=True).stdout
    lines = [line.split() for line in told.splitlines()]
    assert shown <= {(post, int(rank), float(score)) for rank, post, score in lines}


def test_the_terms_of_a_score_add_up_to_it(tab: Explorer) -> None:
    tab.of_the_request().page.get_by_role("button", name="Why").first.click()
    cells = tab.page.locator(".detail:visible .terms tbody tr td:nth-child(4)").all_inner_texts()
    terms = [float(text.replace("−", "-")) for text in cells]
    assert len(terms) == 8
    assert sum(terms) == pytest.approx(tab.shown()[0][2], abs=0.005)


@pytest.mark.parametrize("source", ["these posts", "all posts"])
def test_what_moved_a_score_is_what_explain_says(tab: Explorer, client: httpx.Client, source: str) -> None:
    tab.of_the_request() if source == "these posts" else tab.of_the_corpus()
    tab.page.get_by_role("button", name="Why").first.click()
    tab.page.wait_for_selector(".reasons")
    tab.settle(lambda: tab.page.locator("#events .remove").first.click())
    opened = tab.page.locator("li:has(.detail:not([hidden]))").first.evaluate("row => ({...row.dataset})")
    post, score = opened["post"], float(opened["score"])
    tab.page.wait_for_function("() => document.querySelector('.reasons').innerText.includes('9 more events')")
    sent = tab.sent()
    rest = {key: sent[key] for key in ("user_id", "history", "impression_ts")}
    candidates = sent.get("candidates") or [found_post(client, sent, post)]
    reply = client.post("/explain", json=rest | {"candidates": candidates, "explain": [post]}).json()["candidates"][0]
    assert reply["score"] == score
    rows = tab.page.locator(".reasons tr").evaluate_all(
        "rows => rows.map(row => [...row.cells].map(cell => cell.innerText))"
    )
    told = {row[0]: float(row[3].replace("−", "-")) for row in rows if len(row) > 3 and row[3] not in ("", "change")}
    change = reply["change"]
    assert told["the user"] == pytest.approx(change["user"]["score"], abs=6e-4)
    assert told["not covered"] == pytest.approx(change["not_covered"]["score"], abs=6e-4)
    assert told["all at once"] == pytest.approx(change["everything"]["score"], abs=6e-4)
    largest = max(range(16), key=lambda place: abs(change["events"]["score"][place]))
    name = NAMES["authors"][sent["history"][largest]["author_id"]]["name"]
    assert [f"{largest + 1} · {name}", f"{change['events']['score'][largest]:.3f}".replace("-", "−")] == [
        rows[2][0],
        rows[2][3],
    ]
    shares = [float(row[2].removesuffix(" %")) for row in rows if row[2].endswith("%")]
    assert sum(shares) == pytest.approx(100, abs=3), "attention on the user, the events and the post, each rounded"


def found_post(client: httpx.Client, sent: Json, post: str) -> Json:
    """A post of the corpus as a candidate."""
    posts = client.post("/retrieve", json=sent).json()["posts"]
    return next(
        {key: each[key] for key in ("post_id", "author_id", "created_at")} for each in posts if each["post_id"] == post
    )


def test_a_checkpoint_without_names_behind_a_key(browser: Any) -> None:
    """Around a fake engine: the page begins with the example of the API's description, and asks for the key."""
    keys = {"me": hashlib.sha256(b"open sesame").hexdigest()}
    with listening(settings=Settings(port=0, auth=Auth(keys=keys))) as server:
        tab = Explorer(browser, f"http://127.0.0.1:{port_of(server)}")
        tab.page.goto(f"{tab.url}/explore")
        tab.page.locator("#key").fill("open sesame")
        tab.settle(lambda: tab.page.get_by_role("button", name="Use it").click())
        assert {"90", "9223372036854775808"} < {post for post, _, _ in tab.shown()}
        assert "author 7" in tab.page.locator(".posts").inner_text()
        assert all("401" in said for said in tab.complaints)
        assert "sesame" not in tab.page.url
        tab.context.close()


def test_a_link_to_versions_that_are_not_held_opens_without_them(tab: Explorer, client: httpx.Client) -> None:
    tab.open(explorer_link("/explore", EXAMPLE, ["1", "elsewhere"]))
    assert tab.page.locator(".list").count() == 1
    assert tab.shown() == ranked(client, EXAMPLE)


BUSY = {  # what the engine that does not answer is to the page's request: a full queue, or an engine that is stuck
    429: (Queue(max_candidates=8, max_wait_seconds=0), "the queue is full"),
    503: (Queue(stall_seconds=0.2), "has finished no forward"),
}


@pytest.mark.parametrize("status", BUSY)
def test_the_page_says_that_the_service_is_busy_and_recovers(browser: Any, status: int) -> None:
    queue, said = BUSY[status]
    gate = Gate()
    with listening(FakeEngine(before=gate), Settings(port=0, queue=queue)) as server:
        url = f"http://127.0.0.1:{port_of(server)}"
        other = threading.Thread(target=httpx.post, args=(f"{url}/rank",), kwargs={"json": good(), "timeout": 30})
        other.start()
        assert gate.entered.wait(10)
        tab = Explorer(browser, url)
        tab.page.goto(f"{url}/explore")
        try:
            tab.page.wait_for_function("said => document.querySelector('#problem').innerText.includes(said)", arg=said)
            assert tab.page.locator("#problem").is_visible()
            assert tab.page.locator(".list li").count() == 0
            assert tab.page.locator("#skeleton").is_visible()
        finally:
            gate.opened.set()
            other.join()
        tab.page.wait_for_selector("body[data-ranked]", timeout=10_000)
        assert tab.page.locator("#problem").is_hidden()
        assert len(tab.shown()) == 8
        assert tab.complaints
        assert all(str(status) in complaint for complaint in tab.complaints)
        tab.context.close()


def test_it_is_used_by_keyboard_alone_and_keeps_its_place(tab: Explorer, client: httpx.Client) -> None:
    tab.of_the_request()
    row = tab.page.locator(f'.list li[data-post="{EXAMPLE["candidates"][6]["post_id"]}"]')
    like, place = row.get_by_role("button", name="Like"), "row => [...row.parentNode.children].indexOf(row)"
    like.focus()
    before = row.evaluate(place)
    tab.settle(lambda: tab.page.keyboard.press("Enter"))
    assert row.evaluate(place) < before
    assert like.evaluate("button => button === document.activeElement"), "the row has moved, and keeps the focus"
    tab.page.keyboard.press("Tab")
    assert "Report" in tab.page.evaluate("document.activeElement.ariaLabel")
    remove = tab.page.locator("#events .remove").first
    remove.focus()
    tab.settle(lambda: tab.page.keyboard.press("Space"))
    assert tab.page.evaluate("document.activeElement.closest('#events') !== null"), "the focus goes to what follows"
    tab.page.locator("#clock").focus()
    tab.settle(lambda: tab.page.keyboard.press("ArrowRight"))
    assert tab.shown() == ranked(client, changed(impression_ts=EXAMPLE["impression_ts"] + 3600))
    tab.page.wait_for_function("() => document.querySelector('#spoken').textContent.startsWith('7 posts')")


def test_moves_are_animated_unless_less_motion_is_asked_for(tab: Explorer) -> None:
    for motion in ("no-preference", "reduce"):  # the tab begins and ends with less
        tab.page.emulate_media(reduced_motion=motion)
        tab.of_the_request()
        tab.settle(lambda: tab.page.locator("#events .remove").first.click())
        moving = tab.page.evaluate("document.getAnimations().length")
        assert (moving > 0) == (motion == "no-preference")


def test_a_change_is_ranked_and_shown_within_100_ms(tab: Explorer) -> None:
    measure = """async () => {
      const slider = document.querySelector('[data-action=reply]'), times = [];
      for (let step = 0; step < 11; step++) {
        const before = document.body.dataset.ranked, started = performance.now();
        slider.value = step % 2 ? 3 : -3;
        slider.dispatchEvent(new Event('input', { bubbles: true }));
        while (document.body.dataset.ranked === before) await new Promise(requestAnimationFrame);
        times.push(performance.now() - started);
      }
      return times;
    }"""
    times = tab.of_the_request().page.evaluate(measure)
    assert statistics.median(times) < 100, times


def test_axe_finds_what_is_planted(tab: Explorer) -> None:
    tab.open().page.evaluate(PLANT)
    assert {fault["id"]: len(fault["nodes"]) for fault in tab.faults()} == {"select-name": 1, "color-contrast": 1}


def test_the_description_of_the_api_needs_nothing_from_elsewhere(browser: Any, server: Server) -> None:
    tab = Explorer(browser, server.url).open("/docs")
    tab.page.wait_for_selector(".opblock-summary-path")
    paths = tab.page.locator(".opblock-summary-path").evaluate_all("found => found.map(each => each.dataset.path)")
    assert {"/rank", "/recommend", "/info"} <= set(paths)
    tab.page.locator(".opblock", has_text="/livez").first.click()
    tab.page.get_by_role("button", name="Try it out").click()
    tab.page.get_by_role("button", name="Execute").click()
    tab.page.wait_for_selector(".live-responses-table")
    assert "alive" in tab.page.locator(".live-responses-table").inner_text()
    assert tab.complaints == []
    assert all(url.startswith((server.url, "data:", "about:")) for url in tab.asked)
    tab.context.close()


def test_what_breaks_the_policy_is_seen(browser: Any, server: Server) -> None:
    tab = Explorer(browser, server.url).open()
    tab.page.evaluate(
        "document.body.append(Object.assign(document.createElement('script'), {textContent: 'window.ran = 1'}))"
    )
    tab.page.evaluate("fetch('http://example.invalid/').catch(() => null)")
    assert tab.page.evaluate("window.ran") is None
    tab.page.wait_for_timeout(100)
    assert any("script-src" in said for said in tab.complaints)
    assert any("connect-src" in said for said in tab.complaints)
    tab.context.close()


def picture(tab: Explorer, name: str) -> None:
    """Write what the tab shows to the folder SCREENSHOTS."""
    tab.page.mouse.move(0, 0)
    raw = Image.open(io.BytesIO(tab.page.screenshot()))
    few = raw.convert("RGB").quantize(256, Image.Quantize.FASTOCTREE)
    few.save(Path(os.environ["SCREENSHOTS"]) / f"{name}.png", optimize=True)


@pytest.mark.skipif("SCREENSHOTS" not in os.environ, reason="writes pictures where SCREENSHOTS says")
@pytest.mark.parametrize("look", SIZES)
def test_pictures(browser: Any, server: Server, look: str) -> None:
    width, height = SIZES[look]
    scheme = "dark" if look == "dark" else "light"
    tab = Explorer(
        browser, server.url, viewport={"width": width, "height": height}, color_scheme=scheme, reduced_motion="reduce"
    )
    tab.of_the_request()
    tab.settle(lambda: tab.page.locator("#events .remove").first.click())
    tab.page.get_by_role("button", name="Why").first.click()
    tab.page.wait_for_selector(".reasons")
    picture(tab, f"explore-{look}")
    tab.context.close()


@pytest.mark.skipif("SCREENSHOTS" not in os.environ, reason="writes pictures where SCREENSHOTS says")
def test_the_film_of_the_first_story(browser: Any, server: Server) -> None:
    tab = Explorer(browser, server.url, viewport={"width": 1280, "height": 860}, reduced_motion="reduce").open()
    picture(tab, "story-1")
    tab.settle(lambda: tab.page.locator("#try").click())
    picture(tab, "story-2")
    tab.page.get_by_role("button", name="Why").first.click()
    tab.page.wait_for_selector(".reasons")
    picture(tab, "story-3")
    tab.page.locator("#map").evaluate("each => each.scrollIntoView()")
    picture(tab, "story-4")
    tab.page.get_by_role("button", name="Why").first.click()
    tab.page.get_by_role("button", name="Sweep the weight of not interested").click()
    tab.page.locator("#sweep").scroll_into_view_if_needed()
    picture(tab, "story-5")
    tab.open()
    tab.settle(lambda: tab.page.get_by_role("button", name="Compare").click())
    tab.settle(lambda: tab.page.locator("#events .remove").first.click())
    picture(tab, "story-6")
    tab.context.close()
