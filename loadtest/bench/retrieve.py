"""`python -m loadtest.bench.retrieve`: the exact search beside faiss and the memory's bandwidth, in turns; one JSON line last."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from loadtest.bench.table import Row, show
from loadtest.machine import machine
from loadtest.timing import Figure, alternate, ratio
from model.native.search import NativeIndex
from model.retrieval.search import Found, TorchIndex, Wish

Rows = NDArray[np.float32]

K, BATCH = 200, 32
PUBLISHED_POSTS = 84_564  # of the corpus that a public run found


def unit(rows: NDArray[Any]) -> Rows:
    """The rows at unit length."""
    scaled: Rows = np.ascontiguousarray(rows / np.linalg.norm(rows, axis=-1, keepdims=True), np.float32)
    return scaled


def isotropic(rng: np.random.Generator, count: int, width: int) -> Rows:
    """Directions drawn evenly."""
    return unit(rng.standard_normal((count, width), np.float32))


def clustered(rng: np.random.Generator, count: int, width: int) -> Rows:
    """A hundred rows around each of many centres."""
    centres = rng.standard_normal((max(1, count // 100), width), np.float32)
    return unit(centres[rng.integers(0, len(centres), count)] + 0.3 * rng.standard_normal((count, width), np.float32))


def crowded(rng: np.random.Generator, count: int, width: int) -> Rows:
    """As the published corpus: all rows around one direction, the best scores close together near 0.9."""
    return unit(rng.standard_normal(width) + 0.4 * rng.standard_normal((count, width), np.float32))


KINDS: dict[str, Callable[[np.random.Generator, int, int], Rows]] = {
    "isotropic": isotropic,
    "clustered": clustered,
    "crowded": crowded,
}


def queries_near(rng: np.random.Generator, rows: Rows, count: int) -> Rows:
    """Users who like something: rows of the corpus, moved a little."""
    near = rows[rng.integers(0, len(rows), count)]
    return unit(near + 0.05 * rng.standard_normal(near.shape, np.float32))


def same_bits(ours: Found, theirs: Found) -> bool:
    """Whether two searches found the same rows with the same scores, to the bit."""
    return ours.rows.tobytes() == theirs.rows.tobytes() and ours.scores.tobytes() == theirs.scores.tobytes()


def speed_rows(posts: int, width: int, threads: int, rounds: int) -> Iterator[Row]:
    """The table: one query and a batch, beside one reading of the fp32 rows and beside faiss's flat index."""
    import faiss

    rng = np.random.default_rng(0)
    rows = isotropic(rng, posts, width)
    queries = queries_near(rng, rows, BATCH)
    ours, theirs, tensor = NativeIndex(rows, threads=threads), faiss.IndexFlatIP(width), torch.from_numpy(rows)
    theirs.add(rows)
    turn = iter(range(10**9))

    def one() -> Rows:
        return queries[next(turn) % BATCH :][:1]

    sides = {
        "read": lambda: tensor.sum(),
        "ours": lambda: ours.search([Wish(one()[0], K)]),
        "faiss": lambda: theirs.search(one(), K),
        "our batch": lambda: ours.search([Wish(query, K) for query in queries]),
        "faiss batch": lambda: theirs.search(queries, K),
    }
    seconds = alternate(sides, rounds, repeats={"read": 3, "ours": 3, "faiss": 3})
    medians = {name: 1e3 * Figure.of(readings).median for name, readings in seconds.items()}
    bandwidth = rows.nbytes / Figure.of(seconds["read"]).median / 1e9
    for name, ours_name, reference, target in (
        (f"exact top {K} of {posts} × {width} ÷ one reading of the rows ({bandwidth:.1f} GB/s)", "ours", "read", 0.5),
        (f"exact top {K} of {posts} × {width} ÷ faiss flat", "ours", "faiss", 0.4),
        (f"{BATCH} queries at once ÷ faiss flat, {BATCH} queries", "our batch", "faiss batch", 0.6),
    ):
        figure = ratio(seconds[ours_name], seconds[reference])
        yield Row(name, figure, "", target, False, medians[ours_name], medians[reference])


def recall_row(queries: int, posts: int, width: int) -> Row:
    """Queries whose rows or bits are not those of scoring every row in fp32."""
    torch.set_num_threads(1)  # nothing is timed here, and two threads a small sum only wait for each other
    different, asked = 0, 0
    rng = np.random.default_rng(1)
    for draw in KINDS.values():
        rows = draw(rng, posts, width)
        native, plain = NativeIndex(rows), TorchIndex(rows, exhaustive=True)
        wishes = [Wish(query, K) for query in queries_near(rng, rows, -(-queries // len(KINDS)))]
        for start in range(0, len(wishes), BATCH):
            pairs = zip(
                native.search(wishes[start : start + BATCH]), plain.search(wishes[start : start + BATCH]), strict=True
            )
            different += sum(not same_bits(*pair) for pair in pairs)
        asked += len(wishes)
        native.close()
    figure = Figure(different, different, different)
    return Row(f"different from a full fp32 scan, of {asked} queries over three kinds of corpora", figure, "", 0, False)


def approximate(posts: int, width: int, threads: int) -> Iterator[dict[str, Any]]:
    """For information: graphs and inverted lists of faiss on the same kinds of corpora, beside ours."""
    import faiss

    for kind, draw in KINDS.items():
        rng = np.random.default_rng(2)
        rows = draw(rng, posts, width)
        queries = queries_near(rng, rows, 100)
        ours = NativeIndex(rows, threads=threads)
        exact = [set(ours.search([Wish(query, K)])[0].rows.tolist()) for query in queries]

        def ours_alone(ours: NativeIndex = ours, queries: Rows = queries) -> None:
            for query in queries:
                ours.search([Wish(query, K)])

        yield {"corpus": kind, "index": "ours, exact", "ms": milliseconds(ours_alone, len(queries)), "recall": 1.0}
        graph: Any = faiss.IndexHNSWFlat(width, 32, faiss.METRIC_INNER_PRODUCT)
        lists: Any = faiss.IndexIVFFlat(faiss.IndexFlatIP(width), width, 1024, faiss.METRIC_INNER_PRODUCT)
        lists.train(rows)
        for index, holder, setting, values in (
            (graph, graph.hnsw, "efSearch", (200, 800)),
            (lists, lists, "nprobe", (16, 64)),
        ):
            index.add(rows)
            for value in values:
                setattr(holder, setting, value)
                found: list[list[int]] = []

                def theirs(index: Any = index, queries: Rows = queries, found: list[list[int]] = found) -> None:
                    found[:] = [index.search(query[None], K)[1][0].tolist() for query in queries]

                name, ms = f"{type(index).__name__} {setting} {value}", milliseconds(theirs, len(queries))
                recall = float(
                    np.mean([len(one.intersection(other)) / K for one, other in zip(exact, found, strict=True)])
                )
                yield {"corpus": kind, "index": name, "ms": ms, "recall": recall}


def milliseconds(side: Callable[[], object], queries: int) -> float:
    """Of one query, where `side` asks so many."""
    return 1e3 * Figure.of(alternate({"it": side}, 3)["it"]).median / queries


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status 0 whether or not the targets are met: the table says so."""
    parser = argparse.ArgumentParser(prog="python -m loadtest.bench.retrieve", description=__doc__)
    parser.add_argument("--posts", type=int, default=537_000)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--queries", type=int, default=10_000, help="for the row on recall; 0 leaves it out")
    parser.add_argument("--approximate", type=int, default=PUBLISHED_POSTS, help="posts of HNSW and IVF; 0: none")
    options = parser.parse_args(arguments)
    import faiss

    torch.set_num_threads(options.threads)
    faiss.omp_set_num_threads(options.threads)
    console = Console(width=150)
    done = list(speed_rows(options.posts, options.width, options.threads, options.rounds))
    show(done, console)
    if options.queries:
        done.append(recall_row(options.queries, 5_003, options.width))
        show(done[-1:], console)
    others = list(approximate(options.approximate, options.width, options.threads)) if options.approximate else []
    table = Table("corpus", "index", "ms a query", f"recall@{K}", title=f"For information: {options.approximate} posts")
    for other in others:
        table.add_row(other["corpus"], other["index"], f"{other['ms']:.3g}", f"{other['recall']:.3f}")
    if others:
        console.print(table)
    run = {**machine(), "torch": torch.__version__, "faiss": faiss.__version__, "threads": options.threads}
    print(json.dumps({**run, "rows": [row.to_dict() for row in done], "others": others}, ensure_ascii=False))
    return 0


if __name__ == "__main__":
    sys.exit(main())
