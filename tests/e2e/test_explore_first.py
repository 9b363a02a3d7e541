"""What a stranger meets in the explorer: the stories, what an edit says, links that fail, undo, what a phone shows."""

from __future__ import annotations

import base64
import json
import re
import zlib
from typing import Any

import httpx
import pytest

from tests.e2e.explorer import ALIKE, EXAMPLE, LOOKS, NAMES, NEEDED, TOO_WIDE, Explorer, Json, ranked
from tests.e2e.process import ROOT, Server

pytestmark = NEEDED

REPORTED = EXAMPLE["history"][-1]["author_id"]
WITHOUT = EXAMPLE | {"history": EXAMPLE["history"][:-1]}
OVERLAPS = """() => {
  const found = [];
  const boxes = [...document.querySelectorAll('.list li .row > *, .line > *, header > *, .tools > *')]
    .filter(each => each.getClientRects().length && each.textContent && !each.matches('.lines'));
  const inside = (a, b) => a.contains(b) || b.contains(a);
  for (const [at, one] of boxes.entries()) for (const other of boxes.slice(at + 1)) {
    if (inside(one, other) || one.parentNode !== other.parentNode) continue;
    const [a, b] = [one, other].map(each => each.getBoundingClientRect());
    const wide = Math.min(a.right, b.right) - Math.max(a.left, b.left);
    const high = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
    if (wide > 1 && high > 1) found.push([one.textContent, other.textContent, wide, high]);
  }
  const cut = [...document.querySelectorAll('.list button')].filter(each => each.scrollWidth > each.clientWidth + 1);
  return [...found, ...cut.map(each => each.textContent)].slice(0, 5);
}"""
SMALL = """() => [...document.querySelectorAll('button, select, a:not(.skip), summary, input:not([type=radio], [type=checkbox])')]
  .filter(each => each.getClientRects().length).map(each => [each.outerHTML.slice(0, 80), each.getBoundingClientRect()])
  .filter(([, box]) => box.width < 43.5 || box.height < 43.5).map(([text]) => text)"""


def packed(state: Json) -> str:
    squeezer = zlib.compressobj(wbits=-15)
    raw = squeezer.compress(json.dumps(state).encode()) + squeezer.flush()
    return base64.urlsafe_b64encode(raw).decode().rstrip("=")


def state(**fields: Any) -> Json:
    request = {
        **EXAMPLE,
        "history": [{**each, "actions": dict.fromkeys(each["actions"], 1)} for each in EXAMPLE["history"]],
    }
    return {"v": 1, "source": "rank", "sides": [request], "side": 0, "versions": [], "together": False, "open": None,
            "onePer": False, "story": "", "start": EXAMPLE["impression_ts"]} | fields  # fmt: skip


def caption(tab: Explorer) -> str:
    return str(tab.page.locator("#caption").inner_text())


def test_the_sentence_of_the_readme_is_what_the_page_does(tab: Explorer, client: httpx.Client) -> None:
    """Fault 1: “Remove the report from the history, and Kaja Moreau rises from seventh place to first.”"""
    tab.open()
    marked = tab.page.locator("#events .try")
    assert "try removing this" in marked.inner_text()
    assert (len(tab.shown()), tab.page.locator(".list li").nth(6).locator("strong").inner_text()) == (7, "Kaja Moreau")
    tab.settle(lambda: marked.get_by_role("button", name="Remove the event").click())
    assert tab.page.locator(".list li").first.locator("strong").inner_text() == "Kaja Moreau"
    assert tab.shown() == ranked(client, WITHOUT)
    told = " ".join((ROOT / "README.md").read_text().split())
    assert "Remove the report from the history, and Kaja Moreau rises from seventh place to first" in told
    gained, _, happened = caption(tab).partition(": ")
    assert abs(float(gained) - 1.15) < 0.05, "bf16 differs a little from processor to processor"
    assert happened.startswith("removed the report of Kaja Moreau, and Kaja Moreau rises 6 places, from 7th to 1st")
    assert tab.page.locator(".list li").first.locator(".move, .delta").all_inner_texts() == ["▲6", gained]
    assert tab.page.locator(".lines path.up").count() == 1
    assert tab.page.locator("#events .try, #try").count() == 0, "the story is over"


@pytest.mark.parametrize(
    ("action", "done", "what"),
    [
        ("report", "reported", "the report"),
        ("block_author", "blocked", "the block"),
        ("mute_author", "muted", "the mute"),
        ("not_interested", "turned down", "“not interested”"),
    ],
)
def test_the_first_story_says_what_its_event_was(tab: Explorer, action: str, done: str, what: str) -> None:
    """As for a checkpoint with another example; the service is the real one."""
    history = [
        {**event, "actions": [action if one == "report" else one for one in event["actions"]]}
        for event in EXAMPLE["history"]
    ]
    tab.page.route(
        "**/explore/checkpoint.json",
        lambda route: route.fulfill(json={"example": EXAMPLE | {"history": history}, "names": NAMES}),
    )
    tab.open()
    tab.page.unroute("**/explore/checkpoint.json")
    told = f"has {done} an author. Remove {what}, and see what it cost that author's posts."
    assert told in tab.page.locator("#story-text").inner_text()
    assert tab.page.locator("#try").inner_text() == f"Try it: remove {what}"


@pytest.mark.parametrize("story", ["report", "taste", "unknown"])
def test_each_story_is_a_link_with_one_thing_to_try_that_moves_the_list(
    tab: Explorer, client: httpx.Client, story: str
) -> None:
    tab.open(f"/explore#story={story}")
    before = tab.shown()
    assert tab.page.locator(f'#stories a[href="#story={story}"]').get_attribute("aria-current") == "page"
    assert before == ranked(client, tab.sent())
    assert tab.page.locator(".try").count() == (2 if story == "report" else 1) - (story == "report")
    tab.settle(lambda: tab.page.locator("#try").click())
    assert [post for post, _, _ in tab.shown()] != [post for post, _, _ in before]
    assert re.match(r"[+−]\d\.\d\d: .* (rises|falls) \d places?, from ", caption(tab))
    assert tab.page.locator("#try").count() == 0


def test_an_edit_that_moves_nothing_in_sight_says_so(tab: Explorer) -> None:
    """Fault 2: three likes of jazz leave the ten best where they are."""
    tab.of_the_corpus()
    for _ in range(3):
        tab.settle(lambda: tab.page.get_by_role("button", name="jazz", exact=True).click())
        assert "iked a post about jazz" in caption(tab)
        assert re.search(r"no post moved|moved", caption(tab))
    tab.of_the_request()
    tab.settle(lambda: tab.page.locator('[data-weight="favorite"]').fill("1.0001") or tab.page.keyboard.press("Tab"))
    assert "no post moved. The largest change of a score:" in caption(tab)
    tab.settle(lambda: tab.page.get_by_role("button", name="Reset weights").click())
    tab.settle(lambda: tab.page.get_by_role("button", name="Reset weights").click())
    assert "nothing changed; every score has the same bits" in caption(tab)
    assert set(tab.page.locator(".list .delta").all_inner_texts()) == {"="}


BROKEN = {
    "truncated": (packed(state())[:80], "cut off or was changed"),
    "no base64": ("broken!", "cut off or was changed"),
    "another version": (packed(state(v=9)), "another version of this page"),
    "elsewhere": (packed(state(source="//elsewhere.invalid/rank")), "no valid “source”"),
    "side": (packed(state(side=1)), "does not hold"),
    "no request": (packed(state(sides=[{}], side=0)) , ""),
    "a list": (packed([]), "no valid “source”"),  # type: ignore[arg-type]
    "odd events": (packed(state(sides=[{**EXAMPLE, "history": [{"post_id": "x", "author_id": "1"}]}])), "an event has no valid “post_id”"),
    "odd weights": (packed(state(sides=[{**EXAMPLE, "weights": {"reply": "much"}}])), "no valid “weights”"),
    "odd order": (packed(state(sides=[{**EXAMPLE, "history": 5}])), "request"),
    "no story": ("story=nowhere", "no story “nowhere”"),
}  # fmt: skip


@pytest.mark.parametrize("link", BROKEN)
def test_a_broken_link_says_so_and_offers_the_start(tab: Explorer, client: httpx.Client, link: str) -> None:
    """Fault 8. A request without anything in it is one, of nobody about nothing: the service refuses it, and the page leads on."""
    text, said = BROKEN[link]
    if link == "no request":
        tab.page.goto("about:blank")
        tab.page.goto(f"{tab.url}/explore#{text}")
        tab.page.locator("#problem").get_by_role("button", name="Open the start").click()
        tab.page.wait_for_selector("body[data-ranked]")
        assert all("422" in each for each in tab.complaints)
        tab.complaints.clear()
    else:
        tab.open(f"/explore#{text}")
        assert said in tab.page.locator("#notice").inner_text()
        tab.page.locator("#notice").get_by_role("button", name="Close").click()
        assert tab.page.locator("#notice").is_hidden()
    assert tab.shown() == ranked(client, EXAMPLE)


def test_a_link_without_a_version_still_opens(tab: Explorer, client: httpx.Client) -> None:
    old = {key: value for key, value in state().items() if key not in ("v", "together", "story")}
    assert tab.open(f"/explore#{packed(old)}").shown() == ranked(client, EXAMPLE)
    assert tab.page.locator("#notice").is_hidden()


def test_a_refused_state_can_be_left(tab: Explorer, client: httpx.Client) -> None:
    tab.open(f"/explore#{packed(state())}")
    for way in ("Undo", "Open the start"):
        tab.page.get_by_role("button", name="Request…").click()
        tab.page.locator("#text").fill(json.dumps(EXAMPLE | {"impression_ts": -1}))
        tab.page.locator("#use").click()
        tab.page.locator("#problem").get_by_role("button", name=way).click()
        tab.page.wait_for_selector("#problem", state="hidden")
        tab.page.wait_for_function("() => !('stale' in document.body.dataset)")
        assert tab.shown() == ranked(client, EXAMPLE)
    assert all("422" in each for each in tab.complaints)
    tab.complaints.clear()


def test_undo_redo_and_the_start_by_buttons_and_keys(tab: Explorer, client: httpx.Client) -> None:
    """Fault 7."""
    tab.open()
    first = tab.shown()
    tab.settle(lambda: tab.page.locator("#events .remove").first.click())
    second = tab.shown()
    tab.settle(lambda: tab.page.locator("#user").select_option("0"))
    third = tab.shown()
    assert len({str(each) for each in (first, second, third)}) == 3
    for key, expected in (
        ("Control+z", second),
        ("Control+z", first),
        ("Control+Shift+z", second),
        ("Control+y", third),
    ):
        tab.settle(lambda key=key: tab.page.keyboard.press(key))
        assert tab.shown() == expected, key
    assert "done again (Made it nobody signed in)" in caption(tab)
    tab.settle(lambda: tab.page.locator("#undo").click())
    assert tab.shown() == second
    tab.settle(lambda: tab.page.locator("#restart").click())
    assert tab.shown() == first == ranked(client, EXAMPLE)
    tab.settle(lambda: tab.page.locator("#undo").click())
    assert tab.shown() == second, "the start can be undone too"


def test_what_stands_there_is_said_in_words(tab: Explorer) -> None:
    """Fault 10."""
    tab.open()
    assert "A model reads what a user did and orders posts for them" in tab.page.locator("header").inner_text()
    assert "video view (vqv)" in tab.page.locator("#weights").inner_text()
    assert "watched for long enough" in (tab.page.locator("#weights [title^=video]").first.get_attribute("title") or "")
    assert "probabilities, √" in tab.page.locator(".heads").inner_text()
    row = tab.of_the_corpus().page.locator(".list li").first.inner_text()
    assert "retrieved" not in row
    assert "rank" not in row
    assert "of the corpus" not in tab.page.locator("main").inner_text()


def test_times_signs_and_the_focus(tab: Explorer) -> None:
    """Fault 13."""
    tab.open()
    created = EXAMPLE["candidates"][0]["created_at"]
    hours = (created - EXAMPLE["impression_ts"]) // 3600 - 1
    tab.settle(lambda: tab.page.locator("#clock").fill(str(hours)))
    assert "written" in tab.page.locator(".list li .about").first.inner_text()
    assert not re.search(r"[-−]\d+ (min|h) old", tab.page.locator(".list").inner_text())
    clocked = tab.shown()
    lever = tab.page.locator(".lever", has=tab.page.locator('[data-action="reply"]'))
    assert "for" in (lever.get_attribute("class") or "")
    tab.settle(lambda: tab.page.locator('[data-action="reply"]').fill("-2"))
    assert "against" in (lever.get_attribute("class") or ""), "the knob turns red at once"
    changed = tab.shown()
    tab.settle(lambda: tab.page.get_by_role("button", name="Reset weights").click())
    assert tab.shown() == clocked != changed
    assert tab.page.evaluate("document.activeElement.id") == "reset"


def test_candidates_events_and_weights_are_edited_by_hand(tab: Explorer, client: httpx.Client) -> None:
    """Fault 12."""
    tab.open()
    tab.page.locator("#posts > summary").click()
    rows = tab.page.locator("#candidates li")
    tab.settle(lambda: rows.first.get_by_role("spinbutton").fill("48") or tab.page.keyboard.press("Tab"))
    posts = [dict(each) for each in EXAMPLE["candidates"]]
    posts[0]["created_at"] = EXAMPLE["impression_ts"] - 48 * 3600
    assert tab.shown() == ranked(client, EXAMPLE | {"candidates": posts})
    author = rows.nth(1).get_by_role("combobox")
    author.focus()
    tab.settle(lambda: author.select_option(REPORTED))
    posts[1]["author_id"] = REPORTED
    assert tab.shown() == ranked(client, EXAMPLE | {"candidates": posts})
    tab.settle(lambda: rows.nth(2).get_by_role("button", name="Remove").click())
    del posts[2]
    assert tab.shown() == ranked(client, EXAMPLE | {"candidates": posts})
    tab.settle(lambda: tab.page.get_by_role("button", name="Add a post").click())
    assert len(tab.shown()) == 7
    tab.open()
    tab.settle(lambda: tab.page.locator("#events .earlier").first.click())
    history = [*EXAMPLE["history"][:-2], EXAMPLE["history"][-1], EXAMPLE["history"][-2]]
    assert tab.shown() == ranked(client, EXAMPLE | {"history": history})
    tab.settle(lambda: tab.page.locator('[data-weight="reply"]').fill("-3.25") or tab.page.keyboard.press("Tab"))
    weights = client.get("/info").json()["weights"] | {"reply": -3.25}
    assert tab.shown() == ranked(client, EXAMPLE | {"history": history, "weights": weights})


@pytest.mark.parametrize("by", ["drag", "button"])
def test_the_order_of_the_posts_changes_no_score_and_the_page_shows_it(tab: Explorer, by: str) -> None:
    tab.open()
    before = {post: score for post, _, score in tab.shown()}
    tab.page.locator("#posts > summary").click()
    rows = tab.page.locator("#candidates li")
    moved = rows.nth(4).get_attribute("data-post")
    if by == "drag":
        tab.settle(lambda: rows.nth(4).locator(".grip").drag_to(rows.nth(0)))
        assert rows.first.get_attribute("data-post") == moved
    else:
        tab.settle(lambda: rows.nth(4).get_by_role("button", name="up").click())
        assert rows.nth(3).get_attribute("data-post") == moved
    assert {post: score for post, _, score in tab.shown()} == before
    assert "every score has the same bits" in caption(tab)
    assert rows.locator("code").all_inner_texts() == [
        f"{before[each]} same bits as before" for each in rows.evaluate_all("all => all.map(each => each.dataset.post)")
    ]


def test_a_service_that_is_away_leaves_a_list_that_says_it_is_old(tab: Explorer, client: httpx.Client) -> None:
    """Fault 14."""
    tab.open()
    tab.page.route("**/rank", lambda route: route.abort())
    tab.page.locator("#events .remove").first.click()
    tab.page.wait_for_selector("#problem", state="visible")
    told = tab.page.locator("#problem").inner_text()
    assert re.search(r"cannot be reached.* ranking of \d\d:\d\d:\d\d, and may be out of date. Trying again", told)
    assert tab.page.evaluate("'stale' in document.body.dataset")
    assert tab.page.locator("#lists").evaluate("each => getComputedStyle(each).filter") == "grayscale(1)"
    before = tab.page.evaluate("document.body.dataset.ranked")
    tab.page.unroute_all()
    tab.page.wait_for_function("before => document.body.dataset.ranked !== before", arg=before)
    assert tab.shown() == ranked(client, WITHOUT)
    assert not tab.page.evaluate("'stale' in document.body.dataset")
    assert tab.page.locator("#problem").is_hidden()
    assert all("ERR_FAILED" in each for each in tab.complaints)
    tab.complaints.clear()


def test_a_slow_answer_is_marked_and_the_first_load_has_a_skeleton(browser: Any, server: Server) -> None:
    tab = Explorer(browser, server.url)
    held: list[Any] = []
    tab.page.route("**/rank", lambda route: held.append(route))
    tab.page.goto(f"{server.url}/explore")
    tab.page.wait_for_selector("#skeleton li")
    tab.page.wait_for_selector("#lists[aria-busy]", state="attached")
    held.pop().continue_()
    tab.page.wait_for_selector("body[data-ranked]")
    assert tab.page.locator("#skeleton, #lists[aria-busy]").count() == 0
    tab.context.close()


def test_500_posts_are_listed_within_150_ms_of_a_click(tab: Explorer) -> None:
    measure = """async () => {
      const slider = document.querySelector('[data-action=reply]'), times = [];
      for (let step = 0; step < 5; step++) {
        const before = document.body.dataset.ranked, started = performance.now();
        slider.value = step % 2 ? 3 : -3;
        slider.dispatchEvent(new Event('input', { bubbles: true }));
        while (document.body.dataset.ranked === before) await new Promise(requestAnimationFrame);
        await new Promise(requestAnimationFrame);
        times.push(performance.now() - started);
        if (step < 4) await new Promise(done => setTimeout(done, 900));
      }
      return times;
    }"""
    tab.of_the_corpus().page.locator("#one").uncheck()
    assert len(tab.shown()) == 500
    times = tab.page.evaluate(measure)
    print("500 posts, click to list, ms:", [round(each) for each in sorted(times)])
    assert sorted(times)[2] <= 150


def test_nothing_overlaps_and_nothing_is_too_wide(browser: Any, server: Server) -> None:
    """Fault 9."""
    tab = Explorer(browser, server.url, reduced_motion="reduce").open()
    for step in ("alone", "compared", "why"):
        if step == "compared":
            tab.settle(lambda: tab.page.get_by_role("button", name="Compare").click())
            tab.settle(lambda: tab.page.locator("#events .remove").first.click())
        if step == "why":
            tab.page.get_by_role("button", name="Why").first.click()
            tab.page.wait_for_selector(".reasons")
        for width in (390, 820, 1440):
            tab.page.set_viewport_size({"width": width, "height": 900})
            assert tab.page.evaluate(OVERLAPS) == [], (step, width)
            assert tab.page.evaluate(TOO_WIDE) == [], (step, width)
    tab.context.close()


def test_on_a_phone_the_list_stays_in_sight_and_targets_are_large(browser: Any, server: Server) -> None:
    tab = Explorer(
        browser, server.url, viewport={"width": 390, "height": 844}, has_touch=True, reduced_motion="reduce"
    ).open()
    tab.page.locator("#posts > summary").click()
    assert tab.page.evaluate(SMALL) == []
    for place in ('#events [data-event="3"]', '[data-action="share"]'):
        tab.page.locator(place).scroll_into_view_if_needed()
        box = tab.page.locator("#ranking").bounding_box()
        assert (box["y"], box["height"] < 844 * 0.6) == (0, True)
    tab.settle(lambda: tab.page.locator('[data-action="share"]').fill("-3"))
    assert "eight of share" in caption(tab)
    tab.context.close()


@pytest.mark.parametrize(("width", "scheme", "rules"), [(390, "dark", LOOKS), (1440, "light", None)])
def test_axe_finds_nothing_in_any_state(browser: Any, server: Server, width: int, scheme: str, rules: Any) -> None:
    """Each kind of element is in one of these states; the first is judged whole. What a phone shows a wide page shows too."""
    tab = Explorer(
        browser, server.url, viewport={"width": width, "height": 900}, color_scheme=scheme, reduced_motion="reduce"
    )
    page = tab.open().page
    reach = {
        "edited": lambda: tab.settle(lambda: page.locator("#events .remove").first.click()),
        "compared, all open": lambda: (
            page.get_by_role("button", name="Why").first.click(), page.locator(".attention summary").click(),
            page.get_by_role("button", name="Sweep the weight of reply").click(), page.locator("#posts > summary").click(),
            tab.settle(lambda: page.get_by_role("button", name="Compare").click()),
            *map(page.wait_for_selector, (".reasons", ".heads-grid", ".heat", "#sweep", "#posts[open]")),
        ),
        "corpus": lambda: tab.of_the_corpus(),
        "request": lambda: page.get_by_role("button", name="Request…").click(),
        "a broken link, refused": lambda: (
            tab.open("/explore#broken"), page.locator('[data-weight="reply"]').fill("1e300"), page.keyboard.press("Tab"),
            *map(page.wait_for_selector, ("#notice", "#problem", "#try", "#events .try")),
        ),
    }  # fmt: skip
    for name, go in reach.items():
        go()
        found = tab.faults(rules, () if name == "edited" else ALIKE)
        assert found == [], (name, json.dumps(found, indent=1)[:2500])
    tab.context.close()


def test_names_are_those_of_the_checkpoint() -> None:
    assert NAMES["authors"][REPORTED]["name"] == "Kaja Moreau"
