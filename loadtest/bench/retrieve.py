"""Compares the exact search with faiss and with the memory's bandwidth, in turns."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from loadtest.matrix import Row, publish
from loadtest.timing import Figure, alternate, ratio
from model.native.search import NativeIndex
from model.retrieval.search import Wish

Rows = NDArray[np.float32]

K, BATCH = 200, 32


def unit(rows: NDArray[Any]) -> Rows:
    """The rows at unit length."""
    scaled: Rows = np.ascontiguousarray(rows / np.linalg.norm(rows, axis=-1, keepdims=True), np.float32)
    return scaled


def isotropic(rng: np.random.Generator, count: int, width: int) -> Rows:
    """Unit vectors with uniformly random directions."""
    return unit(rng.standard_normal((count, width), np.float32))


def queries_near(rng: np.random.Generator, rows: Rows, count: int) -> Rows:
    """Queries of users: random rows of the corpus, moved a little."""
    near = rows[rng.integers(0, len(rows), count)]
    return unit(near + 0.05 * rng.standard_normal(near.shape, np.float32))


def speed_rows(posts: int, width: int, threads: int, rounds: int) -> Iterator[Row]:
    """The rows: one query and a batch, against one reading of the fp32 rows and faiss's flat index."""
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
    figures = {name: Figure.of(readings) for name, readings in seconds.items()}
    bandwidth = rows.nbytes / figures["read"].median / 1e9
    for name, ours_name, reference, target in (
        (f"exact top {K} of {posts} × {width} ÷ one reading of the rows ({bandwidth:.1f} GB/s)", "ours", "read", 0.5),
        (f"exact top {K} of {posts} × {width} ÷ faiss flat", "ours", "faiss", 0.4),
        (f"{BATCH} queries at once ÷ faiss flat, {BATCH} queries", "our batch", "faiss batch", 0.6),
    ):
        pair = [figures[ours_name], figures[reference]]
        yield Row.of(name, ratio(seconds[ours_name], seconds[reference]), "", target, sides=pair)


def measure(posts: int = 537_000, width: int = 128, threads: int = 0, rounds: int = 15) -> None:
    """The exact search against faiss and the memory's bandwidth."""
    import faiss

    threads = threads or torch.get_num_threads()
    torch.set_num_threads(threads)
    faiss.omp_set_num_threads(threads)
    publish(
        list(speed_rows(posts, width, threads, rounds)),
        {"torch": torch.__version__, "faiss": faiss.__version__, "threads": threads},
    )
