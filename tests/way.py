"""Follows one real request through the code: which files it enters, and how often it moves from one room to another. Not a test itself."""

from __future__ import annotations

import itertools
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

ROOT = Path(__file__).parents[1]
FLOORS = ("app", "model", "weights")


class Way:
    """Files and rooms of `app`, `model` and `weights` in the order in which one thread calls functions of them."""

    def __init__(self) -> None:
        self.calls: list[str] = []  # file of each call, relative to the repository
        self._files: dict[CodeType, str | None] = {}

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        """For `sys.setprofile`."""
        if event != "call":
            return
        code = frame.f_code
        if code not in self._files:
            path = Path(code.co_filename)
            inside = path.is_relative_to(ROOT) and path.relative_to(ROOT).parts[0] in FLOORS
            self._files[code] = path.relative_to(ROOT).as_posix() if inside else None
        if (file := self._files[code]) is not None:
            self.calls.append(file)

    @property
    def files(self) -> list[str]:
        """Each once, in the order in which they are first entered."""
        return list(dict.fromkeys(self.calls))

    @property
    def moves(self) -> list[tuple[str, str]]:
        """From one room to another; a room is a folder."""
        rooms = [file.rsplit("/", 1)[0] for file in self.calls]
        return [(one, other) for one, other in itertools.pairwise(rooms) if one != other]
