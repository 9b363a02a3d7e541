"""Content codes of posts from any matrix of vectors, such as text embeddings: residual k-means, one k-means a level.

    python docs/examples/codes.py fit vectors.npy book.npz --levels 6 --values 256
    python docs/examples/codes.py codes vectors.npy book.npz codes.npy

`vectors.npy` holds a row for each post, `[n, d]`. It is mapped and read in pieces, so it may be larger than memory. Level 1 clusters the
vectors, level 2 what level 1 leaves of them, and so on. A code is the number of a centroid, 1 … values. A vector of zeros has no codes:
its row is 0.

How codes stay stable: fit the book once, on a few weeks of posts, and keep the file. `codes` gives equal vectors equal codes on every
later day, so new posts need only their vectors. The model learns what each code of this one book means. When the book has grown old, or
the embedding model changes, fit another book, give it to all posts of the log, and train another checkpoint with it.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from sklearn.cluster import MiniBatchKMeans
from sklearn.metrics import pairwise_distances_argmin

PIECE_ROWS = 16_384
PASSES = 5
Floats = NDArray[np.float32]


def pieces(vectors: Floats) -> Iterator[Floats]:
    """The rows in pieces, read as float32."""
    for start in range(0, len(vectors), PIECE_ROWS):
        yield np.asarray(vectors[start : start + PIECE_ROWS], np.float32)


def fit(vectors: Floats, levels: int, values: int, seed: int = 1) -> Floats:
    """The book: centroids float32 `[levels, values, d]`. There must be at least `values` vectors that are not zero."""
    book = np.zeros((0, values, vectors.shape[1]), np.float32)
    for level in range(levels):
        means = MiniBatchKMeans(values, batch_size=PIECE_ROWS, n_init=1, random_state=seed + level)
        for _ in range(PASSES):
            for piece in pieces(vectors):
                rows = piece[piece.any(1)]
                means.partial_fit(residuals(rows, book)[0])
        book = np.concatenate((book, means.cluster_centers_[None].astype(np.float32)))
    return book


def residuals(rows: Floats, book: Floats) -> tuple[Floats, NDArray[np.int32]]:
    """What the levels of a book leave of the rows `[n, d]`, and the rows' codes int32 `[n, levels]`."""
    left, codes = rows, np.zeros((len(rows), len(book)), np.int32)
    for level, centroids in enumerate(book):
        nearest = pairwise_distances_argmin(left, centroids)
        left, codes[:, level] = left - centroids[nearest], nearest + 1
    return left, codes


def codes_of(vectors: Floats, book: Floats) -> NDArray[np.int32]:
    """The codes of each vector, int32 `[n, levels]`; 0 for a vector of zeros."""
    codes = [residuals(piece, book)[1] * piece.any(1, keepdims=True) for piece in pieces(vectors)]
    return np.concatenate(codes).astype(np.int32)


def main() -> None:
    """Run one of the two commands."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["fit", "codes"])
    parser.add_argument("vectors", type=Path)
    parser.add_argument("book", type=Path)
    parser.add_argument("out", type=Path, nargs="?", help="where `codes` writes them")
    parser.add_argument("--levels", type=int, default=6)
    parser.add_argument("--values", type=int, default=256)
    options = parser.parse_args()
    for path in [options.vectors, *([options.book] if options.command == "codes" else [])]:
        if not path.is_file():
            parser.error(f"{path} is not there")
    vectors = np.load(options.vectors, mmap_mode="r")
    if options.command == "fit":
        np.savez(options.book, book=fit(vectors, options.levels, options.values))
        print(f"{options.book} holds {options.levels} levels of {options.values} centroids")
    elif options.out is None:
        parser.error("codes needs a third file, for the codes")
    else:
        codes = codes_of(vectors, np.load(options.book)["book"])
        np.save(options.out, codes)
        print(f"{options.out} holds {codes.shape[1]} codes for each of {len(codes)} posts")


if __name__ == "__main__":
    main()
