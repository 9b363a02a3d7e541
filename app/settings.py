"""Every setting, declared once with its documentation, and the only reader of `RANKER_` names.

After "Default:" stands why the default is what it is. docs/operations.md has a table of them.
The model's architecture comes with the checkpoint and is no setting.
"""

from __future__ import annotations

import difflib
import hashlib
import ipaddress
import itertools
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SecretStr,
    ValidationError,
    computed_field,
    field_validator,
    model_validator,
)
from pydantic_settings import BaseSettings, SettingsConfigDict, SettingsError

from app.corpus.address import FeedAddress

PREFIX = "RANKER_"
MIB = 2**20
ADMIN_HOST = "127.0.0.1"
LOOPBACK = ("localhost", "127.0.0.1", "[::1]")
ANY_ADDRESS = {"0.0.0.0", "::"}  # noqa: S104  # compared with, not bound
OWN_PATHS = {
    "admin", "assets", "context", "docs", "explain", "explore", "info", "livez", "metrics", "openapi.json", "rank", "readyz",
    "recommend", "retrieve", "startupz", "v2",
}  # fmt: skip
"""First parts of the service's paths. Below one of them it could not tell whether a proxy has taken the root path off."""
NO_KEY = "it names no key, and everybody could ask: remove it to serve without keys"


class SettingsProblem(ValueError):
    """A setting that cannot be used; the message names it and says what is wrong."""


class Group(BaseModel):
    """A group of settings: `RANKER_GROUP__NAME` in the environment, `--group.name` on the command line."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)


class Limits(Group):
    """How large one request may be. A larger one gets 413."""

    max_body_bytes: int = Field(default=MIB, ge=1024, le=2**40)
    """Longest body in bytes. All bodies of requests that are being answered may together be 64 times as long.
    Default: 4 096 candidates and 1 000 history items fit as objects."""
    max_candidates: int = Field(default=4096, ge=1)
    """Most candidates in one request. A call of /rank/batch may hold four times as many, all such calls together sixteen times as many.
    Default: several times the longest list of the published service."""
    max_history: int = Field(default=2048, ge=1)
    """Most history items in one request. The model reads the newest ones that fit its window. Default: longer than any window so far."""
    max_retrieved: int = Field(default=2000, ge=1)
    """Most posts that one request may retrieve; it may exclude five times as many. Default: twice what the published service ranks."""

    @computed_field  # type: ignore[prop-decorator]
    @cached_property
    def max_batch_requests(self) -> int:
        """Most requests in one call of /rank/batch."""
        return 64

    @computed_field  # type: ignore[prop-decorator]
    @cached_property
    def max_batch_candidates(self) -> int:
        """Most candidates in one call of /rank/batch."""
        return 4 * self.max_candidates

    @computed_field  # type: ignore[prop-decorator]
    @cached_property
    def max_excluded(self) -> int:
        """Most post ids that one request may exclude."""
        return 5 * self.max_retrieved

    @computed_field  # type: ignore[prop-decorator]
    @cached_property
    def max_values(self) -> int:
        """Most values in one JSON body (numbers, texts, lists and objects): enough for an event of five fields and four actions."""
        return max(30_000, 7 * self.max_candidates + 10 * self.max_history)

    @cached_property
    def batch_candidates(self) -> int:
        """Most candidates in all calls of /rank/batch that are being answered."""
        return 4 * self.max_batch_candidates

    @cached_property
    def buffered_bytes(self) -> int:
        """Most bytes of the bodies of all requests that are being answered."""
        return 64 * self.max_body_bytes


class Queue(Group):
    """How much admitted work may wait for the engine. Beyond it, 429."""

    max_candidates: int = Field(default=32_768, ge=1)
    """Most candidates waiting, and eight times as many context tokens (user and history). An idle service takes one request of any size.
    Default: bounds memory."""
    max_requests: int = Field(default=4096, ge=1)
    """Most requests waiting, and four times the most searches. Default: bounds memory where requests are tiny."""
    max_wait_seconds: float = Field(default=0.5, ge=0)
    """Longest predicted wait for the first forward; 0 sets no bound. A request that can join the next forward is never refused for it.
    Default: a ranking that comes later is of no use to a feed; see [Capacity](#capacity)."""
    max_share_per_key: float = Field(default=0.5, gt=0, le=1)
    """Share of the queue that one API key may fill. Default: half for one caller alone, and less for each the fuller the queue is."""
    key_candidates_per_second: float = Field(default=0.0, ge=0)
    """Rate limit of one API key, with bursts of two seconds' worth; a context alone counts as one candidate. 0 sets none.
    Default: shares are enough among trusted callers."""
    stall_seconds: float = Field(default=4.0, gt=0)
    """With work queued and no forward finished for this long, the process is not ready. Default: longer than any normal forward."""
    stall_exit_seconds: float = Field(default=30.0, gt=0)
    """After this long, waiting callers get 503 and the process exits, to be started again. Default: a hung device rarely recovers."""

    @cached_property
    def max_context_tokens(self) -> int:
        """Most context tokens (user and history) waiting."""
        return 8 * self.max_candidates


class Batching(Group):
    """How waiting requests share a forward."""

    max_requests: int = Field(default=64, ge=1)
    """Requests in one forward; 1 turns sharing off. Default: handling each request costs time too."""
    max_candidates: int = Field(default=2048, ge=1)
    """Candidates in one forward; eight times as many context tokens fit. Default: one forward stays far below the deadline."""
    chunk_candidates: int = Field(default=512, ge=1)
    """Longer candidate lists are cut into chunks of this many. Default: a small request waits for one chunk of a long list only."""
    window_seconds: float = Field(default=0.0, ge=0, le=1)
    """How long a busy engine lets the next forward grow; an idle one never waits. Default: none. Try 0.001 on CUDA under load."""

    @cached_property
    def max_context_tokens(self) -> int:
        """Context tokens in one forward."""
        return 8 * self.max_candidates


class Cache(Group):
    """The context cache: keys and values of users seen before."""

    bytes: int | None = Field(default=None, ge=0)
    """Its size on the engine's device; 0 turns it off. Default: 256 MiB on a CPU, an eighth of a GPU's memory."""

    @cached_property
    def host_bytes(self) -> int:
        """The most that it takes where it is on the CPU."""
        return 256 * MIB if self.bytes is None else self.bytes


class Deadline(Group):
    """How long a request may take, from its first byte to its scores. Its headers may ask for another deadline."""

    default_seconds: float = Field(default=10.0, gt=0)
    """For a request that names no deadline, and the longest for an explanation. Default: longer than any feed waits."""
    max_seconds: float = Field(default=60.0, gt=0)
    """No request gets longer, whatever its headers or the default say. Default: a header must not hold a place in the queue for ever."""


class Retrieval(Group):
    """Finding posts for a user in a corpus. Without a checkpoint and a corpus, /retrieve and /recommend answer 503."""

    checkpoint: Path | None = None
    """Directory of the retrieval checkpoint (the two towers). Default: none; most services only rank."""
    corpus: Path | None = None
    """Directory of the corpus: posts as vectors of that checkpoint. Default: none; set both or neither."""
    feed: SecretStr | None = None
    """[Where changes of posts come from](deploy.md#changes-of-posts): `redis://HOST:PORT/STREAM`. Default: none; changes come by the
    admin interface, to this process alone."""
    feed_lag_seconds: float = Field(default=300.0, gt=0)
    """How far behind its feed this process may be and be ready. Default: an outage of the feed of five minutes takes no replica away."""

    @model_validator(mode="after")
    def _whole(self) -> Retrieval:
        if (self.checkpoint is None) != (self.corpus is None):
            raise ValueError("retrieval.checkpoint and retrieval.corpus belong together: set both or neither")
        if self.feed is not None and self.corpus is None:
            raise ValueError("retrieval.feed needs retrieval.checkpoint and retrieval.corpus: it changes that corpus")
        if self.feed is not None:
            try:
                FeedAddress.of(self.feed.get_secret_value())
            except ValueError as error:
                raise ValueError(f"retrieval.feed {error}") from None
        return self


class Drain(Group):
    """What happens between SIGTERM and the end."""

    delay_seconds: float = Field(default=5.0, ge=0)
    """How long requests are still taken after readiness has become 503. Default: a balancer that probes every two seconds notices."""
    timeout_seconds: float = Field(default=30.0, gt=0)
    """How long admitted requests may then take. Default: the longest likely deadline. A supervisor must wait for longer than both."""


class Auth(Group):
    """API keys. Without any, no key is asked for."""

    keys: dict[str, SecretStr] = Field(default={})
    """Name of the caller → SHA-256 of its key in hex: `{"feed": "9f86d0…"}`. Only the name is logged. Default: none, everybody may ask."""

    @field_validator("keys")
    @classmethod
    def _hashes(cls, keys: dict[str, SecretStr]) -> dict[str, SecretStr]:
        if not keys:
            raise ValueError(NO_KEY)
        digests = [digest.get_secret_value().lower() for digest in keys.values()]
        if len({*digests}) < len(digests):
            raise ValueError("two names have the same key: which one a caller is could not be told")
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

    @field_validator("host")
    @classmethod
    def _listable(cls, host: str) -> str:
        listen_hosts(host)
        return host


class Explore(Group):
    """Pages and replies that show people why a ranking is as it is."""

    enabled: bool | None = None
    """Whether /explore and /explain answer. Default: only where `HOST` is loopback: an [explanation](explore.md) costs as much as a hundred
    requests."""


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
        cli_kebab_case=True,
        cli_hide_none_type=True,
        cli_avoid_json=True,
        cli_exit_on_error=False,
    )

    host: str = "127.0.0.1"
    """Address to listen on, several of them separated by commas, or `*` for every IPv4 and IPv6 address. Default: the service is reachable
    from outside only by decision."""
    hosts: str = ""
    """Names in `Host` that the service answers to, separated by commas; `*`: any. Default: loopback's names where `HOST` is loopback, so
    that no web page can reach it by a rebound name; any name elsewhere, since Kubernetes' probes ask by a pod's address."""
    port: int = Field(default=8000, ge=0, le=65535)
    """Port of the service; 0 takes a free one and logs it. Default: one service a machine."""
    root_path: str = ""
    """Path below which a proxy serves this, without a slash at its end. Default: none; pages and documents use relative addresses."""
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
    workers: int = Field(default=0, ge=0, le=64)
    """HTTP workers before one engine process; 0 or 1: one process does both. Default: enough until HTTP fills a core:
    [more](#several-processes)."""
    engine_loss: Literal["restart", "exit"] = "restart"
    """With several workers, what happens when the engine process ends: it is started again, or all exit with code 70. Default: workers
    answer 503 until it is back."""

    limits: Limits = Limits()
    queue: Queue = Queue()
    batching: Batching = Batching()
    cache: Cache = Cache()
    retrieval: Retrieval = Retrieval()
    deadline: Deadline = Deadline()
    drain: Drain = Drain()
    auth: Auth = Auth()
    admin: Admin = Admin()
    probes: Probes = Probes()
    explore: Explore = Explore()
    reload: Reload = Reload()
    logs: Logs = Logs()
    tracing: Tracing = Tracing()

    @field_validator("host")
    @classmethod
    def _listable(cls, host: str) -> str:
        listen_hosts(host)
        return host

    @field_validator("hosts")
    @classmethod
    def _names(cls, hosts: str) -> str:
        if re.search(r"[\s/@]", hosts):
            raise ValueError("must be names separated by commas, without blanks, / or @")
        return hosts

    @field_validator("root_path")
    @classmethod
    def _path(cls, path: str) -> str:
        if path and not re.fullmatch(r"/[^\s?#]*[^/\s?#]", path):
            raise ValueError("must begin with / and not end with it, without blanks, ? or #")
        if path.partition("/")[2].partition("/")[0] in OWN_PATHS:
            raise ValueError(
                "must not begin with a path of the service's own: choose another first part, such as /ranker"
            )
        return path

    @model_validator(mode="after")
    def _ports_of_their_own(self) -> Settings:
        places = {
            "port": (self.host, self.port),
            "probes.port": (self.probes.host, self.probes.port),
            "admin.port": (ADMIN_HOST, self.admin.port),
        }
        for (name, (host, port)), (other, (other_host, other_port)) in itertools.combinations(places.items(), 2):
            one, two = set(listen_hosts(host)), set(listen_hosts(other_host))
            if port and port == other_port and (one & two or (one | two) & ANY_ADDRESS):
                raise ValueError(f"{name} and {other} are both {port}: each needs a port of its own")
        return self

    @property
    def explores(self) -> bool:
        """Whether /explore and what explains a ranking are served."""
        if self.explore.enabled is not None:
            return self.explore.enabled
        return is_loopback(self.host)

    def allowed_hosts(self, host: str, *, is_main: bool = True) -> list[str]:
        """The names in `Host` that a port on this address answers to; `*` for any. HOSTS are the main port's, and more for others on
        loopback."""
        names = [name for name in self.hosts.split(",") if name and (is_main or is_loopback(host))]
        if "*" in names or (names and is_main):
            return names
        own = [f"[{each}]" if ":" in each else each for each in listen_hosts(host)]
        return [*dict.fromkeys([*names, *LOOPBACK, *own])] if is_loopback(host) else ["*"]

    def effective(self) -> dict[str, Any]:
        """Every value in force as plain JSON, secrets as asterisks: for the start-up log."""
        return self.model_dump(mode="json")


def load_settings(
    argv: Sequence[str] = (), environ: Mapping[str, str] | None = None, program: str = "python -m app"
) -> Settings:
    """Settings from flags, then the environment, then defaults. `environ` is only looked at for unknown names.

    Raises SettingsProblem for a `RANKER_` name or a flag that is unknown, and for a value that does not fit.
    """
    known = {_flag(name): name for name in names()}
    groups = {flag.partition(".")[0] for flag in known}
    flags = [_dashed(flag) for flag in argv]
    for flag in flags:
        given = flag.partition("=")[0]
        if given.startswith("--") and given not in {*known, *groups, "--help"}:
            raise SettingsProblem(
                f"{given} is not a setting; the nearest one is {_nearest(given, known)}, and --help lists them all"
            )
    environ = os.environ if environ is None else environ
    _refuse_unknown(environ, list(known.values()))
    for name, value in environ.items():
        if name.upper() == f"{PREFIX}AUTH__KEYS" and (problem := _problem_of_keys(value)):
            raise SettingsProblem(f"{PREFIX}AUTH__KEYS: {problem}")
    try:
        return Settings(_cli_parse_args=flags, _cli_prog_name=program)  # type: ignore[call-arg]  # of BaseSettings
    except ValidationError as error:
        raise SettingsProblem("; ".join(_sentences(error))) from None
    except SettingsError as error:
        raise SettingsProblem(f"{str(error).removeprefix('error parsing CLI: ')}; --help lists every setting") from None


def names(model: type[BaseModel] = Settings, prefix: str = PREFIX) -> Iterator[str]:
    """Every name of the environment that means something, such as `RANKER_QUEUE__MAX_CANDIDATES`."""
    for name, field in model.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, Group):
            yield from names(kind, f"{prefix}{name.upper()}__")
        else:
            yield f"{prefix}{name.upper()}"


def listen_hosts(host: str) -> list[str]:
    """The addresses that a `host` names: `*` is every IPv4 and every IPv6 address, commas separate, brackets of IPv6 are taken off.

    Raises ValueError with a sentence for one that is no address and cannot be a name.
    """
    found: list[str] = []
    for part in (each.strip() for each in host.split(",")):
        bare = part[1:-1] if part.startswith("[") and part.endswith("]") else part
        if part == "*":
            found += ["0.0.0.0", "::"]  # noqa: S104  # what the operator asked for
        elif ":" in bare or bare != part:
            try:
                found.append(str(ipaddress.IPv6Address(bare)))
            except ValueError:
                raise ValueError(f"{part} is not an IPv6 address; a port is set by itself") from None
        elif re.fullmatch(r"[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_.])?", bare):
            found.append(bare)
        else:
            raise ValueError("must be an address, a host name, several of them separated by commas, or *")
    return list(dict.fromkeys(found))


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches those addresses."""
    return all(each in ("localhost", "::1") or each.startswith("127.") for each in listen_hosts(host))


def _flag(name: str) -> str:
    """`RANKER_QUEUE__MAX_CANDIDATES` as `--queue.max-candidates`."""
    return "--" + name.removeprefix(PREFIX).lower().replace("__", ".").replace("_", "-")


def _dashed(flag: str) -> str:
    """`--queue.max_candidates` reads as `--queue.max-candidates`; values are left alone."""
    if not flag.startswith("--"):
        return flag
    name, equals, value = flag.partition("=")
    return name.replace("_", "-") + equals + value


def _nearest(name: str, known: Mapping[str, object] | Sequence[str]) -> str:
    return difflib.get_close_matches(name, list(known), n=1, cutoff=0)[0]


def _refuse_unknown(environ: Mapping[str, str], known: Sequence[str]) -> None:
    for name in sorted(environ):
        asked = name.upper()
        if not asked.startswith(PREFIX) or asked in known:
            continue
        group = [other for other in known if other.startswith(f"{asked}__")]
        hint = f"{name} is not a setting; the nearest one is {group[0] if group else _nearest(asked, known)}"
        if re.search(r"_SERVICE_(HOST|PORT)|_PORT_\d+_(TCP|UDP)", name):
            hint += " (Kubernetes injects such names for a Service called ranker: set enableServiceLinks to false)"
        raise SettingsProblem(hint)


def _sentences(error: ValidationError) -> Iterator[str]:
    for problem in error.errors(include_input=False, include_url=False):
        path = "__".join(str(part) for part in problem["loc"])
        name = f"{PREFIX}{path.upper()}: " if path else ""
        yield name + problem["msg"].removeprefix("Value error, ")


def _problem_of_keys(text: str) -> str:
    """What is wrong with the JSON of the keys and is lost once it is read; empty if nothing is."""
    if not text:  # other settings without a value are those that nobody has set
        return NO_KEY
    try:
        pairs = json.loads(text, object_pairs_hook=tuple)
    except (ValueError, RecursionError):
        return 'must be JSON, such as {"feed": "9f86d0…"}'
    if isinstance(pairs, tuple) and len({name for name, _ in pairs}) < len(pairs):
        return "has one name twice: a second key of a caller needs a name of its own"
    return ""


def _require_sha256(digest: SecretStr, what: str) -> None:
    if not re.fullmatch(r"[0-9a-fA-F]{64}", digest.get_secret_value()):
        raise ValueError(f"{what} must be a SHA-256 in hex, 64 digits: printf %s KEY | sha256sum")
    if digest.get_secret_value().lower() == hashlib.sha256().hexdigest():
        raise ValueError(f"{what} is the SHA-256 of nothing, which whoever sends no key would match: was KEY set?")
