"""The measured server: its address, its `/info` and its `/metrics`."""

from __future__ import annotations

import http.client
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from prometheus_client.parser import text_string_to_metric_families

from loadtest.generate.payload import post
from loadtest.generate.traffic import ACTION_SHARES, TrafficSettings

Labels = tuple[tuple[str, str], ...]


class TargetError(RuntimeError):
    """The server cannot be measured; the message says why."""


class Answer(NamedTuple):
    """The reply to a GET."""

    status_code: int
    text: str


def get(url: str, timeout_seconds: float) -> Answer:
    """GET an http:// address. Raises OSError if nothing there speaks HTTP."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port or 80, timeout=timeout_seconds)
    try:
        connection.request("GET", parts._replace(scheme="", netloc="").geturl() or "/")
        reply = connection.getresponse()
        return Answer(reply.status, reply.read().decode(errors="replace"))
    except http.client.HTTPException as error:
        raise ConnectionError(str(error)) from error
    finally:
        connection.close()


@dataclass(frozen=True, slots=True)
class Target:
    """A server's address. `path` is where requests go."""

    host: str
    port: int
    path: str = "/rank"

    @classmethod
    def parse(cls, url: str) -> Target:
        """From `http://host:port[/path]`. Raises TargetError for anything else."""
        parts = urlsplit(url)
        if parts.scheme != "http" or not parts.hostname:
            raise TargetError(f"{url!r} is not an http:// address")
        return cls(parts.hostname, parts.port or 80, parts.path.rstrip("/") or "/rank")

    @property
    def origin(self) -> str:
        """`http://host:port`."""
        return f"http://{self.host}:{self.port}"

    def info(self) -> dict[str, Any]:
        """`GET /info`; empty if the server has none. Raises TargetError if the server does not answer."""
        try:
            reply = get(f"{self.origin}/info", 5)
        except OSError as error:
            reason = f"{self.origin} does not answer ({type(error).__name__})"
            raise TargetError(
                f"{reason}; start a server with phoenix-ranker serve, or in a checkout make serve"
            ) from error
        if reply.status_code != 200:
            return {}
        values: dict[str, Any] = json.loads(reply.text)
        return values

    def scrape(self) -> MetricsSnapshot:
        """`GET /metrics`. Raises OSError without an answer, ValueError if it is not a Prometheus exposition."""
        reply = get(f"{self.origin}/metrics", 5)
        if reply.status_code != 200:
            raise ValueError(f"/metrics answers {reply.status_code}")
        return MetricsSnapshot.parse(reply.text)

    def metrics(self) -> MetricsSnapshot | None:
        """The same; None if the metrics cannot be read."""
        try:
            return self.scrape()
        except (OSError, ValueError):
            return None

    def request(self, body: bytes, headers: Mapping[str, str] | None = None) -> bytes:
        """A POST of a JSON body to this server, as bytes ready to send."""
        return post(f"{self.host}:{self.port}", self.path, body, headers)


@dataclass(frozen=True, slots=True)
class MetricsSnapshot:
    """Samples of a Prometheus exposition: name → labels → value."""

    values: dict[str, dict[Labels, float]]

    @classmethod
    def parse(cls, text: str) -> MetricsSnapshot:
        """Parse an exposition. Raises ValueError if the text is not one."""
        values: dict[str, dict[Labels, float]] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                values.setdefault(sample.name, {})[tuple(sorted(sample.labels.items()))] = sample.value
        return cls(values)

    def since(self, before: MetricsSnapshot) -> MetricsSnapshot:
        """Increases of counters and buckets since `before`. The result is meaningless for gauges."""
        return MetricsSnapshot(
            {
                name: {labels: value - before.values.get(name, {}).get(labels, 0.0) for labels, value in series.items()}
                for name, series in self.values.items()
            }
        )

    def total(self, name: str, **labels: str) -> float:
        """Sum over the series that carry all of `labels`."""
        return sum(
            value for having, value in self.values.get(name, {}).items() if labels.items() <= dict(having).items()
        )


def fit_traffic(settings: TrafficSettings, info: Mapping[str, Any]) -> TrafficSettings:
    """Fit traffic to the server's `/info`: action names, and unless `as_is`, the window and the limit of candidates."""
    window = _find(info, "history_length")
    most = _find(info, "max_candidates")
    names = info.get("actions")
    changes: dict[str, Any] = {}
    if isinstance(window, int) and not settings.as_is:
        changes["history_window"] = window
    if isinstance(most, int) and not settings.as_is:
        changes["max_candidates"] = min(most, settings.max_candidates)
    if isinstance(names, list) and names and not {name for name, _ in ACTION_SHARES} <= set(names):
        changes["actions"] = tuple(str(index) for index in range(len(names)))
    return replace(settings, **changes)


def _find(values: Any, key: str) -> Any:
    if isinstance(values, Mapping):
        if key in values:
            return values[key]
        for value in values.values():
            found = _find(value, key)
            if found is not None:
                return found
    return None
