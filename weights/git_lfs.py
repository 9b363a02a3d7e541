"""Knows a Git LFS pointer: the short text that stands in place of a large file until Git LFS has fetched it."""

from __future__ import annotations

_BEGIN = b"version https://git-lfs"
HEAD_BYTES = len(_BEGIN)
"""How much of a file `pointer_problem` needs."""


def pointer_problem(head: bytes) -> str | None:
    """What is wrong with a file that begins with `head`, to follow the file's name, if Git LFS has not fetched it yet."""
    if not head.startswith(_BEGIN):
        return None
    return "is a Git LFS pointer, not the file itself: run `git lfs pull` in the repository that it comes from"
