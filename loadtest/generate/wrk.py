"""Runs a closed loop with wrk, a generator in C that sends again after every reply and ignores `Retry-After`."""

from __future__ import annotations

import re
import shutil
import statistics
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from loadtest.generate.samples import server_timing

IS_INSTALLED = shutil.which("wrk") is not None
UNITS_MS = {"us": 1e-3, "ms": 1.0, "s": 1e3}
SCRIPT = """
local bodies, sent = {}, 0
for line in io.lines("%s") do bodies[#bodies + 1] = line end
wrk.method, wrk.headers["Content-Type"] = "POST", "application/json"
if #bodies == 1 then
  wrk.body = bodies[1]
else
  request = function() sent = sent %% #bodies + 1; return wrk.format(nil, nil, nil, bodies[sent]) end
end
function done(summary, latency)
  local errors = summary.errors
  print(string.format("counted %%d of %%d in %%d", errors.status, summary.requests, summary.duration))
  print(string.format("broken %%d", errors.connect + errors.read + errors.write + errors.timeout))
end
"""


TIMINGS = """
local timings = io.open("%s", "w")
function response(status, headers) timings:write(headers["server-timing"] or "", "\\n") end
"""


class Reading(NamedTuple):
    """Replies per second below status 400 (good) and others (bad), percentiles of all latencies in ms, and the length of the reading.
    `stages_ms`: medians of the stages in `Server-Timing`, if they were read. `cpu_seconds`: of the server, where the caller knows it."""

    good_per_s: float
    bad_per_s: float
    p50_ms: float
    p99_ms: float
    seconds: float
    stages_ms: Mapping[str, float] = {}
    cpu_seconds: float = 0.0


def read(
    url: str,
    bodies: Sequence[bytes],
    connections: int,
    seconds: float,
    *,
    core: int | None = None,
    says_stages: bool = False,
) -> Reading:
    """Post the JSON bodies in turn for this many seconds, with wrk pinned to `core` if given. `says_stages`: also read the replies'
    `Server-Timing`, which costs wrk a little time after each latency.

    Raises ValueError if a body has a line break, RuntimeError if a connection broke or a reply took longer than wrk's 2 s.
    """
    if any(b"\n" in body for body in bodies):
        raise ValueError("A body holds a line break, and wrk is given one body a line.")
    with tempfile.TemporaryDirectory() as folder:
        (lines := Path(folder) / "bodies").write_bytes(b"\n".join(bodies) + b"\n")
        timings = Path(folder) / "timings"
        (script := Path(folder) / "post.lua").write_text(SCRIPT % lines + (TIMINGS % timings if says_stages else ""))
        pinned = [] if core is None else ["taskset", "-c", str(core)]
        options = ["-t1", f"-c{connections}", f"-d{max(1, round(seconds))}s", "--latency", "-s", str(script)]
        text = subprocess.run([*pinned, "wrk", *options, url], check=True, capture_output=True, text=True).stdout
        stages = _medians(timings.read_text().splitlines()) if says_stages else {}
    p50, p99 = (_milliseconds(text, percent) for percent in (50, 99))
    counted = re.search(r"counted (\d+) of (\d+) in (\d+)\nbroken (\d+)", text)
    assert counted is not None
    bad, requests, microseconds, broken = map(int, counted.groups())
    if broken:
        raise RuntimeError(f"not every request was answered:\n{text}")
    seconds = microseconds / 1e6
    return Reading((requests - bad) / seconds, bad / seconds, p50, p99, seconds, stages)


def _medians(headers: Sequence[str]) -> dict[str, float]:
    stages: dict[str, list[float]] = {}
    for header in headers:
        for stage, milliseconds in server_timing(header).items():
            stages.setdefault(stage, []).append(milliseconds)
    return {stage: statistics.median(values) for stage, values in stages.items()}


def _milliseconds(text: str, percent: int) -> float:
    found = re.search(rf"{percent}%\s+([\d.]+)(us|ms|s)\b", text)
    assert found is not None, text
    return float(found[1]) * UNITS_MS[found[2]]
