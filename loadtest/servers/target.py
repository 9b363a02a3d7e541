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
    def authority(self) -> str:
        """`host:port`."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def origin(self) -> str:
        """`http://host:port`."""
        return f"http://{self.authority}"

    def info(self) -> dict[str, Any]:
        """`GET /info`; empty if the server has none. Raises TargetError if the server does not answer, or with something else."""
        try:
            reply = get(f"{self.origin}/info", 5)
        except OSError as error:
            reason = f"{self.origin} does not answer ({type(error).__name__})"
            raise TargetError(
                f"{reason}; start a server with phoenix-ranker serve, or in a checkout make serve"
            ) from error
        if reply.status_code != 200:
            return {}
        try:
            values: dict[str, Any] = json.loads(reply.text)
        except ValueError as error:
            raise TargetError(f"{self.origin} is no ranking server: its /info is no JSON") from error
        return values

    def answers(self, path: str = "/readyz") -> bool:
        """Whether a GET gets 200 now."""
        try:
            return get(f"{self.origin}{path}", 2).status_code == 200
        except OSError:
            return False

    def total(self, metric: str, **labels: str) -> float:
        """Sum of a metric over the series that carry all of `labels`. Raises OSError without an answer, ValueError without metrics."""
        reply = get(f"{self.origin}/metrics", 5)
        if reply.status_code != 200:
            raise ValueError(f"/metrics answers {reply.status_code}")
        return total(reply.text, metric, **labels)

    def request(self, body: bytes, headers: Mapping[str, str] | None = None) -> bytes:
        """A POST of a JSON body to this server, as bytes ready to send."""
        return post(self.authority, self.path, body, headers)


def total(exposition: str, metric: str, **labels: str) -> float:
    """Sum of a metric over the series that carry all of `labels`; 0 if there are none."""
    families = text_string_to_metric_families(exposition)
    samples = (sample for family in families for sample in family.samples)
    return sum(each.value for each in samples if each.name == metric and labels.items() <= each.labels.items())


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
