"""Links to the explorer: stories, states that are shared, and links that are broken."""

from __future__ import annotations

import base64
import json
import re
import zlib
from pathlib import Path
from typing import Any

import httpx
import pytest

from app.settings import Settings
from tests.app.api.live import QUIET, Live, ready
from tests.e2e.explore.explorer import EXAMPLE, NAMES, NEEDED, Explorer, Json, ranked
from weights.synthetic.small_checkpoint import write_small_checkpoint

pytestmark = NEEDED


def packed(state: Any) -> str:
    """A state as links carry it."""
    squeezer = zlib.compressobj(wbits=-15)
    raw = squeezer.compress(json.dumps(state).encode()) + squeezer.flush()
    return base64.urlsafe_b64encode(raw).decode().rstrip("=")


def state(**fields: Any) -> Json:
    events = [{**each, "actions": dict.fromkeys(each["actions"], 1)} for each in EXAMPLE["history"]]
    return {"v": 1, "source": "rank", "sides": [{**EXAMPLE, "history": events}], "side": 0, "open": None, "onePer": False, "story": "",
            "start": EXAMPLE["impression_ts"]} | fields  # fmt: skip


def with_side(**fields: Any) -> str:
    return packed(state(sides=[{**EXAMPLE, **fields}]))


def test_the_first_story_is_an_event_to_remove(tab: Explorer, client: httpx.Client) -> None:
    tab.open()
    reported = NAMES["authors"][EXAMPLE["history"][-1]["author_id"]]["name"]
    names = tab.page.locator(".list li strong")
    assert (names.count(), names.last.text_content()) == (len(EXAMPLE["candidates"]), reported)
    tried = tab.page.locator("#events .try")
    assert "try removing this" in tried.inner_text()
    tab.settle(lambda: tried.get_by_role("button", name="Remove the event").click())
    assert names.first.text_content() == reported
    assert tab.shown() == ranked(client, EXAMPLE | {"history": EXAMPLE["history"][:-1]})
    assert tab.page.locator("#events .try, #try").count() == 0, "the story is over"


@pytest.mark.parametrize("story", ["taste", "unknown"])
def test_each_story_is_a_link_with_one_step_that_moves_the_list(
    tab: Explorer, client: httpx.Client, story: str
) -> None:
    before = tab.open(f"story={story}").shown()
    assert tab.page.locator(f'#stories a[href="#story={story}"]').get_attribute("aria-current") == "page"
    assert before == ranked(client, tab.sent())
    tab.settle(lambda: tab.page.locator("#try").click())
    assert [post for post, _, _ in tab.shown()] != [post for post, _, _ in before]
    assert re.match(r"[+−]\d\.\d\d: .* (rises|falls) \d places?, from ", tab.page.locator("#caption").inner_text())
    assert tab.page.locator("#try").count() == 0


@pytest.mark.slow
def test_a_link_restores_all_that_stands_there(tab: Explorer, browser: Any, server: Live) -> None:
    tab.open().settle(lambda: tab.page.locator('[data-action="dwell"]').fill("3"))
    tab.forget(3)
    tab.click("Compare")
    tab.settle(lambda: tab.page.locator("#user").select_option("0"))
    tab.page.locator(".list").first.get_by_role("button", name="Why").first.click()
    for side in (0, 1):  # the service explains one request at a time
        tab.page.locator(".list").nth(side).locator(".reasons").wait_for()
    link = tab.copied("#link")
    with Explorer(browser, server.url) as other:
        other.open(link.partition("#")[2])
        for side in (0, 1):
            assert other.shown(side) == tab.shown(side)
        for part in ("#viewer", "#events"):
            assert other.page.locator(part).inner_text() == tab.page.locator(part).inner_text()
        assert other.page.locator(".detail:visible").count() == tab.page.locator(".detail:visible").count() > 0
        for each in (tab, other):  # on a busy machine one may be refused an explanation for the other's, and asks again
            each.complaints[:] = [complaint for complaint in each.complaints if "429" not in complaint]
        assert other.complaints == []


@pytest.mark.slow
@pytest.mark.parametrize("reply", ["slow", "refused"])
def test_a_link_holds_edits_that_are_not_ranked(tab: Explorer, client: httpx.Client, reply: str) -> None:
    held: list[Any] = []
    refusal = {"status": 503, "headers": {"retry-after": "30"}, "json": {"title": "Not ready", "status": 503}}
    tab.open().page.route(
        "**/rank", lambda route: route.fulfill(**refusal) if reply == "refused" else held.append(route)
    )
    for _ in range(2):
        tab.page.locator("#events .remove").first.click()
        if reply == "refused":
            tab.page.locator("#problem").wait_for()
    link = tab.copied("#link")
    tab.page.wait_for_function("link => location.href === link", arg=link)  # so a page that is loaded anew has them too
    for route in held:
        route.abort()
    tab.page.unroute_all()
    assert tab.open(link.partition("#")[2]).shown() == ranked(client, EXAMPLE | {"history": EXAMPLE["history"][:-2]})
    tab.complaints.clear()


def test_a_link_copied_at_once_holds_the_last_edit(tab: Explorer, client: httpx.Client) -> None:
    tab.open().forget()
    link = tab.page.evaluate("""async () => {
        document.querySelector('#events .remove').click();
        const written = new Promise(resolve => { navigator.clipboard.writeText = async text => resolve(text); });
        document.querySelector('#link').click();
        return written;
    }""")
    assert tab.open(link.partition("#")[2]).shown() == ranked(client, EXAMPLE | {"history": EXAMPLE["history"][:-2]})


@pytest.mark.slow
def test_a_link_holds_text_ids(browser: Any, tmp_path: Path) -> None:
    write_small_checkpoint(tmp_path / "text", 0, ids="text")
    settings = Settings(port=0, checkpoint=tmp_path / "text", threads=1, logs=QUIET)
    with ready(settings) as live, Explorer(browser, live.url) as tab:
        tab.open().forget()
        shown = tab.shown()
        link = tab.copied("#link").partition("#")[2]
        assert tab.open(link).shown() == shown
        assert tab.page.locator("#notice").is_hidden()
        assert tab.complaints == []


BROKEN = {
    "cut off": (packed(state())[:80], "cut off or was changed"),
    "another version": (packed(state(v=9)), "another version of this page"),
    "another service": (packed(state(source="//elsewhere.invalid/rank")), "no valid “source”"),
    "no such side": (packed(state(side=1)), "does not hold"),
    "odd events": (with_side(history=[{"post_id": "é" * 65, "author_id": "1"}]), "an event has no valid “post_id”"),
    "no history": (with_side(history=5), "request"),
    "no such story": ("story=nowhere", "no story “nowhere”"),
    "what every object has": ("story=constructor", "no story “constructor”"),
}


@pytest.mark.parametrize("link", BROKEN)
def test_a_broken_link_says_so_and_opens_the_start(tab: Explorer, client: httpx.Client, link: str) -> None:
    fragment, said = BROKEN[link]
    tab.open(fragment)
    assert said in tab.page.locator("#notice").inner_text()
    tab.page.locator("#notice").get_by_role("button", name="Close").click()
    assert tab.page.locator("#notice").is_hidden()
    assert tab.shown() == ranked(client, EXAMPLE)


def test_a_link_of_a_comparison_opens_its_request(tab: Explorer, client: httpx.Client) -> None:
    pytest.importorskip("pyarrow")
    from weights.lab.evaluate.compare import explorer_link

    own = EXAMPLE | {"history": EXAMPLE["history"][3:]}
    tab.open(explorer_link(f"{tab.url}/explore", own).partition("#")[2])
    assert tab.page.locator("#notice").is_hidden()
    assert tab.shown() == ranked(client, own)


def test_a_link_of_an_earlier_page_still_opens(tab: Explorer, client: httpx.Client) -> None:
    """The page once compared checkpoints too, and its first links had no version. Each request is ranked by the checkpoint that serves."""
    old = state(sides=state()["sides"] * 2, versions=["1", "2"], together=True)
    tab.open(packed({key: value for key, value in old.items() if key not in ("v", "story")}))
    assert [tab.shown(side) for side in (0, 1)] == [ranked(client, EXAMPLE)] * 2
    assert tab.page.locator(".list").count() == 2
    assert tab.page.locator("#notice").is_hidden()
    tab.forget()
    link = tab.copied("#link").partition("#")[2]
    raw = zlib.decompress(base64.urlsafe_b64decode(link + "=" * (-len(link) % 4)), wbits=-15)
    assert not {"versions", "together"} & set(json.loads(raw)), "a new link leaves out what the page ignores"
