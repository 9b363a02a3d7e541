"""The server under load: its address, its `/info` and its `/metrics`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import urlsplit

import httpx

from loadtest.generate.traffic import ACTION_SHARES, TrafficSettings
from loadtest.server import total

ENDPOINT = re.compile(r"/(rank(/[^/]+)?|retrieve|recommend|explain)$")


class TargetError(RuntimeError):
    """The server cannot be measured; the message says why."""


@dataclass(frozen=True, slots=True)
class Target:
    """A server's address. `base` is the path below which it is, empty or with a slash before; `endpoint`, below that, is where requests
    go."""

    host: str
    port: int
    base: str = ""
    endpoint: str = "/rank"

    @classmethod
    def parse(cls, url: str) -> Target:
        """From `http://host:port[/base][/endpoint]`. Raises TargetError for anything else."""
        parts = urlsplit(url)
        if parts.scheme != "http" or not parts.hostname:
            raise TargetError(f"{url!r} is not an http:// address")
        path = parts.path.rstrip("/")
        named = ENDPOINT.search(path)
        base, endpoint = (path, "/rank") if named is None else (path[: named.start()], named[0])
        return cls(parts.hostname, parts.port or 80, base, endpoint)

    @property
    def origin(self) -> str:
        """`http://host:port`."""
        return f"http://[{self.host}]:{self.port}" if ":" in self.host else f"http://{self.host}:{self.port}"

    @property
    def url(self) -> str:
        """`http://host:port[/base]`."""
        return self.origin + self.base

    def info(self) -> dict[str, Any]:
        """`GET /info`; empty where there is none. Raises TargetError if the server does not answer."""
        try:
            reply = httpx.get(f"{self.url}/info", timeout=5)
        except httpx.HTTPError as error:
            raise TargetError(
                f"{self.url} does not answer ({type(error).__name__}); start one with make serve"
            ) from error
        values: dict[str, Any] = reply.json() if reply.status_code == 200 else {}
        return values

    def total(self, metric: str) -> float:
        """The sum of a metric over its series; 0 if there are none. Raises httpx.HTTPError without an answer."""
        return total(httpx.get(f"{self.url}/metrics", timeout=5).text, metric)

    def request(self, body: bytes, headers: Mapping[str, str] | None = None) -> bytes:
        """A POST of a JSON body to this server, as bytes ready to send."""
        fields = {
            "Host": self.origin.removeprefix("http://"),
            "Content-Type": "application/json",
            "Content-Length": str(len(body)),
        }
        lines = [
            f"POST {self.base}{self.endpoint} HTTP/1.1",
            *(f"{name}: {value}" for name, value in (fields | dict(headers or {})).items()),
        ]
        return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def fit_traffic(settings: TrafficSettings, info: Mapping[str, Any]) -> TrafficSettings:
    """Fit traffic to the server's `/info`: action names and, unless `as_is`, the window and the limit of candidates. Raises TargetError if
    every request is to have the same number of candidates, and the server takes fewer."""
    changes: dict[str, Any] = {}
    window, most = (
        info.get(part, {}).get(name)
        for part, name in (("architecture", "history_length"), ("limits", "max_candidates"))
    )
    if window and not settings.as_is:
        changes["history_window"] = window
    smallest = min(band.low for band in settings.candidates.bands)
    if most and not settings.as_is and most < smallest == settings.max_candidates:
        raise TargetError(f"the server takes at most {most} candidates a request, and each is to have {smallest}")
    if most and not settings.as_is:
        changes["max_candidates"] = min(most, settings.max_candidates)
    names = info.get("actions") or []
    if names and not {name for name, _ in ACTION_SHARES} <= set(names):
        changes["actions"] = tuple(str(index) for index in range(len(names)))
    return replace(settings, **changes)
