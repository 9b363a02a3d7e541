"""Replays 987 requests that were recorded before the service became a FastAPI application: the same status, code and numbers.

`recording.jsonl.gz` was made at 913ff3a0 from the demo in float32: examples, bad requests, mutated and drawn bodies, each with its
reply. What may differ is said here, rule by rule; see docs/decisions/http-stack.md.
"""

from __future__ import annotations

import base64
import gzip
import json
import math
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.app.api.live import demo

RECORDING = Path(__file__).with_name("recording.jsonl.gz")
TOLERANCE = 2e-5  # another processor has other vectors, and so another last bit
GONE = {406}  # statuses that have ended: the reply is sent whatever Accept says
FREE = (
    "detail",
    "message",
    "title",
    "errors",
    "request_id",
    "context",
    "_ms",
)  # sentences, names of handles and times may change
DIFFER = {  # a request by its number: why its reply is another one
    28: "posts created more than five minutes after impression_ts pass no age limit",
    29: "posts created more than five minutes after impression_ts pass no age limit",
    361: "a key that stands twice: msgspec keeps the last one, and this one is unknown",
    783: "an action named twice in an event is refused",
    784: "an action named twice in an event is refused",
    785: "an action named twice in an event is refused",
    786: "an action named twice in an event is refused",
    916: "fields that the Open Inference Protocol does not know are passed over",
    948: "fields that the Open Inference Protocol does not know are passed over",
    958: "fields that the Open Inference Protocol does not know are passed over",
}
BY_UVICORN = "Invalid HTTP request received."  # its own words for a head that is no HTTP, with status 400


def recorded() -> list[dict[str, Any]]:
    return [json.loads(line) for line in gzip.decompress(RECORDING.read_bytes()).splitlines()]


def send(client: httpx.Client, call: dict[str, Any]) -> httpx.Response:
    body = base64.b64decode(call["body64"]) if "body64" in call else call["body"].encode()
    return client.request(call["method"], call["path"], content=body or None, headers=call["headers"])


@pytest.mark.slow
def test_every_recorded_request_gets_its_recorded_reply(tmp_path: Path) -> None:
    with demo(tmp_path, dtype="float32") as live, httpx.Client(base_url=live.url, timeout=60) as client:
        differences = [
            f"{number} {call['source']} {call['path'][:60]}: {problem}"
            for number, call in enumerate(recorded())
            if number not in DIFFER and (problem := difference(call, send(client, call)))
        ]
    assert not differences, f"{len(differences)} differ:\n" + "\n".join(differences)


def difference(call: dict[str, Any], reply: httpx.Response) -> str:
    """What is not as it was recorded and may not differ; empty if nothing is."""
    was, now = call["status"], reply.status_code
    if was in GONE:
        return "" if now < 500 else f"was {was}, is {now}"
    content = reply.json() if "json" in reply.headers.get("content-type", "") else None
    code = content.get("code") if isinstance(content, dict) and now != 200 else None
    if now == was == 400 and reply.text == BY_UVICORN:
        return ""
    if now != was or (was != 200 and code != call["code"]):
        return f"was {was} {call.get('code')}, is {now} {code}: {reply.text[:200]}"
    if was == 200 and "reply" in call:
        return unlike(call["reply"], content)
    return ""


def unlike(was: Any, now: Any, path: str = "") -> str:
    """The first place where a reply says something else. Fields that the recording lacks are new, and no difference."""
    if isinstance(was, dict) and isinstance(now, dict):
        kept = [key for key in was if not key.endswith(FREE)]
        return next((told for key in kept if (told := unlike(was[key], now.get(key), f"{path}.{key}"))), "")
    if isinstance(was, list) and isinstance(now, list) and len(was) == len(now):
        return next(
            (
                told
                for place, pair in enumerate(zip(was, now, strict=True))
                if (told := unlike(*pair, f"{path}[{place}]"))
            ),
            "",
        )
    if isinstance(was, float | int) and isinstance(now, float | int):
        return "" if math.isclose(was, now, rel_tol=TOLERANCE, abs_tol=TOLERANCE) else f"{path}: was {was}, is {now}"
    return "" if was == now else f"{path}: was {was!r:.80}, is {now!r:.80}"
