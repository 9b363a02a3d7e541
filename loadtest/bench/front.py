"""The table of what HTTP and fronts cost. In every round each side takes one reading per load, so that a slow machine affects all."""

from __future__ import annotations

import importlib.metadata
import math
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import orjson

from loadtest.bench.production import checkpoint_of
from loadtest.bench.service import first_visits, reply_rows
from loadtest.generate import wrk
from loadtest.generate.payload import rank_body
from loadtest.generate.traffic import Traffic, TrafficSettings
from loadtest.machine import DEMO, DEMO_POSTS, DEMO_TOWERS, commit
from loadtest.matrix import HISTORY, Row, publish
from loadtest.servers.bare import bare_server
from loadtest.servers.launch import Server, ranking_server
from loadtest.soak.servers import FRONTED
from loadtest.timing import Figure, ratio

POSTS: dict[str, Any] = {"retrieval__checkpoint": DEMO_TOWERS, "retrieval__corpus": DEMO_POSTS}
LOGGED: dict[str, Any] = {"checkpoint": DEMO, "logs__format": "json", "logs__success_sample": 1}
NULL = (*FRONTED, "--null")  # forwards take no time
SMALL, LARGE, COLUMNS = "7 candidates", "64 candidates", "64 candidates in columns"
PRODUCTION = "production: 1 022 events, 2 800 candidates in columns"
KNOWN, NEW = "known user", "new user"
# share of the bare function's rate; none for production, where parsing is not the only work
TARGETS = {SMALL: 0.25, LARGE: 0.30, COLUMNS: 0.30, PRODUCTION: math.inf}
USERS, PRODUCTION_REQUESTS = 2000, 50  # sent in turn
FIRST_NEW_USER, NEW_USERS = 10**12, 5_000  # in each reading
NONE_HELD = (
    *(sys.executable, "-c"),
    "import sys; from app import __main__; from app.server import observer; observer.HELD_REFUSALS = 0; sys.exit(__main__.main())",
)
FEW, MANY, MOST = 32, 256, 512  # connections that ignore Retry-After
COMPUTED = ("encode", "search", "forward")


class Load(NamedTuple):
    """A kind of requests, sent in turn over this many connections."""

    requests: str
    connections: int


class Side(NamedTuple):
    """A server, the processes whose time counts, and a core reserved for wrk."""

    server: Server
    processes: Sequence[int]
    core: int | None = None

    def read(self, load: Load, bodies: Sequence[bytes], seconds: float) -> wrk.Reading:
        """One reading, with the processor time that the side's processes used meanwhile."""
        is_search = load.requests in (KNOWN, NEW)
        url = f"{self.server.url}/{'recommend' if is_search else 'rank'}"
        before = sum(map(cpu_seconds, self.processes))
        found = wrk.read(url, bodies, load.connections, seconds, core=self.core, says_stages=is_search)
        return found._replace(cpu_seconds=sum(map(cpu_seconds, self.processes)) - before)


class Table:
    """The servers and loads, and the readings by side and load."""

    def __init__(self, stack: ExitStack, fronts: int, before: Path | None) -> None:
        self.fronts, self.stack = fronts, stack
        self.before = before
        self.plan: dict[tuple[str, Load], Side] = {}
        self.found: dict[tuple[str, Load], list[wrk.Reading]] = {}
        one = self._start(**LOGGED)
        sides = {"ours": one, "fronts": self._start(**LOGGED, fronts=fronts)}
        if before:
            sides["before"] = self._start(root=before, **LOGGED)
        example = orjson.loads((DEMO / "example.json").read_bytes())
        self.bodies: dict[str, Sequence[bytes]] = {
            SMALL: [orjson.dumps(example)],
            LARGE: first_visits(one.server.target, 64, USERS, as_objects=True),
            COLUMNS: first_visits(one.server.target, 64, USERS, as_objects=False),
            PRODUCTION: [page.body for page in Traffic(TrafficSettings.production()).take(PRODUCTION_REQUESTS)],
        }
        for requests, bodies in self.bodies.items():
            bare = self._bare(one.server, bodies[0])
            for side, server in {"bare": bare, **sides}.items():
                for connections in (1, 16, *((FEW, MANY) if requests == SMALL and side in ("bare", "ours") else ())):
                    self.plan[side, Load(requests, connections)] = server
        none_held = self._start(*NONE_HELD, **LOGGED)
        self.plan |= {("none held", Load(SMALL, connections)): none_held for connections in (FEW, MOST)}
        self._plan_nothing_computed()
        del example["candidates"]
        self.asked = example | {"k": 200, "top_k": 20}
        self.bodies[KNOWN] = [orjson.dumps(self.asked)]
        posts = self._start(**LOGGED, **POSTS)
        self.plan |= {("posts", Load(requests, 1)): posts for requests in (KNOWN, NEW)}

    def _start(self, *command: str, **settings: Any) -> Side:
        server = self.stack.enter_context(ranking_server(*command, **settings))
        return Side(server, [server.process.pid])

    def _bare(self, server: Server, body: bytes) -> Side:
        reply = httpx.post(f"{server.url}/rank", content=body, headers={"content-type": "application/json"})
        bare = self.stack.enter_context(bare_server(len(reply.raise_for_status().content)))
        return Side(bare, [bare.process.pid])

    def _plan_nothing_computed(self) -> None:
        """One front and several, around an engine whose forwards take no time. Each process gets its own core while there are enough."""
        self.bodies["nothing"] = [rank_body(1, 7)]
        quiet = {"logs__level": "info", "logs__format": "json", "queue__max_wait_seconds": 0}
        for count in (1, self.fronts):
            server = self._start(*NULL, fronts=count, **quiet).server
            side = Side(server, pin(server), (os.cpu_count() or 1) - 1)
            self.plan[f"{count} around nothing", Load("nothing", 16 * count)] = side

    def read(self, turn: int, seconds: float) -> None:
        """Take one reading of each side under each load. New users are new in each turn."""
        users = range(FIRST_NEW_USER + turn * NEW_USERS, FIRST_NEW_USER + (turn + 1) * NEW_USERS)
        self.bodies[NEW] = [orjson.dumps(self.asked | {"user_id": str(user)}) for user in users]
        for (side, load), server in self.plan.items():
            found = server.read(load, self.bodies[load.requests], seconds)
            self.found.setdefault((side, load), []).append(found)

    def values(self, side: str, load: Load, name: str = "good_per_s") -> list[float]:
        """The figure `name` of each reading."""
        return [getattr(reading, name) for reading in self.found[side, load]]

    def rows(self) -> Iterator[Row]:
        """All rows: shares of the bare function's rate, the gain over `before`, latencies, refusals and scaling."""
        for requests, target in TARGETS.items():
            load, what = Load(requests, 16), f"{requests}, 16 connections"
            for side, named in (("ours", "one process"), ("fronts", "fronts")):
                share = ratio(self.values(side, load), self.values("bare", load))
                yield Row.of(f"requests/s ÷ bare, {what}, {named}", share, "", target, at_least=True)
            if self.before:
                gain = ratio(self.values("ours", load), self.values("before", load))
                yield Row.of(f"requests/s ÷ those before, {what}, one process", gain, "×", 1.0, at_least=True)
        alone, fronts = (self.values(side, Load(SMALL, 1), "p50_ms") for side in ("ours", "fronts"))
        yield Row.of("p50 at one connection, 7 candidates", Figure.of(alone), "ms", 0.5)
        added = [theirs - ours for ours, theirs in zip(alone, fronts, strict=True)]
        yield Row.of("what a front adds at one connection, p50", Figure.of(added), "ms", 0.1)
        yield from self._impatient()
        yield from self._scaling()
        for user in (KNOWN, NEW):
            rest = [
                each.p50_ms - sum(each.stages_ms.get(stage, 0.0) for stage in COMPUTED)
                for each in self.found["posts", Load(user, 1)]
            ]
            yield Row.of(f"/recommend of a {user} beside what it computes, p50", Figure.of(rest), "ms", 0.5)

    def _impatient(self) -> Iterator[Row]:
        """Impatient clients, also relative to the bare function, as connections cost any server; the cost of an undelayed refusal."""
        ours, bare = (
            [many / few for many, few in zip(*(self.values(side, Load(SMALL, count)) for count in (MANY, FEW)), strict=True)]
            for side in ("ours", "bare")
        )  # fmt: skip
        what = f"200s a second, {MANY} impatient connections ÷ {FEW}"
        yield Row.of(what, Figure.of(ours), "", 0.9, at_least=True)
        yield Row.of(f"{what}, and that ÷ the bare function's", ratio(ours, bare), "", 0.9, at_least=True)
        ranked, refused = [], []
        few, most = (self.found["none held", Load(SMALL, count)] for count in (FEW, MOST))
        for one, other in zip(few, most, strict=True):
            ranked.append(one.cpu_seconds / (one.good_per_s * one.seconds))
            spent = other.cpu_seconds - ranked[-1] * other.good_per_s * other.seconds
            refused.append(spent / max(other.bad_per_s * other.seconds, 1.0))
        sides = [Figure.of(refused), Figure.of(ranked)]
        what = "cost of a refusal ÷ of a small request, processor time"
        yield Row.of(what, ratio(refused, ranked), "", 0.04, sides=sides)

    def _scaling(self) -> Iterator[Row]:
        """Scaling by the clock, and by the fronts' processor time, which shows what they would reach with enough cores."""
        one, several = ((f"{count} around nothing", Load("nothing", 16 * count)) for count in (1, self.fronts))
        what, target = f"{self.fronts} fronts ÷ one, engine of no time, 7 candidates", 0.8 * self.fronts
        faster = ratio(self.values(*several), self.values(*one))
        yield Row.of(f"{what}, pinned on {os.cpu_count()} cores", faster, "×", target, at_least=True)
        costs = [
            [each.cpu_seconds / (each.good_per_s * each.seconds) for each in self.found[side]]
            for side in (one, several)
        ]
        cheaper = ratio(*costs).scaled(self.fronts)
        yield Row.of(f"{what}, by processor time of fronts", cheaper, "×", target, at_least=True)

    def figures(self) -> list[dict[str, Any]]:
        """Every side under every load, for the JSON line."""
        names = ("good_per_s", "bad_per_s", "p50_ms", "p99_ms", "cpu_seconds")
        return [
            {"side": side, **load._asdict(), **{name: self.values(side, load, name) for name in names}}
            for side, load in self.found
        ]


def measure(
    rounds: int = 5, seconds: float = 2.0, fronts: int = 2, before: Path | None = None, history: Path = HISTORY
) -> None:
    """What HTTP costs: rates against a bare function, one caller, impatient callers, refusals, fronts, replies.

    `seconds`: length of a reading. `before`: checkout of another commit, which must not be faster. `history`: CSV file to append to.
    """
    if not wrk.IS_INSTALLED:
        raise FileNotFoundError("wrk is not installed: .ci/debian wrk")
    with ExitStack() as stack:
        table = Table(stack, fronts, before)
        mini = stack.enter_context(ranking_server(checkpoint=stack.enter_context(checkpoint_of("mini"))))
        replies = []
        for turn in range(rounds):
            table.read(turn, seconds)
            replies.append(list(reply_rows(mini.target)))
            print(f"round {turn + 1}/{rounds}", file=sys.stderr)
        rows = list(table.rows())
        for each in zip(*replies, strict=True):
            found = Figure.of([row.figure for row in each])
            rows += [Row.of(each[0].what, found, "ms", each[0].limit)]
    run = {"torch": importlib.metadata.version("torch"), "before": commit(before) if before else None}
    publish(rows, run, history=history, figures=table.figures())


def pin(server: Server) -> list[int]:
    """Pin fronts to the first cores and the engine to the next, or to the last core if none is left. Return the fronts' process ids."""
    lines, cores = server.lines, os.cpu_count() or 1
    fronts = {int(line["front"]): int(line["process"]) for line in lines if line["event"] == "front_started"}
    [engine] = [int(line["process"]) for line in lines if line["event"] == "engine_started"]
    for process, core in [*((process, number - 1) for number, process in fronts.items()), (engine, len(fronts))]:
        for thread in Path(f"/proc/{process}/task").iterdir():
            os.sched_setaffinity(int(thread.name), {min(core, cores - 1)})
    return list(fronts.values())


def cpu_seconds(process: int) -> float:
    """Processor time of a process so far."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
