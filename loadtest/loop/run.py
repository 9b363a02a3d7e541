"""Runs the demo: people visit the running service, a nightly turn follows each day, and each day is judged beside three other rankers.

The service, its log, the events and the turns are the real ones, over HTTP, files and the command line; only the people are synthetic.
Their time is that of the world; the service's log has the time of this machine, and so have the events, so a day takes seconds.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import httpx
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import typer
from numpy.typing import NDArray

from loadtest.loop.people import WORTH, Acts, Floats, Ints, People, Visits, best
from loadtest.loop.picture import draw_picture, table_of, unseen_table
from loadtest.loop.settings import ARCHITECTURE, FIRST_TRAINING, KINDS, NIGHTLY_TRAINING, REWARD, LoopSettings
from loadtest.machine import ROOT
from loadtest.server import PLAIN, Server, serving, wait_until
from model.create import EngineOptions, create_engine
from model.engine import Engine, Item
from model.exploration import draw_order, gumbel_noise
from model.ranking import combine
from weights.actions import DWELL_TIME
from weights.checkpoint import load_checkpoint, load_manifest, save_checkpoint
from weights.fetch import point
from weights.lab.training.choices import plan
from weights.lab.training.run import train
from weights.lab.world.behaviour import ACTION_NAMES
from weights.served import PARTS, ServedRanking, read_part

REFUSED = 3
ENGINE_ITEMS = 64
SECOND_US = 1_000_000


@dataclass(frozen=True, slots=True)
class Day:
    """The mean reward of an impression by ranker; the standard error of loop − frozen by users; how the night's turn ended."""

    day: int
    rewards: Mapping[str, float]
    lead_error: float
    exit_code: int
    sentence: str
    version: str
    failures: int

    @property
    def recovered(self) -> float:
        """The share of the way from the frozen model to the optimum that the loop goes."""
        gap = self.rewards["optimum"] - self.rewards["frozen"]
        return (self.rewards["loop"] - self.rewards["frozen"]) / gap


class Demo:
    """The service, the people, and everything on disk between them."""

    def __init__(self, settings: LoopSettings, root: Path) -> None:
        self.settings, self.root = settings, root
        self.people = People(settings)
        self.link = root / "current"
        self.failures = 0
        self._parts: set[Path] = set()
        self._sent = 0

    def first_checkpoint(self) -> None:
        """Show posts in a random order for some days, and train the checkpoint of day 0 on that."""
        people, settings = self.people, self.settings
        rounds = []
        for day in range(-settings.warm_up_days, 0):
            for visits in people.visits(day):
                places = best(people.rng.random(visits.posts.shape), settings.shown)
                rounds += [(visits, people.act(visits, places))]
        log = people.log_of(rounds)
        decided = plan(log, settings.seed, None, False, {**FIRST_TRAINING, **ARCHITECTURE})
        ranker = train(log, decided.config, decided.settings, dwell_output=0)
        path = self.root / "first"
        save_checkpoint(
            path,
            ranker,
            name="loop",
            action_names=ACTION_NAMES,
            continuous=(DWELL_TIME,),
            score_weights=REWARD,
            training=decided.record(),
        )
        point(self.link, path.name)
        self.frozen: Engine = create_engine(
            load_checkpoint(path).ranker, EngineOptions("cpu", threads=1, cache_bytes=0)
        )
        self.frozen.warm_up()

    @contextmanager
    def service(self) -> Iterator[Server]:
        """The running service, which logs and watches the link."""
        with serving(
            self.link,
            threads=1,
            served__directory=self.root / "served",
            served__part_seconds=1,
            reload__watch_seconds=0.25,
            logs__level="error",
            queue__max_wait_seconds=0,
        ) as server:
            yield server

    def day(self, server: Server, day: int) -> Day:
        """One day and its night."""
        if day == self.settings.drift_day:
            self.people.change_tastes()
        visited: list[tuple[Visits, Acts, list[str]]] = []
        with httpx.Client(base_url=server.url, timeout=60, verify=PLAIN) as client:
            for round_, visits in enumerate(self.people.visits(day)):
                names = [f"day-{day}-{round_}-{row}" for row in range(len(visits.who))]
                places = self._served(client, visits, names)
                visited.append((visits, self.people.act(visits, places), names))
        rows = self._logged(server)
        last_ts = max(row.served_us for row in rows.values()) // SECOND_US
        self._write_events(day, visited, rows)
        rewards, lead_error = self._judged([(visits, names) for visits, _, names in visited], rows)
        code, said = 0, "The last day has no night"
        if day < self.settings.days - 1:
            code, said = self._turn(last_ts + self.settings.window_seconds)
        version = load_manifest(self.link).version
        wait_until(lambda: server.get("/info").json()["model"]["version"] == version, 60, server)
        return Day(day, rewards, lead_error, code, said, version, self.failures)

    def _served(self, client: httpx.Client, visits: Visits, names: Sequence[str]) -> Ints:
        """What the service shows in these visits: places of candidates, the best first, `[n, k]`."""
        places = []
        for row, name in enumerate(names):
            body = self.people.body(visits, row, name)
            reply = client.post("/rank", json=body)
            self._sent += 1
            if reply.status_code != 200:
                self.failures += 1
                reply.raise_for_status()
            place = {post["post_id"]: number for number, post in enumerate(body["candidates"])}
            places.append([place[post["post_id"]] for post in reply.json()["candidates"]])
        return np.array(places)

    def _logged(self, server: Server) -> dict[str, ServedRanking]:
        """The rankings of the day, once the service has written them all."""
        wait_until(lambda: server.metric("ranker_served_rankings_total") >= self._sent, 60, server)
        fresh = {*(self.root / "served").glob(PARTS)} - self._parts
        self._parts |= fresh
        return {row.request_id: row for part in sorted(fresh) for row in read_part(part)}

    def _write_events(
        self, day: int, visited: Sequence[tuple[Visits, Acts, list[str]]], rows: Mapping[str, ServedRanking]
    ) -> None:
        """Write down what people did. On the poisoned day it is dealt out among all impressions of the day."""
        actions = np.concatenate([acts.actions.reshape(-1, len(ACTION_NAMES)) for _, acts, _ in visited])
        if day == self.settings.poisoned_day:
            actions = actions[self.people.rng.permutation(len(actions))]
        shown = self.settings.shown
        names = np.repeat([name for _, _, visit_names in visited for name in visit_names], shown)
        posts = np.concatenate([self.people.world.posts.ids[acts.posts].ravel() for _, acts, _ in visited])
        seconds = np.concatenate([acts.seconds.ravel() for _, acts, _ in visited]).astype(np.float64)
        place, action = np.nonzero(actions)
        kinds = np.array(ACTION_NAMES)[action]
        table = pa.table(
            {
                "request_id": names[place].tolist(),
                "post_id": posts[place],
                "action": kinds.tolist(),
                "event_ts": [rows[name].served_us // SECOND_US + 1 for name in names[place]],
                "value": pa.array(seconds[place], mask=kinds != DWELL_TIME.name),
            }
        )
        (self.root / "events").mkdir(exist_ok=True)
        pq.write_table(table, self.root / "events" / f"day-{day:02}.parquet")

    def _judged(
        self, visited: Sequence[tuple[Visits, list[str]]], rows: Mapping[str, ServedRanking]
    ) -> tuple[dict[str, float], float]:
        """The mean reward of an impression that each ranker shows to the same users from the same candidates, by the truth of the world;
        and the standard error of loop − frozen."""
        settings = self.settings
        sums: dict[str, list[Floats]] = {kind: [] for kind in KINDS}
        for visits, names in visited:
            day = [rows[name] for name in names]
            loop = np.array([np.argsort(row.ranks)[: settings.shown] for row in day])
            shown = {
                "optimum": best(visits.reward, settings.shown),
                "loop": loop,
                "frozen": self._frozen_places(day),
                "chance": np.broadcast_to(np.arange(visits.reward.shape[1]), visits.reward.shape),
            }
            for kind, places in shown.items():
                sums[kind].append(np.take_along_axis(visits.reward, places, 1).mean(1))
        means = {kind: np.concatenate(rewards) for kind, rewards in sums.items()}
        who = np.concatenate([visits.who for visits, _ in visited])
        lead = np.bincount(who, means["loop"] - means["frozen"]) / np.bincount(who)
        return {kind: float(rewards.mean()) for kind, rewards in means.items()}, float(
            lead.std(ddof=1) / len(lead) ** 0.5
        )

    def _frozen_places(self, day: Sequence[ServedRanking]) -> Ints:
        """What the model of day 0 would have shown for the same requests, with the same noise of the exploration, `[n, k]`."""
        places: list[NDArray[np.intp]] = []
        for start in range(0, len(day), ENGINE_ITEMS):
            some = day[start : start + ENGINE_ITEMS]
            for row, outcome in zip(
                some, self.frozen.forward([Item(row.context, row.candidates) for row in some]), strict=True
            ):
                scores = combine(outcome.scores.probabilities, WORTH)
                noise = gumbel_noise(row.request_id, row.candidates.post_ids)
                places.append(draw_order(scores, self.settings.temperature, noise)[0][: self.settings.shown])
        return np.array(places)

    def _turn(self, until_ts: int) -> tuple[int, str]:
        """The nightly turn, as cron would take it; its exit code and its last word."""
        settings = self.settings
        options: list[object] = [
            "--served", self.root / "served", "--events", self.root / "events", "--checkpoint", self.link,
            "--out", self.root / "loop", "--window", f"{settings.window_seconds}s", "--until", until_ts,
            "--nights", settings.nights, "--held-out", settings.held_out, "--seed", settings.seed,
        ]  # fmt: skip
        for name, value in NIGHTLY_TRAINING.items():
            options += ["--set", f"{name}={value:g}"]
        for name, value in settings.bounds.items():
            options += ["--bound", f"{name}={value:g}"]
        command = [sys.executable, "-m", "weights", "refresh", *map(str, options)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        if done.returncode not in (0, REFUSED):
            raise RuntimeError(done.stdout + done.stderr)
        (sentence,) = [line for line in done.stdout.splitlines() if line.startswith("Turn ")]
        return done.returncode, sentence


def run(settings: LoopSettings, root: Path, say: bool = False) -> list[Day]:
    """Run the demo in a directory; what happened on each day."""
    demo = Demo(settings, root)
    demo.first_checkpoint()
    days = []
    with demo.service() as server:
        for number in range(settings.days):
            began = time.perf_counter()
            days.append(demo.day(server, number))
            if say:
                words = ", ".join(f"{kind} {reward:.3f}" for kind, reward in days[-1].rewards.items())
                print(f"day {number:2}: {words}; {days[-1].sentence} ({time.perf_counter() - began:.0f} s)", flush=True)
    return days


def measure(
    out: Annotated[Path, typer.Option(help="Directory for loop.png, days.json and the table.")] = ROOT
    / "build/demo-loop",
    seed: int = 1,
    days: Annotated[int, typer.Option(min=2, help="How many days.")] = LoopSettings().days,
    new_users: Annotated[int, typer.Option(min=0, help="So many users arrive on each day.")] = LoopSettings().new_users,
    keep: Annotated[Path | None, typer.Option(help="Keep what the service and the turns wrote here.")] = None,
) -> None:
    """Run a service for fourteen days of a synthetic world, with a nightly turn each, and draw what it earned by day. Then print how the
    models order impressions whose user, post or author was not trained on, by night."""
    settings = LoopSettings(seed=seed, days=days, new_users=new_users)
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        root = keep or Path(folder)
        root.mkdir(parents=True, exist_ok=True)
        judged = run(settings, root, say=True)
        orders = unseen_table([json.loads(path.read_text()) for path in sorted(root.glob("loop/turns/*/figures.json"))])
    out.mkdir(parents=True, exist_ok=True)
    draw_picture(judged, settings, out / "loop.png")
    values: dict[str, Any] = {
        "settings": asdict(settings),
        "days": [asdict(day) | {"recovered": day.recovered} for day in judged],
    }
    (out / "days.json").write_text(json.dumps(values, indent=1) + "\n")
    print(table_of(judged))
    print(orders)
    print(f"{time.perf_counter() - began:.0f} s; {out / 'loop.png'} has the picture", flush=True)
