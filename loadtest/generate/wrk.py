"""A closed loop by somebody else's generator: wrk, in C, which sends again as soon as it is answered and honours no `Retry-After`."""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

IS_INSTALLED = shutil.which("wrk") is not None
UNITS_MS = {"us": 1e-3, "ms": 1.0, "s": 1e3}
SCRIPT = """
local bodies, sent, threads = {}, 0, {}
for line in io.lines("%s") do bodies[#bodies + 1] = line end
wrk.method, wrk.headers["Content-Type"] = "POST", "application/json"
if #bodies == 1 then
  wrk.body = bodies[1]
else
  request = function() sent = sent %% #bodies + 1; return wrk.format(nil, nil, nil, bodies[sent]) end
end
function setup(thread) table.insert(threads, thread) end
function init() good, bad = 0, 0 end
if %s then
  function response(status) if status == 200 then good = good + 1 else bad = bad + 1 end end
end
function done(summary, latency)
  local counted, refused = 0, 0
  for _, thread in ipairs(threads) do
    counted, refused = counted + thread:get("good"), refused + thread:get("bad")
  end
  print(string.format("counted %%d %%d of %%d in %%d", counted, refused, summary.requests, summary.duration))
  print(string.format("errors %%d", summary.errors.status + summary.errors.connect + summary.errors.read + summary.errors.timeout))
end
"""


class Reading(NamedTuple):
    """200s and other replies a second, and the median latency of all in ms."""

    good_per_s: float
    bad_per_s: float
    p50_ms: float


def read(url: str, bodies: Sequence[bytes], connections: int, seconds: float, *, refusals: bool = False) -> Reading:
    """Post the bodies in turn, JSON without line breaks, for so many seconds.

    With `refusals`, replies are told apart by their status, which takes wrk longer; without, RuntimeError where one was no 200.
    """
    with tempfile.TemporaryDirectory() as folder:
        (lines := Path(folder) / "bodies").write_bytes(b"\n".join(bodies) + b"\n")
        (script := Path(folder) / "post.lua").write_text(SCRIPT % (lines, "true" if refusals else "false"))
        command = [
            "wrk",
            "-t1",
            f"-c{connections}",
            f"-d{max(1, round(seconds))}s",
            "--latency",
            "-s",
            str(script),
            url,
        ]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    half = re.search(r"50%\s+([\d.]+)(us|ms|s)\b", text)
    counted = re.search(r"counted (\d+) (\d+) of (\d+) in (\d+)\nerrors (\d+)", text)
    assert half is not None
    assert counted is not None
    good, bad, requests, microseconds, errors = map(int, counted.groups())
    if not refusals:
        if errors:
            raise RuntimeError(f"not every request was answered with 200:\n{text}")
        good = requests
    return Reading(good / microseconds * 1e6, bad / microseconds * 1e6, float(half[1]) * UNITS_MS[half[2]])
