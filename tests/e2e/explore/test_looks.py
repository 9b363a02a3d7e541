"""How the explorer looks and who can use it: axe, widths, phones, keyboards, motion; and that no page loads anything from elsewhere.

With `SCREENSHOTS=docs/images` the last test writes the pictures of the documentation there.
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.app.api.live import Live
from tests.e2e.explore.explorer import EXAMPLE, NEEDED, Explorer, ranked

Image = pytest.importorskip("PIL.Image", reason="needs pillow, which matplotlib brings")
pytestmark = NEEDED

TOO_WIDE = """() => [...document.querySelectorAll('main *')]
  .filter(each => each.getBoundingClientRect().right > innerWidth + 1
    && !each.closest('.chips, .tools, .links, #heat, .detail')).map(each => each.outerHTML)"""
OVERLAPS = """() => {
  const found = [];
  const boxes = [...document.querySelectorAll('.list li .row > *, .line > *, header > *, .tools > *')]
    .filter(each => each.getClientRects().length && each.textContent && !each.matches('.lines'));
  for (const [at, one] of boxes.entries()) for (const other of boxes.slice(at + 1)) {
    if (one.parentNode !== other.parentNode) continue;
    const [a, b] = [one, other].map(each => each.getBoundingClientRect());
    const wide = Math.min(a.right, b.right) - Math.max(a.left, b.left);
    const high = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
    if (wide > 1 && high > 1) found.push([one.textContent, other.textContent]);
  }
  const cut = [...document.querySelectorAll('.list button')].filter(each => each.scrollWidth > each.clientWidth + 1);
  return [...found, ...cut.map(each => each.textContent)];
}"""
SMALL = """() => [...document.querySelectorAll('button, select, a:not(.skip), summary, input:not([type=radio], [type=checkbox])')]
  .filter(each => each.getClientRects().length).filter(each => {
    const box = each.getBoundingClientRect(); return box.width < 43.5 || box.height < 43.5 }).map(each => each.outerHTML)"""
PLANT = """() => {
  const select = document.querySelector('#user'); select.closest('label').replaceWith(select);
  document.querySelector('.soft.number').style.color = 'rgb(128 128 128 / 20%)';
}"""
ROOM = """all => all.map(one => {
  const range = document.createRange(); range.selectNodeContents(one);
  return range.getBoundingClientRect().width <= one.clientWidth })"""


@pytest.mark.slow
def test_axe_finds_nothing_in_any_state_in_either_colours(browser: Any, server: Live) -> None:
    with Explorer(browser, server.url) as tab:
        page = tab.open().page

        def everything_open() -> None:
            tab.forget()
            tab.why()
            page.locator(".attention summary").click()
            page.get_by_role("button", name="Sweep the weight of reply").click()
            page.locator("#posts > summary").click()
            tab.click("Compare")
            for part in (".reasons", ".heads-grid", ".heat", "#sweep", "#posts[open]"):
                page.wait_for_selector(part)

        def refused() -> None:
            tab.open("broken")
            page.locator('[data-weight="reply"]').fill("1e300")
            page.keyboard.press("Tab")
            for part in ("#notice", "#problem", "#try", "#events .try"):
                page.wait_for_selector(part)

        states = {
            "everything open": everything_open,
            "corpus": lambda: tab.open("story=corpus"),
            "request": lambda: page.get_by_role("button", name="Request…").click(),
            "refused": refused,
        }
        for name, reach in states.items():
            reach()
            for width, scheme in ((390, "dark"), (1440, "light")):
                page.set_viewport_size({"width": width, "height": 900})
                page.emulate_media(color_scheme=scheme)
                found = tab.faults()
                assert found == [], (name, scheme, json.dumps(found, indent=1)[:2500])


def test_axe_finds_what_is_planted(tab: Explorer) -> None:
    tab.open().page.evaluate(PLANT)
    assert {fault["id"]: len(fault["nodes"]) for fault in tab.faults()} == {"select-name": 1, "color-contrast": 1}


@pytest.mark.slow
def test_nothing_overlaps_is_cut_or_is_too_wide(browser: Any, server: Live) -> None:
    with Explorer(browser, server.url) as tab:
        tab.open()
        steps: tuple[Callable[[], Any], ...] = (lambda: None, lambda: tab.click("Compare"), tab.why)
        for step in steps:
            step()
            for width in (390, 820, 1440):
                tab.page.set_viewport_size({"width": width, "height": 900})
                assert tab.page.evaluate(OVERLAPS) == [], width
                assert tab.page.evaluate(TOO_WIDE) == [], width
        tab.open().settle(lambda: tab.paste(EXAMPLE | {"weights": {"favorite": -999.999, "click": -2000}}))
        for width in (390, 1000, 1440):
            tab.page.set_viewport_size({"width": width, "height": 900})
            fits = tab.page.locator(".list .score").evaluate_all(ROOM)
            assert fits == [True] * len(EXAMPLE["candidates"]), width


PHONE: dict[str, Any] = {"viewport": {"width": 390, "height": 844}, "has_touch": True}
BEYOND = """() => [...document.querySelectorAll('header *, nav *, .list *')].filter(one => {
    const box = one.getBoundingClientRect(); return box.width && box.right > innerWidth + 0.5 }).map(one => one.outerHTML)"""


def test_on_a_phone_the_whole_list_is_in_sight(browser: Any, server: Live) -> None:
    with Explorer(browser, server.url, **PHONE) as tab:
        tab.open().page.locator("#posts > summary").click()
        assert tab.page.evaluate(SMALL) == []
        assert tab.page.evaluate(BEYOND) == [], "every story and every button is on the screen"
        tab.open()
        last = tab.page.locator(".list li").last.bounding_box()
        assert last["y"] + last["height"] <= 844, "the post of the story is the last of seven"
        for place in ('#events [data-event="3"]', '[data-action="share"]'):
            tab.page.locator(place).evaluate("one => one.scrollIntoView({block: 'end'})")
            assert tab.page.locator("#caption").bounding_box()["y"] == 0, "what an edit did is always in sight"


def test_on_a_phone_a_sweep_comes_into_sight(browser: Any, server: Live) -> None:
    with Explorer(browser, server.url, **PHONE) as tab:
        tab.open().page.locator(".list li").first.get_by_role("button", name="Why").click()
        tab.page.get_by_role("button", name="Sweep the weight of favorite").click()
        tab.page.locator("#heat").wait_for()  # the reasons of the open row, which may come now
        box, caption = (tab.page.locator(name).bounding_box() for name in ("#sweep svg", "#caption"))
        assert caption["y"] >= 0
        assert caption["y"] + caption["height"] <= box["y"] < box["y"] + box["height"] <= 844


def test_one_post_is_this_post_and_an_old_one_has_years(tab: Explorer) -> None:
    post = EXAMPLE["candidates"][0] | {"created_at": EXAMPLE["impression_ts"] - 7761 * 86400}
    tab.open().settle(lambda: tab.paste(EXAMPLE | {"candidates": [post]}))
    assert tab.page.locator("#source label").first.inner_text() == "this post"
    assert tab.page.locator(".list .about").first.inner_text() == "21 y old"


def test_a_name_keeps_its_capitals_in_what_to_try(tab: Explorer) -> None:
    tab.open("story=unknown")
    assert tab.page.locator("#try").inner_text() == "Try it: be Aiko Garcia"


def test_it_is_used_by_keyboard_alone_and_keeps_the_focus(tab: Explorer, client: httpx.Client) -> None:
    row = tab.open().page.locator(f'.list li[data-post="{EXAMPLE["candidates"][6]["post_id"]}"]')
    like, place = row.get_by_role("button", name="Like"), "row => [...row.parentNode.children].indexOf(row)"
    like.focus()
    before = row.evaluate(place)
    tab.settle(lambda: tab.page.keyboard.press("Enter"))
    assert row.evaluate(place) < before
    assert like.evaluate("button => button === document.activeElement"), "the row has moved, and keeps the focus"
    tab.page.keyboard.press("Tab")
    assert "Report" in tab.page.evaluate("document.activeElement.ariaLabel")
    tab.page.locator("#events .remove").first.focus()
    tab.settle(lambda: tab.page.keyboard.press("Space"))
    assert tab.page.evaluate("document.activeElement.closest('#events') !== null"), "the focus goes to what follows"
    tab.page.locator("#clock").focus()
    tab.settle(lambda: tab.page.keyboard.press("ArrowRight"))
    assert tab.shown() == ranked(client, EXAMPLE | {"impression_ts": EXAMPLE["impression_ts"] + 3600})
    tab.page.wait_for_function("() => document.querySelector('#spoken').textContent.startsWith('7 posts')")


def test_moves_are_animated_unless_less_motion_is_asked_for(tab: Explorer) -> None:
    for motion in ("no-preference", "reduce"):  # the tab begins and ends with less
        tab.page.emulate_media(reduced_motion=motion)
        tab.open().forget()
        assert (tab.page.evaluate("document.getAnimations().length") > 0) == (motion == "no-preference")


def test_the_first_load_and_a_slow_answer_are_marked(browser: Any, server: Live) -> None:
    held: list[Any] = []
    with Explorer(browser, server.url) as tab:
        tab.page.route("**/rank", lambda route: held.append(route))
        tab.page.goto(f"{server.url}/explore")
        tab.page.wait_for_selector("#skeleton li")
        tab.page.wait_for_selector("#lists[aria-busy]", state="attached")
        held.pop().continue_()
        tab.page.wait_for_selector("body[data-ranked]")
        assert tab.page.locator("#skeleton, #lists[aria-busy]").count() == 0


@pytest.mark.slow
def test_the_description_of_the_api_needs_nothing_from_elsewhere(browser: Any, server: Live) -> None:
    with Explorer(browser, server.url) as tab:
        tab.page.goto(f"{server.url}/docs")
        tab.page.wait_for_selector(".opblock-summary-path")
        paths = tab.page.locator(".opblock-summary-path").evaluate_all("all => all.map(each => each.dataset.path)")
        assert {"/rank", "/recommend", "/info"} <= set(paths)
        tab.page.locator(".opblock", has_text="/livez").first.click()
        tab.page.get_by_role("button", name="Try it out").click()
        tab.page.get_by_role("button", name="Execute").click()
        tab.page.wait_for_selector(".live-responses-table")
        assert "alive" in tab.page.locator(".live-responses-table").inner_text()
        assert tab.complaints == []
        assert all(url.startswith((server.url, "data:", "about:")) for url in tab.asked)


def test_a_script_of_the_page_or_a_call_elsewhere_is_stopped(browser: Any, server: Live) -> None:
    with Explorer(browser, server.url) as tab:
        script = "Object.assign(document.createElement('script'), {textContent: 'window.ran = 1'})"
        tab.open().page.evaluate(f"document.body.append({script})")
        tab.page.evaluate("fetch('http://example.invalid/').catch(() => null)")
        assert tab.page.evaluate("window.ran") is None
        tab.page.wait_for_timeout(100)
        assert any("script-src" in said for said in tab.complaints)
        assert any("connect-src" in said for said in tab.complaints)


def picture(tab: Explorer, name: str) -> None:
    tab.page.mouse.move(0, 0)
    raw = Image.open(io.BytesIO(tab.page.screenshot()))
    few = raw.convert("RGB").quantize(256, Image.Quantize.FASTOCTREE)
    few.save(Path(os.environ["SCREENSHOTS"]) / f"{name}.png", optimize=True)


@pytest.mark.skipif("SCREENSHOTS" not in os.environ, reason="writes pictures where SCREENSHOTS says")
def test_pictures(browser: Any, server: Live) -> None:
    with Explorer(browser, server.url, viewport={"width": 1440, "height": 900}, color_scheme="light") as tab:
        tab.open().forget()
        tab.why()
        picture(tab, "explore-light")
    with Explorer(browser, server.url, viewport={"width": 1280, "height": 860}) as tab:
        picture(tab.open(), "story-1")
        tab.settle(lambda: tab.page.locator("#try").click())
        picture(tab, "story-2")
        tab.why()
        picture(tab, "story-3")
        tab.page.locator("#map").evaluate("each => each.scrollIntoView()")
        picture(tab, "story-4")
        tab.page.get_by_role("button", name="Sweep the weight of not interested").click()
        tab.page.locator("#sweep").scroll_into_view_if_needed()
        picture(tab, "story-5")
        tab.open().click("Compare")
        tab.forget()
        picture(tab, "story-6")
