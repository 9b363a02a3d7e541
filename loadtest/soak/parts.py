"""All soak tests of the reliability matrix, by name, each with its share of the total time."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator

from loadtest.matrix import Row, table
from loadtest.soak import (
    cluster,
    crowds,
    endings,
    excess,
    fronts,
    hostile,
    lines,
    overload,
    pairs,
    posts,
    protocol,
    reloads,
    replicas,
    slow,
)

Part = Callable[[float], list[Row]]

PARTS: dict[str, tuple[float, Part]] = {  # name → share of the time, test
    "overload": (0.15, lambda seconds: overload.overload(seconds)),
    "recovery": (0.05, lambda seconds: [overload.recovery(seconds)]),
    "deadlines": (0.05, lambda seconds: [overload.deadlines(_count(seconds, 100, 200))]),
    "impatience": (0.05, lambda seconds: overload.impatience(seconds)),
    "shadow": (0.04, lambda seconds: overload.shadow(seconds)),
    "leak": (0.10, lambda seconds: [reloads.leak(seconds)]),
    "reloads": (0.10, lambda seconds: reloads.reload_leak(seconds, min(60.0, seconds / 8))),
    "swaps": (0.12, lambda seconds: reloads.swaps(seconds)),
    "terminations": (0.06, lambda seconds: [endings.terminations(_count(seconds, 1 / 6, 4))]),
    "kills": (0.05, lambda seconds: [endings.kills(_count(seconds, 1 / 10, 2))]),
    "front_kills": (0.17, lambda seconds: fronts.front_kills(_count(seconds, 1 / 2.8, 4))),
    "engine_kills": (0.04, lambda seconds: fronts.engine_kills(_count(seconds, 1 / 10, 1))),
    "stopped_front": (0.01, lambda seconds: fronts.stopped_front(max(2.0, seconds / 3))),
    "fronts_swaps": (0.04, lambda seconds: reloads.swaps(seconds, fronts=(2,))),
    "fronts_terminations": (0.03, lambda seconds: [endings.terminations(_count(seconds, 1 / 8, 4), fronts=2)]),
    "stuck": (0.04, lambda seconds: [endings.stuck(_count(seconds, 1 / 12, 1))]),
    "stuck_search": (0.02, lambda seconds: [endings.stuck_search(_count(seconds, 1 / 12, 1))]),
    "stuck_loop": (0.01, lambda seconds: [endings.stuck_loop(_count(seconds, 1 / 20, 1))]),
    "raising": (0.03, lambda seconds: endings.raising(_count(seconds, 50, 200))),
    "slow": (0.02, lambda seconds: slow.slow(_count(seconds, 20, 200))),
    "dear": (0.03, lambda seconds: [hostile.dear(seconds)]),
    "hostile": (0.05, lambda seconds: [hostile.memory(seconds), hostile.terminations(list(hostile.KINDS))]),
    "crowds": (0.06, lambda seconds: crowds.crowds(seconds)),
    "calls": (0.02, lambda seconds: [hostile.calls(seconds)]),
    "protocol": (0.03, lambda seconds: [protocol.protocol(seconds)]),
    "lines": (0.03, lambda seconds: [lines.lines(seconds)]),
    "excess": (0.05, lambda seconds: excess.excess(_count(seconds, 1 / 60, 1))),
    "posts": (0.06, lambda seconds: posts.changes(_count(seconds, 60, 1000))),
    "fronts_posts": (0.03, lambda seconds: posts.changes(_count(seconds, 60, 500), fronts=2)),
    "posts_kills": (0.03, lambda seconds: [posts.kills(_count(seconds, 1 / 8, 2))]),
    "posts_pairs": (0.05, lambda seconds: pairs.pairs(_count(seconds, 1.5, 60), seconds=seconds)),
    "replicas": (0.06, lambda seconds: replicas.all_rows(seconds, _count(seconds, 1 / 5, 3))),
    "cluster": (0.05, lambda seconds: cluster.all_rows(_count(seconds, 1 / 60, 2))),
    "vanishing": (0.05, lambda seconds: [endings.vanishing(_count(seconds, 80, 500))]),
}


def _count(seconds: float, per_second: float, least: int) -> int:
    return max(least, int(seconds * per_second))


def run(seconds: float, names: list[str]) -> Iterator[Row]:
    """Run the named parts and yield their rows. A part that raises becomes a failed row, and the others still run."""
    whole = sum(PARTS[name][0] for name in names)
    for name in names:
        share, part = PARTS[name]
        try:
            yield from part(seconds * share / whole)
        except Exception as error:
            yield Row(name, f"broke: {type(error).__name__}: {error}"[:200], 1, 1, 0, 0, "")


def soak(seconds: float = 1800.0, only: list[str] | None = None) -> None:
    """Run all soak tests, or those named, in `seconds`. Prints one JSON line per row, then a table. Exit code 1 if a row is red."""
    if unknown := set(only or ()) - PARTS.keys():
        raise ValueError(f"no part is named {', '.join(unknown)}; there are {', '.join(PARTS)}")
    began, rows = time.monotonic(), []
    for row in run(seconds, only or list(PARTS)):
        rows.append(row)
        print(row.to_json(), flush=True)
    print(f"\n{table(rows)}\n\n{time.monotonic() - began:.0f} s in all")
    sys.exit(not all(row.ok for row in rows))
