"""One tab of the explorer in Debian's chromium (`.ci/debian chromium-headless-shell`). Not a test itself."""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from loadtest.server import DEMO

playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright")
axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="needs axe-playwright-python")
CHROMIUM = shutil.which("chromium-headless-shell") or shutil.which("chromium")
NEEDED = pytest.mark.skipif(CHROMIUM is None, reason="needs Debian's chromium: .ci/debian chromium-headless-shell")

Json = dict[str, Any]
EXAMPLE: Json = json.loads((DEMO / "example.json").read_text())
NAMES: Json = json.loads((DEMO / "names.json").read_text())
WEIGHTS: dict[str, float] = json.loads((DEMO / "manifest.json").read_text())["score_weights"]
WATCH = """addEventListener('securitypolicyviolation',
  event => console.error('CSP', event.violatedDirective, event.blockedURI))"""
# Text beside a drawn bar is judged too. Of many elements that look alike axe is shown a few.
AXE = {
    "resultTypes": ["violations"],
    "checks": {"color-contrast": {"options": {"ignorePseudo": True, "ignoreUnicode": False}}},
}
ALIKE = [
    "#events li:nth-child(n+3)",
    "#candidates li:nth-child(n+3)",
    ".reasons tr:nth-child(n+5)",
    ".list:nth-of-type(2)",
]


@contextmanager
def chromium() -> Iterator[Any]:
    """The browser, with one process for all pages."""
    words = ["--no-sandbox", "--process-per-site", "--disable-site-isolation-trials"]
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=words)
        yield browser
        browser.close()


NOTHING = "nothing is copied yet"


class Explorer:
    """One tab, everything that it complained of (`complaints`), and every address that it asked (`asked`)."""

    def __init__(self, browser: Any, url: str, **options: Any) -> None:
        granted = ["clipboard-read", "clipboard-write"]
        self.context = browser.new_context(**{"permissions": granted, "reduced_motion": "reduce"} | options)
        self.page = self.context.new_page()
        self.page.set_default_timeout(30000)
        self.url = url
        self.loads = itertools.count()
        self.complaints: list[str] = []
        self.asked: list[str] = []
        self.page.add_init_script(WATCH)
        self.page.on(
            "console", lambda said: self.complaints.append(said.text) if said.type in ("error", "warning") else None
        )
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", lambda request: self.asked.append(request.url))

    def __enter__(self) -> Explorer:
        return self

    def __exit__(self, *_: object) -> None:
        self.context.close()

    def open(self, fragment: str = "") -> Explorer:
        """Load the page anew, and wait for its ranking. Each load has a query of its own: a browser loads nothing where only what
        follows `#` differs."""
        self.page.goto(f"{self.url}/explore?{next(self.loads)}#{fragment}")
        self.page.wait_for_selector("body[data-ranked]")
        return self

    def carry(self, example: Json, names: Json) -> None:
        """Let the next load find these beside the checkpoint."""
        self.page.route("**/checkpoint.json", lambda route: route.fulfill(json={"example": example, "names": names}))

    def settle(self, act: Callable[[], Any]) -> None:
        """Do it, and wait for the ranking that follows."""
        before = self.page.evaluate("document.body.dataset.ranked")
        act()
        self.page.wait_for_function("before => document.body.dataset.ranked !== before", arg=before)

    def click(self, name: str, **options: Any) -> None:
        """Press the button with this name, and wait for the ranking that follows."""
        self.settle(lambda: self.page.get_by_role("button", name=name, **options).first.click())

    def forget(self, event: int = 0) -> None:
        """Remove an event, counted from the newest, and wait for the ranking that follows."""
        self.settle(lambda: self.page.locator("#events .remove").nth(event).click())

    def why(self, post: str | None = None) -> None:
        """Open the reasons of a post, else of the first one."""
        row = self.page.locator(f'.list li[data-post="{post}"]' if post else ".list li").first
        row.get_by_role("button", name="Why").click()
        row.locator(".reasons").wait_for()

    def paste(self, request: Json | str) -> None:
        """Put a request in the place of what stands there."""
        self.page.get_by_role("button", name="Request…").click()
        self.page.locator("#text").fill(request if isinstance(request, str) else json.dumps(request))
        self.page.locator("#use").click()

    def copied(self, button: str) -> str:
        """What a button puts on the clipboard. A link is packed first, so it comes a moment after the click."""
        self.page.evaluate("text => navigator.clipboard.writeText(text)", NOTHING)
        self.page.locator(button).click()
        while (text := str(self.page.evaluate("navigator.clipboard.readText()"))) == NOTHING:
            self.page.wait_for_timeout(10)
        return text

    # Rows out of sight are not laid out (content-visibility), and have no inner text: read their text_content.
    def shown(self, side: int = 0) -> list[tuple[str, int, float]]:
        """Post, rank and score of each row, from the top."""
        self.page.locator(".list[data-drawn]").nth(side).wait_for()
        listed = self.page.locator(".list").nth(side).locator("ol > li")
        rows = listed.evaluate_all("rows => rows.map(row => ({...row.dataset}))")
        return [(row["post"], int(row["rank"]), float(row["score"])) for row in rows]

    def sent(self) -> Json:
        """The request that stands behind the page."""
        self.page.get_by_role("button", name="Request…").click()
        body: Json = json.loads(self.page.locator("#text").input_value())
        self.page.get_by_role("button", name="Cancel").click()
        return body

    def refusals(self, status: int) -> None:
        """Take it that the browser complained of replies with this status, and of nothing else."""
        assert self.complaints
        assert all(str(status) in each for each in self.complaints)
        self.complaints.clear()

    def faults(self) -> list[Json]:
        """What axe finds wrong with the page as it is now."""
        if not self.page.evaluate("'axe' in window"):
            self.page.evaluate(axe.Axe().axe_script)
        found: list[Json] = self.page.evaluate("asked => axe.run(...asked)", [{"exclude": ALIKE}, AXE])["violations"]
        return found


def ranked(client: httpx.Client, request: Json) -> list[tuple[str, int, float]]:
    """What /rank says, as the page shows it."""
    reply = client.post("/rank", json=request).raise_for_status().json()
    found = [(str(each["post_id"]), each["rank"], each["score"]) for each in reply["candidates"]]
    return sorted(found, key=lambda each: each[1])
