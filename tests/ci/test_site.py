"""The site: built from the pages of the clone, searchable from a file, with nothing from elsewhere; a link to nowhere stops it."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.explorer import CHROMIUM, api, started
from tests.zygote import zygote

ROOT = Path(__file__).parents[2]
# What a fork that has torch runs.
FORKED = "import runpy, sys; del sys.argv[0]; runpy.run_path(sys.argv[0], run_name='__main__')"


def build(root: Path, out: Path) -> subprocess.CompletedProcess[str]:
    return zygote.run([sys.executable, "-c", FORKED, str(root / ".ci" / "site"), str(out)], timeout=300)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    done = build(ROOT, out := tmp_path_factory.mktemp("site"))
    assert done.returncode == 0, done.stderr
    return out


def test_every_page_is_there_and_nothing_comes_from_elsewhere(site: Path) -> None:
    for page in (ROOT / "docs").rglob("*.md"):
        name = page.relative_to(ROOT / "docs").with_suffix(".html")
        assert (site / str(name).replace("README.html", "index.html")).exists(), name
    for page in site.rglob("*.html"):
        loaded = re.findall(
            r"<(?:script|link|img|iframe)\b[^>]*?\b(?:src|href)=\"?(https?:[^\"\s>]+)", page.read_text()
        )
        assert not loaded, (page, loaded)


@pytest.fixture
def browser() -> Iterator[Any]:
    if CHROMIUM is None:
        pytest.skip("chromium is not installed")
    with api.sync_playwright() as playwright, started(playwright) as opened:
        yield opened


def test_it_is_searched_and_shows_the_api_from_a_file(site: Path, browser: Any) -> None:
    page = browser.new_page()
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.goto((site / "index.html").as_uri())
    page.locator(".md-search__input").click(force=True)
    page.keyboard.type("candidate isolation")
    page.locator(".md-search-result__link").first.wait_for(timeout=20_000)
    page.goto((site / "reference.html").as_uri())
    page.get_by_text("/recommend", exact=True).first.wait_for(timeout=20_000)
    assert not [url for url in asked if url.startswith("http")]


def test_a_link_to_nowhere_stops_it(tmp_path: Path) -> None:
    for entry in ROOT.iterdir():
        if entry.name != "docs":
            (tmp_path / entry.name).symlink_to(entry)
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    page = tmp_path / "docs" / "explore.md"
    nowhere = ("nowhere.md", "api.md#no-such-part", "../app/nowhere.py")
    page.write_text(page.read_text() + "".join(f"\n[x]({link})\n" for link in nowhere))
    done = build(tmp_path, tmp_path / "out")
    assert done.returncode == 1
    for link in nowhere:
        [line] = [line for line in done.stderr.splitlines() if link.rpartition("/")[2] in line]
        assert "explore.md" in line
