"""What the service does at its limits: how soon it is ready, what callers that ignore `Retry-After` get, what memory large bodies take."""

from __future__ import annotations

import time
from collections.abc import Iterator

import orjson

from loadtest.bench.http import first_visits, in_objects
from loadtest.generate import wrk
from loadtest.generate.traffic import Traffic, TrafficSettings
from loadtest.rows import Row
from loadtest.server import serving
from loadtest.timing import Figure, ratio

FEW, MANY = 32, 256  # connections
LARGE_LOAD_READINGS = 10  # lengths of a reading that the load of large bodies lasts


def limit_rows(rounds: int, seconds: float) -> Iterator[Row]:
    """All of it on the demo with the settings that the service has by itself."""
    yield Row.of(
        "from `python -m app` to the first 200 of /readyz", Figure.of([start_seconds() for _ in range(rounds)]), "s"
    )
    pages = first_visits(64)
    bodies = {"columns": pages, "objects": [in_objects(page) for page in pages]}
    with serving() as server:
        for form, shaped in bodies.items():
            sent = [orjson.dumps(page) for page in shaped]
            rates: dict[int, list[float]] = {MANY: [], FEW: []}
            for turn in range(rounds + 1):
                for connections, readings in rates.items():
                    reading = wrk.read(server.url + "/rank", sent, connections, seconds)
                    if turn:  # the first round warms up
                        readings.append(reading.good_per_s)
            what = f"64 candidates, {form}: 200s/s of {MANY} connections that ignore Retry-After ÷ of {FEW}"
            yield Row.of(what, ratio(rates[MANY], rates[FEW]), "×", 0.7, at_least=True)
    yield from memory_rows(LARGE_LOAD_READINGS * seconds)


def start_seconds() -> float:
    """From the start of the process until it says that it is ready."""
    began = time.perf_counter()
    with serving():
        return time.perf_counter() - began


def memory_rows(seconds: float) -> Iterator[Row]:
    """Memory of the process before and at the peak, while many connections send histories of 1,000 events and 4,000 candidates."""
    sizes = TrafficSettings(objects_share=1.0, history_window=1000, full_histories=True, as_is=True)
    large = [page.body for page in Traffic(sizes.with_fixed_candidates(4000)).take(20)]
    with serving() as server:
        before = server.status_field("VmRSS")
        reading = wrk.read(server.url + "/rank", large, MANY, seconds)
        peak = server.status_field("VmHWM")
    load = f"{MANY} connections that send bodies of {sum(map(len, large)) // len(large) // 1000} kB"
    yield Row.of("memory before", Figure.of([before / 1024]), "MiB")
    yield Row.of(f"its peak under {load}", Figure.of([peak / 1024]), "MiB")
    yield Row.of("of which are answered with 200", Figure.of([reading.good_per_s]), "/s")
