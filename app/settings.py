"""Everything an operator may set, and the only reader of the environment. Not for the architecture: that comes with a checkpoint."""

from __future__ import annotations

import difflib
import itertools
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SecretStr,
    ValidationError,
    field_serializer,
    field_validator,
    model_validator,
)
from pydantic_settings import BaseSettings, SettingsConfigDict, SettingsError

PREFIX = "RANKER_"
MIB = 2**20
HIDDEN = "**********"  # as pydantic shows a secret
LOOPBACK = ("localhost", "127.0.0.1", "[::1]")
ANY_ADDRESS = {"0.0.0.0", "::", ""}  # noqa: S104  # compared with, not bound


class SettingsProblem(ValueError):
    """A setting that cannot be used; the message names it and says what is wrong."""


class Group(BaseModel):
    """A group of settings: `RANKER_GROUP__NAME` in the environment, `--group.name` on the command line."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class Limits(Group):
    """What one request may be. A request beyond these gets 413."""

    max_body_bytes: int = Field(default=MIB, ge=1024)
    """Longest body in bytes, counted while it is read."""
    max_candidates: int = Field(default=4096, ge=1)
    """Most candidates in one request."""
    max_history: int = Field(default=2048, ge=1)
    """Most history items in one request; those beyond the model's window are dropped, oldest first."""
    max_values: int = Field(default=30_000, ge=100)
    """Most values in one request, each list, object and escaped character counted too."""
    max_batch_requests: int = Field(default=64, ge=1)
    """Most requests in one call of /rank/batch."""
    max_batch_candidates: int = Field(default=16_384, ge=1)
    """Most candidates in one call of /rank/batch, in all its requests; one that goes beyond gets 413 in its place."""
    max_retrieved: int = Field(default=2000, ge=1)
    """Most posts that one request may retrieve."""
    max_excluded: int = Field(default=10_000, ge=0)
    """Most post ids that one request may exclude by name."""


class Budgets(Group):
    """What all callers together may take of the process. Beyond these, 429 or no connection."""

    connections: int = Field(default=2048, ge=1)
    """Connections open at once; further ones are closed as soon as they come. Those of the probes' port are not counted."""
    body_bytes: int = Field(default=64 * MIB, ge=1024)
    """Bytes of bodies that are being read; a request that goes beyond gets 429."""
    reply_bytes: int = Field(default=64 * MIB, ge=1024)
    """Bytes of replies that clients have left unread; beyond it, who has done so longest is cut off."""
    batch_candidates: int = Field(default=65_536, ge=1)
    """Candidates in all calls of /rank/batch that are being answered; a request that goes beyond gets 429 in its place."""
    excluded_ids: int = Field(default=2**20, ge=1)
    """Post ids that all searches which wait exclude, by name or as history; a request that goes beyond gets 429."""
    changes: int = Field(default=4, ge=1)
    """Changes of posts that wait or are made; a further one gets 429."""


class Queue(Group):
    """How much admitted work may wait for the engine. Beyond it, 429."""

    max_candidates: int = Field(default=32_768, ge=1)
    """Most candidates waiting."""
    max_context_tokens: int = Field(default=262_144, ge=1)
    """Most context tokens (user and history) waiting."""
    max_requests: int = Field(default=4096, ge=1)
    """Most requests waiting."""
    max_wait_seconds: float = Field(default=0.5, ge=0)
    """Longest predicted wait for the first forward; 0 leaves it unbounded. Joining the next forward is not refused for it."""
    max_share_per_key: float = Field(default=0.5, gt=0, le=1)
    """Share of the queue that the requests of one API key may fill."""
    key_candidates_per_second: float = Field(default=0.0, ge=0)
    """Rate limit of one API key, in candidates; bursts of two seconds' worth are fine. 0 sets none."""
    stall_seconds: float = Field(default=4.0, gt=0)
    """With work queued and no forward finished for this long, readiness is lost."""
    stall_exit_seconds: float = Field(default=30.0, gt=0)
    """After this long, everyone who waits is answered and the process exits, for its supervisor to start it again."""


class Batching(Group):
    """How waiting requests share a forward."""

    enabled: bool = True
    """Whether requests share a forward at all; off is for comparison."""
    max_requests: int = Field(default=64, ge=1)
    """Requests in one forward."""
    max_candidates: int = Field(default=2048, ge=1)
    """Candidates in one forward."""
    max_context_tokens: int = Field(default=16_384, ge=1)
    """Context tokens in one forward."""
    chunk_candidates: int = Field(default=512, ge=1)
    """A longer candidate list is cut into chunks of this many, served in turn with other requests."""
    window_seconds: float = Field(default=0.0, ge=0, le=1)
    """How long a busy engine lets the next forward grow; an idle engine never waits."""

    @property
    def requests(self) -> int:
        """Requests in one forward, as `enabled` allows."""
        return self.max_requests if self.enabled else 1


class Cache(Group):
    """The context cache: keys and values of users seen before."""

    bytes: int | None = Field(default=None, ge=0)
    """Budget in bytes on the engine's device; 0 turns the cache off, none is 256 MiB on a CPU and an eighth of a GPU's memory."""

    @property
    def host_bytes(self) -> int:
        """The most that it takes where it is on the CPU."""
        return 256 * MIB if self.bytes is None else self.bytes


class Retrieval(Group):
    """Posts for a user, out of a corpus. Without a checkpoint and a corpus, /retrieve and /recommend answer 503."""

    checkpoint: Path | None = None
    """Retrieval checkpoint directory: the two towers."""
    corpus: Path | None = None
    """Corpus directory: posts as vectors of that checkpoint."""
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """What the user tower computes in; `auto` is float32."""
    cache_bytes: int = Field(default=16 * MIB, ge=0)
    """Budget in bytes for user vectors seen before; 0 keeps none."""
    batch_requests: int = Field(default=32, ge=1)
    """Requests that share one scan of the corpus."""
    max_waiting: int = Field(default=1024, ge=1)
    """Most searches waiting; beyond it, 429."""
    compact_rows: int = Field(default=50_000, ge=0)
    """Posts deleted, replaced or new since the corpus was written, after which it is written anew; 0: only when it is asked for."""

    @model_validator(mode="after")
    def _whole(self) -> Retrieval:
        if (self.checkpoint is None) != (self.corpus is None):
            raise ValueError("retrieval.checkpoint and retrieval.corpus belong together: set both or neither")
        return self


class Deadline(Group):
    """How long a request may take, from its first byte read to its scores. The headers may ask for less, or for more up to the limit."""

    default_seconds: float = Field(default=10.0, gt=0)
    """For a request that names no deadline."""
    max_seconds: float = Field(default=60.0, gt=0)
    """No request gets longer, whatever its headers say."""


class Drain(Group):
    """What happens between SIGTERM and the end."""

    delay_seconds: float = Field(default=5.0, ge=0)
    """How long readiness is already 503 while requests are still taken, so that balancers can notice."""
    timeout_seconds: float = Field(default=30.0, gt=0)
    """How long admitted requests may take to finish after that."""


class Connections(Group):
    """How patient the server is with a socket."""

    header_seconds: float = Field(default=5.0, gt=0)
    """From the first byte (or the connect) to the end of the headers."""
    body_seconds: float = Field(default=30.0, gt=0)
    """From the first byte to the end of the body, as long as it makes progress; after slow headers, at least a second for the body."""
    stall_seconds: float = Field(default=4.0, gt=0)
    """A body of which less than 4 KiB arrive in so long makes no progress."""
    keep_alive_seconds: float = Field(default=75.0, gt=0)
    """How long an idle connection is kept after a reply; longer than the balancer's own idle time."""
    max_header_bytes: int = Field(default=32_768, ge=1024)
    """All headers of a request together."""
    held_refusals: int = Field(default=1024, ge=0)
    """Most 429s that wait a quarter of a second because their callers were refused within the last second and sent again; 0: none."""
    backlog: int = Field(default=2048, ge=1)
    """Connections that may wait to be accepted."""


class Auth(Group):
    """API keys. Without any, everybody may ask."""

    keys: dict[str, SecretStr] = Field(default={})
    """Name of the caller → SHA-256 of its key in hex: `{"feed": "9f86d0…"}`. The name appears in logs, the key nowhere."""

    @field_validator("keys")
    @classmethod
    def _hashes(cls, keys: dict[str, SecretStr]) -> dict[str, SecretStr]:
        for name, digest in keys.items():
            if not re.fullmatch(r"[A-Za-z0-9_.-]{1,64}", name):
                raise ValueError("a key's name is 1 to 64 letters, digits, dots, dashes or underscores")
            _require_sha256(digest, f"the key named {name}")
        return {name: SecretStr(digest.get_secret_value().lower()) for name, digest in keys.items()}


class Admin(Group):
    """The admin interface. It exists only where a port and a token are set."""

    host: str = "127.0.0.1"
    """Address to bind: keep it on loopback."""
    port: int | None = Field(default=None, ge=0, le=65535)
    """Port of its own; none means no admin interface."""
    token_sha256: SecretStr | None = None
    """SHA-256 of the bearer token, in hex."""
    root: Path | None = None
    """Directory below which a reload may name checkpoints; by default the parent of the first checkpoint, that itself where it is `/`."""

    @model_validator(mode="after")
    def _guarded(self) -> Admin:
        if self.token_sha256 is not None:
            _require_sha256(self.token_sha256, "admin.token_sha256")
        elif self.port is not None:
            raise ValueError("admin.port needs admin.token_sha256: the admin interface is never open")
        return self


class Probes(Group):
    """Where probes and metrics answer besides the main port."""

    host: str = "127.0.0.1"
    """Address to bind."""
    port: int | None = Field(default=None, ge=0, le=65535)
    """With a port, probes, /info and /metrics answer there, and /metrics no longer on the main one."""


class Explore(Group):
    """What shows why a ranking is as it is, for people."""

    enabled: bool | None = None
    """Whether /explore and /explain answer; when not set, where HOST is a loopback address."""
    max_candidates: int = Field(default=32, ge=1)
    """Most candidates that one request may have explained."""
    max_events: int = Field(default=256, ge=0)
    """Most history items that an explanation leaves out one by one, the newest."""
    concurrent: int = Field(default=1, ge=1)
    """Explanations that are computed at once; a further one gets 429."""
    deadline_seconds: float = Field(default=10.0, gt=0)
    """How long an explanation may take. The headers may ask for less."""


class Shadow(Group):
    """A second checkpoint beside the first: for figures from live requests, or as the B of an A/B split."""

    checkpoint: Path | None = None
    """Checkpoint directory of the second one; none: there is no second one."""
    share: float = Field(default=0.1, ge=0, le=1)
    """Share of answered requests that it scores too, for figures alone. With SPLIT__USERS above 0 it scores none."""
    max_waiting: int = Field(default=16, ge=1)
    """Answered requests that wait to be scored by it; a further one is dropped."""
    max_wait_seconds: float = Field(default=1.0, gt=0)
    """Those that wait longer than this for a moment without requests are dropped."""


class Split(Group):
    """An A/B split by user between both checkpoints."""

    users: float = Field(default=0.0, ge=0, le=1)
    """Share of users whom the second checkpoint answers. Users whom it answered stay with it when this grows."""
    experiment: str = Field(default="", pattern=r"^[\x20-\x7e]{0,64}$")
    """Name that users are hashed with: another name draws other users."""


class Grpc(Group):
    """The Open Inference Protocol over gRPC; needs the `grpc` extra."""

    max_calls: int = Field(default=64, ge=1)
    """Calls at once, and on one connection a quarter of it; further ones are refused unread."""
    max_connections: int = Field(default=256, ge=1)
    """Connections at once; further ones are closed as they come."""

    host: str = "127.0.0.1"
    """Address to bind."""
    port: int | None = Field(default=None, ge=0, le=65535)
    """Port of its own; none means no gRPC."""


class Reload(Group):
    """How checkpoints are loaded, and when a new one is looked for without being asked."""

    watch_seconds: float = Field(default=0.0, ge=0)
    """How often the checkpoint's directory is checked for a new manifest; 0 means never."""
    timeout_seconds: float = Field(default=900.0, gt=0)
    """How long a load may take, the first one too, until it is given up."""


class Logs(Group):
    """What is written to standard error."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    """Least severe level that is written."""
    format: Literal["auto", "json", "console"] = "auto"
    """One JSON object a line, or lines for people; `auto` is for people on a terminal."""
    success_sample: float = Field(default=1.0, ge=0, le=1)
    """Share of successful requests that get a line; failures always do."""
    buffer_bytes: int = Field(default=2**20, ge=2**14)
    """Lines that may wait for the reader of standard error; beyond it lines are dropped and counted, those of successes first."""


class Tracing(Group):
    """OpenTelemetry spans; needs the `tracing` extra."""

    enabled: bool = False
    """Whether spans are made."""
    endpoint: str | None = None
    """OTLP over HTTP, such as http://collector:4318/v1/traces. Where settings are shown, user, password and query are not."""
    sample_ratio: float = Field(default=1.0, ge=0, le=1)
    """Share of requests without a sampled parent that are traced."""

    @field_serializer("endpoint")
    def _without_credentials(self, endpoint: str | None) -> str | None:
        if endpoint is None:
            return None
        shown = re.sub(r"^(\w+://)?.*@", rf"\1{HIDDEN}@", endpoint)
        return re.sub(r"[?#].*", f"?{HIDDEN}", shown)


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
    )

    host: str = "127.0.0.1"
    """Address to bind."""
    hosts: str = Field(default="", pattern=r"^[^\s/@]*$")
    """Names in `Host` that the service answers to, separated by commas; `*`: any. Empty: loopback's where HOST is one, else any."""
    port: int = Field(default=8000, ge=0, le=65535)
    """Port of the service; 0 takes a free one and logs it."""
    checkpoint: Path = Path("weights/demo")
    """Checkpoint directory to serve."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the model runs, and the corpus is searched."""
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """What the trunk computes in."""
    backend: Literal["auto", "dense", "native", "torch"] = "auto"
    """Which engine runs it; `dense` is the slow reference."""
    candidate_positions: Literal["shared", "sequential"] = "shared"
    """`shared`: a score does not depend on the candidate's slot. `sequential`: the published pipeline's numbers."""
    vectors: Literal["auto", "avx2", "neon"] = "auto"
    """What the native engine's vectors are; `auto`: the widest that the processor has."""
    threads: int = Field(default=0, ge=0)
    """CPU threads of the engine; 0 leaves the choice to it."""
    fronts: int = Field(default=0, ge=0, le=64)
    """Front processes before one engine process; 0: one process does both."""
    engine_loss: Literal["restart", "exit"] = "restart"
    """With fronts, what follows when the engine process ends: another one, or exit code 70."""

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
            "grpc.port": (self.grpc.host, self.grpc.port),
            "admin.port": (self.admin.host, self.admin.port),
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
        sides = ((side.host, side.port) for side in (self.probes, self.admin) if side.port is not None)
        return [(self.host, self.port), *sides]

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


def load_settings(argv: Sequence[str] = (), environ: Mapping[str, str] | None = None) -> Settings:
    """Settings from flags, then the environment, then defaults. `environ` is only looked at for unknown names.

    Raises SettingsProblem for an unknown `RANKER_` name or a value that does not fit; argparse exits on an unknown flag.
    """
    _refuse_unknown(os.environ if environ is None else environ)
    flags = [_dashed(flag) for flag in argv]
    try:
        return Settings(_cli_parse_args=flags)  # type: ignore[call-arg]  # an initialiser's argument of BaseSettings
    except ValidationError as error:
        raise SettingsProblem("; ".join(_sentences(error))) from None
    except SettingsError as error:
        raise SettingsProblem(str(error)) from None


def names(model: type[BaseModel] = Settings, prefix: str = PREFIX) -> Iterator[str]:
    """Every name of the environment that means something, such as `RANKER_QUEUE__MAX_CANDIDATES`."""
    for name, field in model.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, Group):
            yield from names(kind, f"{prefix}{name.upper()}__")
        else:
            yield f"{prefix}{name.upper()}"


def _refuse_unknown(environ: Mapping[str, str]) -> None:
    known = list(names())
    for name in sorted(environ):
        if not name.upper().startswith(PREFIX) or name.upper() in known:
            continue
        group = [other for other in known if other.startswith(f"{name.upper()}__")]
        nearest = (group or difflib.get_close_matches(name.upper(), known, cutoff=0))[0]
        hint = f"{name} is not a setting; the nearest one is {nearest}"
        if re.search(r"_SERVICE_(HOST|PORT)|_PORT_\d+_(TCP|UDP)", name):
            hint += " (Kubernetes injects such names for a Service called ranker: set enableServiceLinks to false)"
        raise SettingsProblem(hint)


def _dashed(flag: str) -> str:
    """`--queue.max_candidates` reads as `--queue.max-candidates`; values are left alone."""
    if not flag.startswith("--"):
        return flag
    name, equals, value = flag.partition("=")
    return name.replace("_", "-") + equals + value


def _sentences(error: ValidationError) -> Iterator[str]:
    for problem in error.errors(include_input=False, include_url=False):
        path = "__".join(str(part) for part in problem["loc"])
        name = f"{PREFIX}{path.upper()}: " if path else ""
        yield name + problem["msg"].removeprefix("Value error, ")


def _require_sha256(digest: SecretStr, what: str) -> None:
    if not re.fullmatch(r"[0-9a-fA-F]{64}", digest.get_secret_value()):
        raise ValueError(f"{what} must be a SHA-256 in hex, 64 digits: printf %s KEY | sha256sum")
