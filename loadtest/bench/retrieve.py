"""The exact search beside faiss and the memory's bandwidth, in turns."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from loadtest.matrix import Row, publish
from loadtest.timing import Figure, alternate, ratio
from model.native.search import NativeIndex
from model.retrieval.search import Found, TorchIndex, Wish

Rows = NDArray[np.float32]

K, BATCH = 200, 32


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
    figures = {name: Figure.of(readings) for name, readings in seconds.items()}
    bandwidth = rows.nbytes / figures["read"].median / 1e9
    for name, ours_name, reference, target in (
        (f"exact top {K} of {posts} × {width} ÷ one reading of the rows ({bandwidth:.1f} GB/s)", "ours", "read", 0.5),
        (f"exact top {K} of {posts} × {width} ÷ faiss flat", "ours", "faiss", 0.4),
        (f"{BATCH} queries at once ÷ faiss flat, {BATCH} queries", "our batch", "faiss batch", 0.6),
    ):
        pair = [figures[ours_name], figures[reference]]
        yield Row.of(name, ratio(seconds[ours_name], seconds[reference]), "", target, sides=pair)


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
    what = f"different from a full fp32 scan, of {asked} queries over three kinds of corpora"
    return Row.of(what, Figure.of([different]), "", 0)


def measure(posts: int = 537_000, width: int = 128, threads: int = 0, rounds: int = 15, queries: int = 10_000) -> None:
    """The exact search beside faiss and the memory's bandwidth. `queries`: for the row on recall, 0 leaves it out."""
    import faiss

    threads = threads or torch.get_num_threads()
    torch.set_num_threads(threads)
    faiss.omp_set_num_threads(threads)
    done = list(speed_rows(posts, width, threads, rounds))
    if queries:
        done.append(recall_row(queries, 5_003, width))
    publish(done, {"torch": torch.__version__, "faiss": faiss.__version__, "threads": threads})
