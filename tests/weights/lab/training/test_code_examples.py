"""The examples of content codes: residual k-means over vectors, MovieLens with a knowledge graph, and a world of new posts."""

from __future__ import annotations

import io
import runpy
import subprocess
import sys
import zipfile
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("pyarrow")

from tests.weights.call import call
from tests.weights.lab.training.test_movielens import FILMS, FOLDER
from tests.weights.lab.training.test_movielens import wheel as wheel
from weights.lab.training.log import read_log

EXAMPLES = Path(__file__).parents[4] / "docs/examples"
POSTS, WIDTH, LEVELS, VALUES = 3000, 8, 3, 12
SMALL = [word for name in ("width=16", "layers=1", "epochs=0.3", "validation_requests=8") for word in ("--set", name)]
WITHOUT = ("--set", "code_levels=0", "--set", "code_values=0")


def run(script: str, *arguments: object) -> str:
    """What a script prints; a second line of standard error ends the test as it would end the script."""
    printed = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(printed), redirect_stderr(printed):
        patch.setattr(sys, "argv", [script, *map(str, arguments)])
        patch.syspath_prepend(str(EXAMPLES))
        runpy.run_path(str(EXAMPLES / script), run_name="__main__")
    return printed.getvalue()


@pytest.fixture(scope="module")
def book(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A book of codes, fitted on vectors in clusters of which some are zero; the vectors lie beside it."""
    path = tmp_path_factory.mktemp("book") / "book.npz"
    np.save(path.with_name("vectors.npy"), vectors_of(1))
    assert "3 levels of 12" in run(
        "codes.py", "fit", path.with_name("vectors.npy"), path, "--levels", LEVELS, "--values", VALUES
    )
    return path


def vectors_of(day: int) -> np.ndarray:
    """Vectors in clusters of clusters; every hundredth is zero."""
    centres, rng = np.random.default_rng(0).standard_normal((10, WIDTH)), np.random.default_rng(day)
    vectors = 3 * centres[rng.integers(0, 10, POSTS)] + centres[rng.integers(0, 10, POSTS)]
    vectors += 0.1 * rng.standard_normal((POSTS, WIDTH))
    vectors[::100] = 0
    return vectors.astype(np.float32)


def codes_of(book: Path, vectors: np.ndarray) -> np.ndarray:
    """The codes that the script writes for these vectors."""
    np.save(book.with_name("some.npy"), vectors)
    run("codes.py", "codes", book.with_name("some.npy"), book, book.with_name("codes.npy"))
    return np.asarray(np.load(book.with_name("codes.npy")))


def test_codes_say_more_of_a_vector_with_each_level(book: Path) -> None:
    vectors = vectors_of(2)
    codes, centroids = codes_of(book, vectors), np.load(book)["book"]
    assert codes.shape == (POSTS, LEVELS)
    assert not codes[::100].any(), "a vector of zeros has no codes"
    rows = vectors.any(1)
    assert (codes[rows].min(), codes[rows].max()) == (1, VALUES)
    left, errors = vectors[rows], [np.square(vectors[rows]).mean()]
    for level in range(LEVELS):
        left = left - centroids[level][codes[rows, level] - 1]
        errors.append(np.square(left).mean())
    assert errors[1] < 0.3 * errors[0]
    assert errors[0] > errors[1] > errors[2] > errors[3]


def test_a_vector_has_the_same_codes_on_every_day(book: Path) -> None:
    vectors = vectors_of(3)
    codes = codes_of(book, vectors)
    order = np.random.default_rng(1).permutation(POSTS)[:500]
    assert np.array_equal(codes_of(book, vectors[order]), codes[order])
    assert np.array_equal(codes_of(book, vectors[:1]), codes[:1])


def test_codes_without_a_place_for_them_are_refused(book: Path) -> None:
    with pytest.raises(SystemExit) as ended:
        run("codes.py", "codes", book.with_name("vectors.npy"), book)
    assert ended.value.code == 2


@pytest.fixture(scope="module")
def graph(wheel: Path) -> Path:
    """The small data set with a knowledge graph: every film has a director; the first ten have won something."""
    triples = [f"m.{film}\tfilm.film.directed_by\tm.d{film % 4}" for film in range(1, FILMS + 1)]
    triples += [f"m.{film}\tfilm.film.award_won\tm.prize" for film in range(1, 11)]
    tables = {
        "link": ["item_id:token\tentity_id:token", *(f"{film}\tm.{film}" for film in range(1, FILMS + 1))],
        "kg": ["head_id:token\trelation_id:token\ttail_id:token", *triples],
    }
    path = wheel.with_name("recbole-2-py3-none-any.whl")
    path.write_bytes(wheel.read_bytes())
    with zipfile.ZipFile(path, "a") as archive:
        for name, lines in tables.items():
            archive.writestr(FOLDER + name, "\n".join(lines) + "\n")
    return path


@pytest.mark.slow
def test_unseen_films_are_compared_with_and_without_codes(graph: Path, tmp_path: Path) -> None:
    assert "14 codes each" in run("movielens_codes.py", "log", graph, tmp_path)
    log = read_log(tmp_path / "log.parquet")
    codes = {int(post): tuple(row) for post, row in zip(log.post_id, log.codes, strict=True)}
    directors = {post: row[7] for post, row in codes.items()}
    assert len(set(directors.values())) == 4
    assert all((directors[a] == directors[b]) == (a % 4 == b % 4) for a in codes for b in codes)
    assert {post for post, row in codes.items() if row[-1] == 2} == set(range(1, 11)) & codes.keys()
    for name, options in {"with": (), "without": WITHOUT}.items():
        trained = call("train", "--log", tmp_path / "log.parquet", "--out", tmp_path / name, *SMALL, *options)
        assert trained.exit_code == 0, trained.output
    printed = run("movielens_codes.py", "table", tmp_path / "log.parquet", tmp_path / "with", tmp_path / "without")
    rows = [line.strip("| ").split(" | ") for line in printed.splitlines()[2:]]
    both = ["with", "with, favorite ÷ click", "without", "without, favorite ÷ click"]
    assert [row[0].strip() for row in rows] == [*both, "boosted trees", "boosted trees with the codes"]
    values = [float(row[1].split()[0]) for row in rows]
    leads = [float(row[2].split()[0]) for row in rows[1:]]
    assert leads == pytest.approx([values[0] - value for value in values[1:]], abs=0.0011)


@pytest.mark.slow
def test_new_posts_are_compared_with_what_is_possible(tmp_path: Path) -> None:
    small = ("--users", 60, "--new-users", 6, "--days", 5, "--test-days", 2)
    run("new_posts.py", "world", tmp_path / "world", *small)
    log = tmp_path / "world/log.parquet"
    trained = call("train", "--log", log, "--until", "2026-06-04", "--out", tmp_path / "with", *SMALL)
    assert trained.exit_code == 0, trained.output
    printed = run("new_posts.py", "table", tmp_path / "world", tmp_path / "with")
    rows = [line.strip("| ").split(" | ") for line in printed.splitlines()[2:]]
    shares = {row[0]: float(row[2].split()[0]) for row in rows}
    assert list(shares) == ["with", "best without topics", "optimum"]
    assert 0.5 < shares["best without topics"] < 0.9 < shares["optimum"] == 1
    assert shares["with"] < 0.9


@pytest.mark.slow
def test_vectors_that_are_not_there_are_named(tmp_path: Path) -> None:
    command = [sys.executable, EXAMPLES / "codes.py", "fit", tmp_path / "nowhere.npy", tmp_path / "book.npz"]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert (ended.returncode, ended.stderr.splitlines()[-1]) == (
        2,
        f"codes.py: error: {tmp_path}/nowhere.npy is not there",
    )
