"""One tab of the explorer in Debian's chromium, on the real service with the demo. Not a test itself."""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Callable, Sequence
from typing import Any

import httpx
import pytest

from tests.e2e.process import DEMO

api = pytest.importorskip("playwright.sync_api", reason="needs playwright")
axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="needs axe-playwright-python")
# The first takes half of the processor time.
CHROMIUM = shutil.which("chromium-headless-shell") or shutil.which("chromium")
NEEDED = pytest.mark.skipif(CHROMIUM is None, reason="needs Debian's chromium: .ci/debian chromium-headless-shell")
ONE_PROCESS = ("--process-per-site", "--disable-site-isolation-trials")  # for all pages, in place of one for each load

Json = dict[str, Any]
EXAMPLE: Json = json.loads((DEMO / "example.json").read_text())
NAMES: Json = json.loads((DEMO / "names.json").read_text())
WATCH = """addEventListener('securitypolicyviolation',
  event => console.error('CSP', event.violatedDirective, event.blockedURI))"""
TOO_WIDE = """() => [...document.querySelectorAll('main *')]
  .filter(each => each.getBoundingClientRect().right > innerWidth + 1
    && !each.closest('.chips, .tools, .links, #heat, .detail')).map(each => each.outerHTML)"""

AXE = {  # only violations are described, in a quarter of the time; letters beside a drawn bar and arrows are judged too
    "resultTypes": ["violations"],
    "checks": {"color-contrast": {"options": {"ignorePseudo": True, "ignoreUnicode": False}}},
}
# Rules whose answer width or colours change; and elements of which two show what all have.
LOOKS = ["color-contrast", "link-in-text-block", "scrollable-region-focusable", "target-size"]
ALIKE = ("#events li:nth-child(n+3)", "#candidates li:nth-child(n+3)")


def started(playwright: Any) -> Any:
    """A chromium, to be closed by the caller."""
    return playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", *ONE_PROCESS])


class Explorer:
    """One tab, everything that it complained of, and every address that it asked."""

    def __init__(self, browser: Any, url: str, **options: Any) -> None:
        self.context = browser.new_context(permissions=["clipboard-read", "clipboard-write"], **options)
        self.page = self.context.new_page()
        self.page.set_default_timeout(15000)
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

    def open(self, path: str = "/explore") -> Explorer:
        """Load it anew: where only what follows `#` differs, a browser loads nothing, so each load has a query of its own."""
        address, mark, fragment = path.partition("#")
        self.page.goto(f"{self.url}{address.partition('?')[0]}?{next(self.loads)}{mark}{fragment}")
        if path.startswith("/explore"):
            self.page.wait_for_selector("body[data-ranked]")
        return self

    def faults(self, rules: list[str] | None = None, without: Sequence[str] = ALIKE) -> list[Json]:
        """What axe finds wrong with the page as it is now, by all rules or some, without what is there many times."""
        if not self.page.evaluate("'axe' in window"):
            self.page.evaluate(axe.Axe().axe_script)
        asked = [{"exclude": list(without)}, AXE | ({"runOnly": rules} if rules else {})]
        found: list[Json] = self.page.evaluate("asked => axe.run(...asked)", asked)["violations"]
        return found

    def of_the_request(self) -> Explorer:
        """The example of the checkpoint, with its own candidates: where the page begins."""
        return self.open()

    def of_the_corpus(self) -> Explorer:
        """The same user, with the posts of the corpus."""
        return self.open("/explore#story=corpus")

    def settle(self, act: Callable[[], Any]) -> None:
        """Do it, and wait for the ranking that follows."""
        before = self.page.evaluate("document.body.dataset.ranked")
        act()
        self.page.wait_for_function("before => document.body.dataset.ranked !== before", arg=before)

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


def ranked(client: httpx.Client, request: Json) -> list[tuple[str, int, float]]:
    """What /rank says, as the page shows it."""
    reply = client.post("/rank", json=request).raise_for_status().json()
    found = [(each["post_id"], each["rank"], each["score"]) for each in reply["candidates"]]
    return sorted(found, key=lambda each: each[1])
