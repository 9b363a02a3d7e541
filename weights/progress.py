"""How work that takes a while says how far it is."""

from __future__ import annotations

from collections.abc import Callable

Update = Callable[[str, int, int], None]
"""`update(what, done, total)`: what is being done, in a few words, and how much of it; `done` and `total` are bytes or things counted.

Call it as often as is convenient, from any thread. A new part of the work begins where `total` changes or `done` falls; the remaining
time is that of the part."""
