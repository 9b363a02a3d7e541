"""Locust scenarios: users who page, arrive, burst, vary, and misbehave. Closed loop: for capacity, see `python -m loadtest search`."""

# mypy: disable-error-code="no-untyped-call, untyped-decorator, arg-type, union-attr"
# Locust's own annotations are partial: its event hooks are untyped, and `data` takes bytes.

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import gevent
import httpx
import orjson
from flask import Blueprint, Response, request
from locust import FastHttpUser, LoadTestShape, between, events, task
from locust.runners import MasterRunner, WorkerRunner

from loadtest.generate.bad_requests import bad_requests
from loadtest.generate.distributions import SizeBand, Sizes
from loadtest.generate.traffic import RankRequest, Traffic, TrafficSettings, fresh_seed
from loadtest.locust_figures import KEY, Figures, columns, to_csv, to_text
from loadtest.locust_shapes import SHAPES, Plan
from loadtest.servers.target import fit_traffic

HEADERS = {"Content-Type": "application/json"}
BURST_PAGES = 6
MIXED_SIZES = Sizes([SizeBand(1, 15, 0.4), SizeBand(16, 256, 0.4), SizeBand(257, 1024, 0.2)])

log = logging.getLogger(__name__)


class Session:
    """What the users of one locust process share: the streams of traffic, which never send the same page twice, and the figures."""

    def __init__(self) -> None:
        self.figures = Figures()

    def start(self, host: str, seed: int) -> None:
        """Fit the traffic to the server that is loaded; a server without `/info` gets the usual."""
        try:
            info = httpx.get(f"{host}/info", timeout=5).json()
        except (httpx.HTTPError, ValueError):
            log.warning("%s/info cannot be read: using the usual history window and limits", host)
            info = {}
        self.figures.clear()
        settings = fit_traffic(TrafficSettings(seed=seed), info)
        self.traffic = Traffic(settings)
        mixed = fit_traffic(TrafficSettings(seed=seed + 500_000, candidates=MIXED_SIZES, max_candidates=1024), info)
        self.mixed = Traffic(mixed)


shared = Session()


class RankingUser(FastHttpUser):
    """Sends pages and checks every reply; the scenarios below say which."""

    abstract = True
    connection_timeout = 5.0
    network_timeout = 15.0

    def rank(self, page: RankRequest, name: str) -> None:
        """Send one page. 200 must rank every candidate; 429 must say when to come back; anything else is a failure."""
        with self.client.post("/rank", data=page.body, headers=HEADERS, name=name, catch_response=True) as reply:
            latency_ms = reply.request_meta["response_time"]
            slo_ms = self.environment.parsed_options.slo_ms
            shared.figures.record(name, reply.status_code, latency_ms, reply.headers or {}, slo_ms)
            if reply.status_code == 429 and "Retry-After" in reply.headers:
                reply.success()
            elif reply.status_code != 200:
                reply.failure(f"status {reply.status_code}")
            elif len(orjson.loads(reply.content)["candidates"]) != page.candidates:
                reply.failure("not every candidate was ranked")
            else:
                reply.success()


class FeedPage(RankingUser):
    """Scrolls: the pages of a session one after the other, with the same context and new candidates."""

    weight = 6
    wait_time = between(0.2, 1.0)

    @task
    def scroll(self) -> None:
        for page in shared.traffic.session():
            self.rank(page, "feed page")
            gevent.sleep(self.wait_time())


class FirstVisit(RankingUser):
    """Somebody new each time: no context can come from the cache."""

    weight = 2
    wait_time = between(0.2, 1.0)

    @task
    def arrive(self) -> None:
        self.rank(shared.traffic.first_visit(), "first visit")


class Burst(RankingUser):
    """One user's pages all at once, as a prefetching client asks for them: equal contexts in flight together."""

    weight = 1
    wait_time = between(1.0, 3.0)

    @task
    def prefetch(self) -> None:
        pages = shared.traffic.burst(BURST_PAGES)
        gevent.joinall([gevent.spawn(self.rank, page, "burst") for page in pages])


class MixedSizes(RankingUser):
    """From one candidate to a thousand: large requests must not starve small ones."""

    weight = 1
    wait_time = between(0.5, 1.5)

    @task
    def vary(self) -> None:
        self.rank(next(shared.mixed), "mixed sizes")


class BadClient(RankingUser):
    """Sends what the contract refuses, and fails unless it is refused as promised."""

    weight = 1
    wait_time = between(0.5, 1.5)

    @task
    def misbehave(self) -> None:
        for bad in bad_requests(next(shared.traffic).body):
            headers = {"Content-Type": bad.media_type}
            with self.client.post(
                "/rank", data=bad.body, headers=headers, name="bad client", catch_response=True
            ) as reply:
                code = reply.json().get("code") if reply.status_code >= 400 and reply.content else None
                if (reply.status_code, code) == (bad.status, bad.code) or reply.status_code == 429:
                    reply.success()
                else:
                    reply.failure(f"{bad.name}: {reply.status_code} {code}, expected {bad.status} {bad.code}")
            gevent.sleep(0.05)


class Shape(LoadTestShape):
    """The shape that `--shape` names, with locust's own numbers of users, spawn rate and run time."""

    use_common_options = True

    def tick(self) -> tuple[int, float] | None:
        assert self.runner is not None
        options = self.runner.environment.parsed_options
        seconds = float(options.run_time or 0)
        if options.shape != "steady" and not seconds:
            seconds = 120.0
        return Plan(options.shape, options.num_users or 1, options.spawn_rate or 1.0, seconds).at(self.get_run_time())


@events.init_command_line_parser.add_listener
def add_options(parser: Any) -> None:
    """`--shape` and `--slo-ms`, also on the start page."""
    parser.add_argument(
        "--shape", choices=SHAPES, default="steady", help="How the number of users changes over the run time"
    )
    parser.add_argument("--slo-ms", type=float, default=50.0, help="A reply within this counts as goodput")
    parser.add_argument("--traffic-seed", type=int, default=0, help="Seed of the traffic; 0: a fresh one")


@events.init.add_listener
def set_up(environment: Any, **_: Any) -> None:
    """Wire the shared figures into this process' role: worker, master, web page."""
    runner = environment.runner
    if isinstance(runner, WorkerRunner):
        events.report_to_master.add_listener(lambda client_id, data: data.update({KEY: shared.figures.drain()}))
    if isinstance(runner, MasterRunner):
        events.worker_report.add_listener(lambda client_id, data: shared.figures.merge(data.get(KEY, {})))
    if environment.web_ui:
        extend_page(environment)


@events.test_start.add_listener
def begin(environment: Any, **_: Any) -> None:
    """A new stream of traffic for each test; each worker has its own."""
    worker = getattr(environment.runner, "worker_index", 0)
    shared.start(environment.host, (environment.parsed_options.traffic_seed or fresh_seed()) + 1000 * max(worker, 0))


@events.quitting.add_listener
def finish(environment: Any, **_: Any) -> None:
    """The figures on the console, and beside locust's own CSV files where those are wanted."""
    if isinstance(environment.runner, WorkerRunner):
        return
    rows = shared.figures.rows(elapsed(environment))
    print(to_text(rows))
    prefix = environment.parsed_options.csv_prefix
    if prefix:
        Path(f"{prefix}_ranking.csv").write_text(to_csv(rows))


def elapsed(environment: Any) -> float:
    """Seconds from the first to the last request of this test."""
    total = environment.stats.total
    return float(max(1e-9, (total.last_request_timestamp or 0) - total.start_time))


def extend_page(environment: Any) -> None:
    """A tab with the ranking figures in locust's web page, and their CSV under its downloads."""
    ui = environment.web_ui
    ui.template_args |= {
        "extended_tabs": [{"title": "Ranking", "key": KEY}],
        "extended_tables": [{"key": KEY, "structure": columns()}],
        "extended_csv_files": [{"href": f"/{KEY}/csv", "title": "Download ranking figures CSV"}],
    }
    page = Blueprint(KEY, __name__)

    @ui.app.after_request
    def add_figures(response: Response) -> Response:
        if request.path == "/stats/requests" and response.json:
            figures = [{"key": KEY, "data": shared.figures.rows(elapsed(environment))}]
            response.set_data(orjson.dumps({**response.json, "extended_stats": figures}))
        return response

    @page.route(f"/{KEY}/csv")
    def figures_csv() -> Response:
        headers = {"Content-Disposition": "attachment; filename=ranking.csv"}
        return Response(to_csv(shared.figures.rows(elapsed(environment))), mimetype="text/csv", headers=headers)

    ui.app.register_blueprint(page)
