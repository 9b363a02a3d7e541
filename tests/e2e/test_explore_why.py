"""The explorer's reasons, beside what the API says: the map, groups, the next post, attention, sweeps; and checkpoints of other kinds."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from app.settings import Settings
from tests.app.serving import listening, port_of
from tests.e2e.explorer import EXAMPLE, NAMES, NEEDED, Explorer, Json, ranked
from tests.e2e.process import DEMO, Server, serving
from weights.checkpoint import load_checkpoint, save_checkpoint

pytestmark = NEEDED
POSTS = [post["post_id"] for post in EXAMPLE["candidates"]]
TOLERANCE = 0.0051  # cells show two digits


def numbers(texts: list[str]) -> list[float]:
    return [float(text.replace("−", "-").replace("+", "")) for text in texts]


@pytest.fixture
def why(tab: Explorer) -> Explorer:
    tab.open().page.get_by_role("button", name="Why").first.click()
    tab.page.wait_for_selector(".heat")
    return tab


@pytest.fixture(scope="module")
def explained(client: httpx.Client) -> Json:
    reply: Json = client.post("/explain", json=EXAMPLE | {"explain": POSTS}).raise_for_status().json()
    return reply


def test_the_map_has_what_explain_says_of_each_event_and_post(why: Explorer, explained: Json) -> None:
    by_post = dict(zip(POSTS, explained["candidates"], strict=True))
    order = [post for post, _, _ in why.shown()]
    for place in range(len(EXAMPLE["history"])):
        row = numbers(why.page.locator(f'.heat tr[data-event="{place}"] td').all_inner_texts())
        told = [by_post[post]["change"]["events"]["score"][place] for post in order]
        np.testing.assert_allclose(row, told, atol=TOLERANCE)
    for name, title in (("user", "the user"), ("not_covered", "not covered"), ("everything", "all at once")):
        row = numbers(
            why.page.locator(".heat tr", has=why.page.get_by_text(title, exact=True)).locator("td").all_inner_texts()
        )
        np.testing.assert_allclose(row, [by_post[post]["change"][name]["score"] for post in order], atol=TOLERANCE)


def test_groups_are_what_rank_says_without_all_their_events(why: Explorer, client: httpx.Client) -> None:
    """Fault 5: all of an author, of a topic, the whole history."""
    topics = [NAMES["authors"][event["author_id"]]["topic"] for event in EXAMPLE["history"]]
    authors = [NAMES["authors"][event["author_id"]]["name"] for event in EXAMPLE["history"]]
    wanted = {f"all about {topic}": topics.index(topic) for topic, count in Counter(topics).items() if count > 1}
    wanted |= {f"all of {name}": authors.index(name) for name, count in Counter(authors).items() if count > 1}
    whole = {post: score for post, _, score in why.shown()}
    top = why.shown()[0][0]
    rows = why.page.locator(".groups tbody tr").evaluate_all(
        "rows => rows.map(row => [...row.cells].map(cell => cell.innerText))"
    )
    told = {row[0]: numbers([row[2]])[0] for row in rows}
    assert set(told) == {*wanted, "the whole history"}
    for name in told:
        of = (topics if "about" in name else authors) if name != "the whole history" else None
        key = name.split(" ", 2)[2]
        left = [] if of is None else [event for event, each in zip(EXAMPLE["history"], of, strict=True) if each != key]
        without = {post: score for post, _, score in ranked(client, EXAMPLE | {"history": left})}
        assert told[name] == pytest.approx(whole[top] - without[top], abs=6e-4), name


def test_why_above_the_next_is_the_difference_of_two_rows(why: Explorer) -> None:
    (_, _, first), (_, _, second), *_ = why.shown()
    terms = numbers(why.page.locator(".next tbody tr td:nth-child(2)").all_inner_texts())
    assert sum(terms) == pytest.approx(first - second, abs=0.005)
    assert numbers(why.page.locator(".next tfoot tr td:nth-child(2)").all_inner_texts())[0] == pytest.approx(
        first - second, abs=6e-4
    )
    assert "Why above Sven Lindqvist, the 2nd" in why.page.locator(".next caption").inner_text()


def test_what_is_not_covered_is_said_plainly_above_30_percent(
    tab: Explorer, client: httpx.Client, explained: Json
) -> None:
    """Fault 5. It is said where it is above and nowhere else."""
    tab.open()
    shares = {}
    for post, found in zip(POSTS, explained["candidates"], strict=True):
        shares[post] = abs(found["change"]["not_covered"]["score"] / found["change"]["everything"]["score"])
    assert min(shares.values()) < 0.3 < max(shares.values()), "the example has both"
    for post, share in shares.items():
        row = tab.page.locator(f'.list li[data-post="{post}"]')
        row.get_by_role("button", name="Why").click()
        row.locator(".reasons").wait_for()
        said = row.locator(".warning").all_inner_texts()
        assert len(said) == (share > 0.3), share
        assert not said or said[0].startswith(
            f"{round(100 * share)} % of what user and history do together is not covered"
        )


def test_rows_are_told_apart_and_light_up_together(why: Explorer) -> None:
    """Fault 6."""
    titles = why.page.locator(".heat tbody tr th").all_inner_texts()
    assert len(set(titles)) == len(titles)
    assert why.page.locator(".heat th").evaluate_all(
        "all => all.every(each => each.scrollWidth <= each.clientWidth + 1)"
    )
    event, row = why.page.locator('#events [data-event="3"]'), why.page.locator('.heat tr[data-event="3"]')
    cell = why.page.locator(f'.heat td[data-post="{POSTS[2]}"]').first
    post = why.page.locator(f'.list li[data-post="{POSTS[2]}"] strong').first
    for start, end in ((row.locator("th"), event), (event.locator("strong"), row), (post, cell)):
        why.page.mouse.move(0, 0)
        assert "lit" not in (end.get_attribute("class") or "")
        start.hover()
        assert "lit" in (end.get_attribute("class") or "")


def test_attention_is_each_heads_of_the_post_that_is_open(why: Explorer, client: httpx.Client) -> None:
    why.page.locator(".attention summary").click()
    why.page.wait_for_selector(".heads-grid")
    top = why.shown()[0][0]
    reply = client.post("/explain", json=EXAMPLE | {"explain": [top]}).json()["candidates"][0]["attention"]
    heads = np.array(reply["heads"])
    drawn = why.page.locator(".heads-grid svg").evaluate_all(
        "all => all.map(one => [...one.querySelectorAll('rect')].map(bar => Number(bar.getAttribute('height'))))"
    )
    assert len(drawn) == heads.shape[0] * heads.shape[1] == 8
    told = np.concatenate([np.array(reply["user"])[..., None], heads, np.array(reply["itself"])[..., None]], 2)
    np.testing.assert_allclose(np.array(drawn) / 30, told.reshape(8, -1) / told.max(), atol=1e-6)
    assert "each of 7 posts sees all of these and itself, no other post" in why.page.locator(".mask").inner_text()


def test_a_sweep_shows_the_ranks_that_rank_gives(tab: Explorer, client: httpx.Client) -> None:
    tab.open().page.get_by_role("button", name="Sweep the weight of report").click()
    lines = tab.page.locator("#sweep path").evaluate_all(
        "all => all.map(one => [one.dataset.post, one.getAttribute('d')])"
    )
    assert len(lines) == 7
    assert tab.page.locator("#sweep line.mark").count() > 0
    weights = client.get("/info").json()["weights"]
    for weight in (-38.0, -20.0, -6.5, 11.0, 33.0):
        order = [post for post, _, _ in ranked(client, EXAMPLE | {"weights": weights | {"report": weight}})]
        place = 22 + (weight + 40) / 80 * (640 - 22 - 150)
        for post, path in lines:
            points = [tuple(map(float, point.split())) for point in path.lstrip("M").split("L")]
            rank = next(
                (y - 12) / 22 for (x0, y), (x1, _) in zip(points[::2], points[1::2], strict=True) if x0 <= place <= x1
            )
            assert order[round(rank)] == post, weight


@pytest.fixture(scope="module")
def strange(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's weights under the action names of an imported checkpoint, but for two that both know."""
    directory = tmp_path_factory.mktemp("strange") / "imported"
    found = load_checkpoint(DEMO)
    names = [
        name if name in ("favorite", "dwell_time") else f"action_{place}"
        for place, name in enumerate(found.manifest.action_names)
    ]
    save_checkpoint(directory, found.ranker, name="imported", version="strange", action_names=names,
                    score_weights={"favorite": 2.0, "action_1": 7.0}, continuous=found.manifest.continuous)  # fmt: skip
    return directory


@pytest.fixture(scope="module")
def two(strange: Path) -> Iterator[Server]:
    with serving(DEMO, threads=1, shadow__checkpoint=strange) as server:
        for _ in range(500):
            if httpx.get(f"{server.url}/info").json()["second"]["model"] is not None:
                break
            time.sleep(0.02)
        yield server


def test_two_checkpoints_of_other_kinds_stand_side_by_side(browser: Any, two: Server) -> None:
    """Faults 3 and 4: actions by name, what one does not know is left out for it and said, and each keeps its own weights."""
    tab = Explorer(browser, two.url, viewport={"width": 1440, "height": 900}).open()
    with httpx.Client(base_url=two.url) as client:

        def by(version: str, request: Json) -> list[tuple[str, int, float]]:
            reply = client.post("/rank", json=request, headers={"x-model-version": version}).raise_for_status().json()
            return sorted(
                ((each["post_id"], each["rank"], each["score"]) for each in reply["candidates"]), key=lambda row: row[1]
            )

        own = client.get("/info").json()["model"]["version"]
        tab.settle(lambda: tab.page.get_by_role("button", name="Checkpoints").click())
        known = {"favorite", "dwell_time"}
        bare = EXAMPLE | {
            "history": [
                {**each, "actions": [name for name in each["actions"] if name in known]} for each in EXAMPLE["history"]
            ]
        }
        assert (tab.shown(0), tab.shown(1)) == (by(own, EXAMPLE), by("strange", bare))
        for side, told in enumerate((f"demo {own}", "imported strange")):
            assert told in tab.page.locator(".list").nth(side).inner_text()
        notes = tab.page.locator(".list .note").all_inner_texts()
        assert notes[0] == "Knows every action of the history."
        assert notes[1].startswith(
            "Left out for this checkpoint, which does not know them: dwell, quoted click, click, reply and "
        )
        assert "A and B agree by τ = " in tab.page.locator("#caption").inner_text()
        tab.settle(lambda: tab.page.locator('[data-action="reply"]').fill("-2"))
        weights = client.get("/info").json()["weights"] | {"reply": -4.0}
        assert tab.shown(0) == by(own, EXAMPLE | {"weights": weights})
        assert tab.shown(1) == by("strange", bare), "B keeps its own weights"
        tab.settle(lambda: tab.page.locator("#events .remove").first.click())
        shorter = [{**each, "history": each["history"][:-1]} for each in (EXAMPLE | {"weights": weights}, bare)]
        assert (tab.shown(0), tab.shown(1)) == (by(own, shorter[0]), by("strange", shorter[1])), "an event is of both"
        tab.page.get_by_text("B", exact=True).click()
        tab.settle(lambda: tab.page.locator('[data-action="action_1"]').fill("1"))
        assert tab.shown(1) == by("strange", shorter[1] | {"weights": {"favorite": 2.0, "action_1": 1.0}})
        assert tab.shown(0) == by(own, shorter[0])
        tab.page.locator(".list").nth(1).get_by_role("button", name="Why").first.click()
        tab.page.wait_for_selector(".reasons")
        tab.page.wait_for_timeout(300)
        again = Explorer(browser, two.url).open(tab.page.evaluate("location.href").removeprefix(two.url))
        assert [again.shown(side) for side in (0, 1)] == [tab.shown(side) for side in (0, 1)]
        tab.page.get_by_text("A", exact=True).click()
        tab.page.locator("#curl").click()
        assert f"x-model-version: {own}" in tab.page.evaluate("navigator.clipboard.readText()")
        for name in ("Compare", "Checkpoints", "Checkpoints"):
            tab.settle(lambda name=name: tab.page.get_by_role("button", name=name).click())
        assert tab.page.locator(".list").count() == 1
        assert tab.complaints + again.complaints == []
        for each in (tab, again):
            each.context.close()


def test_a_checkpoint_without_an_example_begins_with_its_own_weights(browser: Any) -> None:
    """Fault 11: around a fake engine."""
    with listening(settings=Settings(port=0)) as server:
        tab = Explorer(browser, f"http://127.0.0.1:{port_of(server)}").open()
        info = httpx.get(f"{tab.url}/info").json()
        assert len(tab.shown()) == 8
        assert "weights" not in tab.sent()
        shown = tab.page.locator("[data-weight]").evaluate_all(
            "all => all.map(each => [each.dataset.weight, Number(each.value)])"
        )
        assert dict(shown) == {name: info["weights"].get(name, 0) for name in info["actions"]}
        assert "carries no example" in tab.page.locator("#story-text").inner_text()
        assert tab.complaints == []
        tab.context.close()
