"""Every setting, with those of `app.limits`, declared once with its documentation. `app.environment` reads them.

After "Default:" stands why the default is what it is. `make files` writes the table in docs/operations.md from these declarations.
The model's architecture comes with the checkpoint and is no setting.
"""

from __future__ import annotations

import hashlib
import itertools
import re
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, SecretStr, field_validator, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from app.feeds.source import parts_of
from app.limits import Batching, Budgets, Cache, Deadline, Group, Limits, Queue

__all__ = ["Batching", "Budgets", "Cache", "Deadline", "Group", "Limits", "Queue", "Settings", "SettingsProblem"]

PREFIX = "RANKER_"
ADMIN_HOST = "127.0.0.1"
LOOPBACK = ("localhost", "127.0.0.1", "[::1]")
ANY_ADDRESS = {"0.0.0.0", "::", ""}  # noqa: S104  # compared with, not bound


class SettingsProblem(ValueError):
    """A setting that cannot be used; the message names it and says what is wrong."""


class Retrieval(Group):
    """Finding posts for a user in a corpus. Without a checkpoint and a corpus, /retrieve and /recommend answer 503."""

    checkpoint: Path | None = None
    """Directory of the retrieval checkpoint (the two towers). Default: none; most services only rank."""
    corpus: Path | None = None
    """Directory of the corpus: posts as vectors of that checkpoint. Default: none; set both or neither."""
    feed: SecretStr | None = None
    """[Where changes of posts come from](scaling.md#changes-of-posts): `redis://HOST:PORT/STREAM` or `kafka://HOST:PORT/TOPIC`. Default:
    none; changes come by the admin interface, to this process alone."""
    feed_lag_seconds: float = Field(default=300.0, gt=0)
    """How far behind its feed this process may be and be ready. Default: an outage of the feed of five minutes takes no replica away."""

    @model_validator(mode="after")
    def _whole(self) -> Retrieval:
        if (self.checkpoint is None) != (self.corpus is None):
            raise ValueError("retrieval.checkpoint and retrieval.corpus belong together: set both or neither")
        if self.feed is not None:
            if self.corpus is None:
                raise ValueError(
                    "retrieval.feed needs retrieval.checkpoint and retrieval.corpus: it changes that corpus"
                )
            try:
                parts_of(self.feed.get_secret_value())
            except ValueError as error:
                raise ValueError(f"retrieval.feed {error}") from None
        return self


class Drain(Group):
    """What happens between SIGTERM and the end."""

    delay_seconds: float = Field(default=5.0, ge=0)
    """How long requests are still taken after readiness has become 503. Default: a balancer that probes every two seconds notices."""
    timeout_seconds: float = Field(default=30.0, gt=0)
    """How long admitted requests may then take. Default: the longest likely deadline. A supervisor must wait for longer than both."""


class Connections(Group):
    """How long the server waits for a client."""

    header_seconds: float = Field(default=5.0, gt=0)
    """From the connect or the first byte to the end of the headers. A body that gets less than 4 KiB in four fifths of this is cut off.
    Default: enough for a slow mobile network; a client that stalls is gone within 10 s."""
    body_seconds: float = Field(default=30.0, gt=0)
    """From the first byte to the end of the body; after slow headers, at least a second. Default: the longest body at 280 kbit/s."""
    keep_alive_seconds: float = Field(default=75.0, gt=0)
    """How long an idle connection is kept after a reply. Default: longer than the 60 s of common balancers, so that they close first."""

    @property
    def stall_seconds(self) -> float:
        """A body that gets less than 4 KiB in this time makes no progress."""
        return 0.8 * self.header_seconds


NO_KEY = "it names no key, and everybody could ask: remove it to serve without keys"


class Auth(Group):
    """API keys. Without any, no key is asked for."""

    keys: dict[str, SecretStr] = Field(default={})
    """Name of the caller → SHA-256 of its key in hex: `{"feed": "9f86d0…"}`. Only the name is logged. Default: none, everybody may ask."""

    @field_validator("keys")
    @classmethod
    def _hashes(cls, keys: dict[str, SecretStr]) -> dict[str, SecretStr]:
        if not keys:
            raise ValueError(NO_KEY)
        for name, digest in keys.items():
            if not re.fullmatch(r"[A-Za-z0-9_.-]{1,64}", name):
                raise ValueError("a key's name is 1 to 64 letters, digits, dots, dashes or underscores")
            _require_sha256(digest, f"the key named {name}")
        return {name: SecretStr(digest.get_secret_value().lower()) for name, digest in keys.items()}


class Admin(Group):
    """The admin interface, on 127.0.0.1. It exists only where a port and a token are set."""

    port: int | None = Field(default=None, ge=0, le=65535)
    """Port of the admin interface. Default: none; it is off unless it is needed."""
    token_sha256: SecretStr | None = None
    """SHA-256 of the bearer token in hex. Default: none. The configuration never holds the token itself."""
    root: Path | None = None
    """A reload may name checkpoints below this. Default: the parent of the first checkpoint, or that itself if the parent is `/`."""

    @model_validator(mode="after")
    def _guarded(self) -> Admin:
        if self.token_sha256 is not None:
            _require_sha256(self.token_sha256, "admin.token_sha256")
        elif self.port is not None:
            raise ValueError("admin.port needs admin.token_sha256: the admin interface is never open")
        return self


class Probes(Group):
    """A port of its own for probes and metrics."""

    host: str = "127.0.0.1"
    """Address of the probes' port. Default: as for `HOST`."""
    port: int | None = Field(default=None, ge=0, le=65535)
    """With a port, probes, /info and /metrics answer there, and /metrics no longer on the main port. Default: none; one port is simpler."""


class Explore(Group):
    """Pages and replies that show people why a ranking is as it is."""

    enabled: bool | None = None
    """Whether /explore and /explain answer. Default: only where `HOST` is loopback: an [explanation](explore.md) costs as much as a hundred
    requests."""


class Shadow(Group):
    """A second checkpoint beside the first, for figures from live requests or as the B of an A/B split."""

    checkpoint: Path | None = None
    """Directory of the second checkpoint. Default: none; it takes as much memory again, see [below](#a-second-checkpoint)."""
    share: float = Field(default=0.1, ge=0, le=1)
    """Share of answered requests that it scores too, for figures; none while `SPLIT__USERS` is above 0. Default: figures within minutes."""


class Split(Group):
    """An A/B split by user between both checkpoints."""

    users: float = Field(default=0.0, ge=0, le=1)
    """Share of users whom the second checkpoint answers. A user whom it answered stays with it when the share grows. Default: no split."""
    experiment: str = Field(default="", pattern=r"^[\x20-\x7e]{0,64}$")
    """Name that users are hashed with: another name draws other users. Default: none. Name each experiment."""


class Grpc(Group):
    """The Open Inference Protocol over gRPC; needs the `grpc` extra."""

    port: int | None = Field(default=None, ge=0, le=65535)
    """Port of gRPC, on `HOST`. Default: none; most callers speak HTTP."""


class Reload(Group):
    """How checkpoints are loaded, and when the process looks for a new one."""

    watch_seconds: float = Field(default=0.0, ge=0)
    """How often the checkpoint's directory is checked for a new manifest; 0 means never. Default: reloads are asked for."""
    timeout_seconds: float = Field(default=900.0, gt=0)
    """How long a load may take, the first one too, before it is given up. Default: a hundred gigabytes from a slow disk."""


class Logs(Group):
    """What is written to standard error."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    """Least severe level that is written. Default: one line a request."""
    format: Literal["auto", "json", "console"] = "auto"
    """One JSON object a line, or lines for people. Default: `auto` is for people on a terminal, else JSON."""
    success_sample: float = Field(default=1.0, ge=0, le=1)
    """Share of successful requests that get a line; failures always do. Default: all. Lower it where the volume costs too much."""


class Tracing(Group):
    """OpenTelemetry spans; needs the `tracing` extra. The collector and the sampling are set with OpenTelemetry's own variables."""

    enabled: bool = False
    """Whether spans are made. Set the collector in `OTEL_EXPORTER_OTLP_TRACES_ENDPOINT`, and the share of requests without a sampled parent
    in `OTEL_TRACES_SAMPLER_ARG` with `OTEL_TRACES_SAMPLER=parentbased_traceidratio`. Default: off costs nothing."""


class Settings(BaseSettings):
    """All settings. Read once, at start, by `load_settings`; then passed down."""

    model_config = SettingsConfigDict(
        env_prefix=PREFIX,
        env_nested_delimiter="__",
        env_ignore_empty=True,
        extra="forbid",
        frozen=True,
        use_attribute_docstrings=True,
        cli_prog_name="python -m app",
        cli_kebab_case=True,
        cli_hide_none_type=True,
        cli_avoid_json=True,
        cli_exit_on_error=False,
    )

    host: str = "127.0.0.1"
    """Address to listen on. Default: the service is reachable from outside only by decision."""
    hosts: str = Field(default="", pattern=r"^[^\s/@]*$")
    """Names in `Host` that the service answers to, separated by commas; `*`: any. Default: loopback's names where `HOST` is loopback, so
    that no web page can reach it by a rebound name; any name elsewhere, since Kubernetes' probes ask by a pod's address."""
    port: int = Field(default=8000, ge=0, le=65535)
    """Port of the service; 0 takes a free one and logs it. Default: one service a machine."""
    checkpoint: Path = Path("weights/demo")
    """Checkpoint directory to serve. Default: the one in the repository, so that a first start works."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the model runs and the corpus is searched. Default: CUDA where there is a GPU."""
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """Data type of the trunk. Default: the faster one on this device; `/info` says which and why."""
    backend: Literal["auto", "dense", "native", "native-avx2", "torch"] = "auto"
    """Engine that runs the model. `dense` is the slow reference. `native` uses the processor's widest vectors; `native-avx2` gives every
    x86-64 machine of a mixed fleet the same kernel. Default: the fastest that runs here."""
    candidate_positions: Literal["shared", "sequential"] = "shared"
    """`sequential` gives the published pipeline's numbers, which depend on a candidate's slot. Default: scores do not depend on it."""
    threads: int = Field(default=0, ge=0, le=1024)
    """CPU threads of the engine; 0: as many as it may use. Default: it knows its control group's limit. Set it where cores are shared."""
    fronts: int = Field(default=0, ge=0, le=64)
    """Front processes before one engine process; 0: one process. Default: enough until HTTP fills a core: [more](#several-processes)."""
    engine_loss: Literal["restart", "exit"] = "restart"
    """With fronts, what happens when the engine process ends: it is started again, or all exit with code 70. Default: fronts answer 503
    until it is back."""

    limits: Limits = Limits()
    budgets: Budgets = Budgets()
    queue: Queue = Queue()
    batching: Batching = Batching()
    cache: Cache = Cache()
    retrieval: Retrieval = Retrieval()
    deadline: Deadline = Deadline()
    drain: Drain = Drain()
    connections: Connections = Connections()
    auth: Auth = Auth()
    admin: Admin = Admin()
    probes: Probes = Probes()
    explore: Explore = Explore()
    shadow: Shadow = Shadow()
    split: Split = Split()
    grpc: Grpc = Grpc()
    reload: Reload = Reload()
    logs: Logs = Logs()
    tracing: Tracing = Tracing()

    @model_validator(mode="after")
    def _ports_of_their_own(self) -> Settings:
        places = {
            "port": (self.host, self.port),
            "probes.port": (self.probes.host, self.probes.port),
            "grpc.port": (self.host, self.grpc.port),
            "admin.port": (ADMIN_HOST, self.admin.port),
        }
        for (name, (host, port)), (other, (other_host, other_port)) in itertools.combinations(places.items(), 2):
            if port and port == other_port and (host == other_host or {host, other_host} & ANY_ADDRESS):
                raise ValueError(f"{name} and {other} are both {port}: each needs a port of its own")
        return self

    @model_validator(mode="after")
    def _split_between_two(self) -> Settings:
        if self.split.users and self.shadow.checkpoint is None:
            raise ValueError("split.users needs shadow.checkpoint: the second checkpoint")
        return self

    def addresses(self) -> list[tuple[str, int]]:
        """Where to listen: the service, then probes and admin where they have ports of their own."""
        sides = [(self.probes.host, self.probes.port), (ADMIN_HOST, self.admin.port)]
        return [(self.host, self.port), *((host, port) for host, port in sides if port is not None)]

    @property
    def explores(self) -> bool:
        """Whether /explore and what explains a ranking are served."""
        if self.explore.enabled is not None:
            return self.explore.enabled
        return is_loopback(self.host)

    def names_of(self, host: str, *, is_main: bool = True) -> list[str]:
        """The names that a port on this address answers to, none for any. HOSTS are the main port's, and more for others on loopback."""
        names = [name for name in self.hosts.split(",") if name and (is_main or is_loopback(host))]
        if "*" in names:
            return []
        if names and is_main:
            return names
        return [*names, *LOOPBACK, host] if is_loopback(host) else []

    def effective(self) -> dict[str, Any]:
        """Every value in force as plain JSON, secrets as asterisks: for the start-up log."""
        return self.model_dump(mode="json")


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches that address."""
    return host in ("localhost", "::1") or host.startswith("127.")


def _require_sha256(digest: SecretStr, what: str) -> None:
    if not re.fullmatch(r"[0-9a-fA-F]{64}", digest.get_secret_value()):
        raise ValueError(f"{what} must be a SHA-256 in hex, 64 digits: printf %s KEY | sha256sum")
    if digest.get_secret_value().lower() == hashlib.sha256().hexdigest():
        raise ValueError(f"{what} is the SHA-256 of nothing, which whoever sends no key would match: was KEY set?")
