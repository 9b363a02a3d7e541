"""Runs a closed loop with wrk, a generator in C that sends again after every reply and ignores `Retry-After`."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import httpx

MOST_SECONDS = 10
PATIENT = {"X-Request-Timeout-Ms": str(1000 * MOST_SECONDS)}
"""For measures of speed: the requests that wrk drops at the end of a reading would teach the server that callers leave early, and it
would refuse some of the next reading."""
UNITS_MS = {"us": 1e-3, "ms": 1.0, "s": 1e3}
SCRIPT = """
local bodies, sent = {}, 0
local file = io.open("%s", "rb")
while true do
  local length = file:read("*l")
  if not length then break end
  bodies[#bodies + 1] = file:read(tonumber(length))
end
wrk.method = "POST"
%s
request = function() sent = sent %% #bodies + 1; return wrk.format(nil, nil, nil, bodies[sent]) end
function done(summary, latency)
  local errors = summary.errors
  print(string.format("counted %%d of %%d in %%d", errors.status, summary.requests, summary.duration))
  print(string.format("mean %%d", latency.mean))
  print(string.format("broken %%d", errors.connect + errors.read + errors.write + errors.timeout))
end
"""


class Reading(NamedTuple):
    """Replies per second below status 400 (good) and others (bad), and the mean and the median of all latencies in ms."""

    good_per_s: float
    bad_per_s: float
    mean_ms: float
    p50_ms: float


def read(
    url: str, bodies: Sequence[bytes], connections: int, seconds: float, *, headers: Mapping[str, str] | None = None
) -> Reading:
    """Post the bodies in turn for this many seconds, then wait until the server has worked off what wrk left in its queue: that would
    slow the next reading. Raises RuntimeError if a connection broke or a reply took longer than MOST_SECONDS."""
    fields = {"Content-Type": "application/json"} | dict(headers or {})
    with tempfile.TemporaryDirectory() as folder:
        (lines := Path(folder) / "bodies").write_bytes(b"".join(b"%d\n%b" % (len(body), body) for body in bodies))
        named = "\n".join(f'wrk.headers["{name}"] = "{value}"' for name, value in fields.items())
        (script := Path(folder) / "post.lua").write_text(SCRIPT % (lines, named))
        duration = f"-d{max(1, round(seconds))}s"
        options = ["-t1", f"-c{connections}", duration, "--timeout", f"{MOST_SECONDS}s", "--latency", "-s", str(script)]
        text = subprocess.run(["wrk", *options, url], check=True, capture_output=True, text=True).stdout
    httpx.post(url, content=bodies[0], headers=fields, timeout=60)
    counted = re.search(r"counted (\d+) of (\d+) in (\d+)\nmean (\d+)\nbroken (\d+)", text)
    assert counted is not None, text
    bad, requests, microseconds, mean, broken = map(int, counted.groups())
    if broken:
        raise RuntimeError(f"not every request was answered:\n{text}")
    taken = microseconds / 1e6
    median = re.search(r"50%\s+([\d.]+)(us|ms|s)\b", text)
    assert median is not None, text
    p50_ms = float(median[1]) * UNITS_MS[median[2]]
    return Reading((requests - bad) / taken, bad / taken, mean / 1e3, p50_ms)
