"""Follows real requests through the code: which files they enter, and how often they move from one room to another."""

from __future__ import annotations

import sys
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

ROOT = Path(__file__).parents[1]
FLOORS = ("app", "model", "weights")


class Way:
    """The calls of functions of `app`, `model` and `weights` that one thread makes, in their order."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str]] = []
        """File, relative to the repository, and the function's name."""
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
            self.calls.append((file, code.co_qualname))

    def begin(self) -> None:
        """Follow the calling thread."""
        self.calls.clear()
        sys.setprofile(self)

    def end(self) -> None:
        """Follow nobody."""
        sys.setprofile(None)

    @property
    def files(self) -> list[str]:
        """Each once, in the order in which they are first entered."""
        return list(dict.fromkeys(file for file, _ in self.calls))

    @property
    def moves(self) -> list[tuple[str, str]]:
        """From one room to another; a room is a folder."""
        rooms = [file.rsplit("/", 1)[0] for file, _ in self.calls]
        return [(one, other) for one, other in zip(rooms, rooms[1:], strict=False) if one != other]
