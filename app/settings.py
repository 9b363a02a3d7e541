"""Every setting, declared once with its documentation. Of all other modules only `app/healthcheck.py` reads `RANKER_` names.

Most texts say the reason for the default. docs/operations.md has a table of them.
The model's architecture comes with the checkpoint and is not a setting.
"""

from __future__ import annotations

import difflib
import hashlib
import importlib.util
import ipaddress
import itertools
import json
import os
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SecretStr,
    ValidationError,
    computed_field,
    field_validator,
    model_validator,
)
from pydantic.fields import FieldInfo
from pydantic_settings import (
    BaseSettings,
    InitSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
)

from app.corpus.address import FeedAddress

PREFIX = "RANKER_"
CONFIG = f"{PREFIX}CONFIG"
"""Names a file with settings. It is not a setting itself."""
ADMIN_HOST = "127.0.0.1"
LOOPBACK = ("localhost", "127.0.0.1", "[::1]")
ANY_ADDRESS = {"0.0.0.0", "::"}  # noqa: S104  # compared with, not bound
OWN_PATHS = {
    "admin", "assets", "context", "docs", "explain", "explore", "health", "info", "livez", "metrics", "openapi.json", "rank", "readyz",
    "recommend", "retrieve", "startupz", "v2", "version",
}  # fmt: skip
"""First parts of the service's paths. Below one of them it could not tell whether a proxy has taken the root path off."""
DEMO, DEMO_TOWERS, DEMO_POSTS = (
    Path(__file__).parents[1] / "weights" / name for name in ("demo", "demo-towers", "demo-posts")
)
"""What is installed with the service, in a clone and from a wheel."""
NO_CHECKPOINT = (
    "it has no manifest.json; phoenix-ranker serve without a checkpoint serves the demo, phoenix-ranker fetch copies a checkpoint, and "
    "phoenix-ranker import converts a published one"
)
HOST_LABEL = r"[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?"
MOST_INTEGER = 2**63 - 1  # JSON, in which `/info` shows the settings, has none larger in most languages
NO_KEY = "it holds no key, so everybody could call: remove it to serve without keys"


class SettingsProblem(ValueError):
    """A setting that cannot be used; the message names it and says what is wrong."""


def _on_this_machine(path: object) -> object:
    """The path of a folder. Raises ValueError with advice for an address, and for what only a shell reads as a folder."""
    text = str(path)
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", text):
        raise ValueError(
            f"{text} is an address, and only a folder can be served: phoenix-ranker fetch {text} --out DIR makes one"
        )
    if text.startswith("~"):
        raise ValueError(
            f"{text} begins with ~, which only a shell replaces: write the whole path of the folder. phoenix-ranker fetch copies a "
            "checkpoint to a folder"
        )
    return path


Folder = Annotated[Path, BeforeValidator(_on_this_machine)]


class Group(BaseModel):
    """A group of settings: `RANKER_GROUP__NAME` in the environment, `--group.name` on the command line."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)

    @field_validator("*")
    @classmethod
    def _of_64_bits(cls, value: object) -> object:
        if isinstance(value, int) and value > MOST_INTEGER:
            raise ValueError(f"must be at most {MOST_INTEGER}")
        return value


class Limits(Group):
    """How large one request may be. A larger one gets 413."""

    max_body_bytes: int = Field(default=2**20, ge=1024, le=2**40)
    """Longest body in bytes. The bodies of all requests that are being answered may add up to 64 times as much.
    The default has room for 4 096 candidates and 1 000 history items as objects."""
    max_candidates: int = Field(default=4096, ge=1, le=2**40)
    """Most candidates in one request. A call of /rank/batch may hold four times as many, all such calls together sixteen times as many.
    The default is several times the longest list of the published service."""
    max_history: int = Field(default=2048, ge=1, le=2**40)
    """Most history items in one request. The model reads the newest ones that fit its window. The default is longer than any window so
    far."""
    max_retrieved: int = Field(default=2000, ge=1, le=2**40)
    """Most posts that one request may retrieve; it may exclude five times as many. The default is twice what the published service
    ranks."""

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
    """Most candidates that may wait, and eight times as many context tokens (user and history). An idle service takes one request of any
    size. The default limits memory."""
    max_requests: int = Field(default=4096, ge=1)
    """Most requests that may wait, and a quarter as many searches. The default limits memory if requests are tiny."""
    max_wait_seconds: float = Field(default=0.5, ge=0)
    """Longest predicted wait for the first forward pass; 0 means no limit. A request that can join the next forward pass is never refused
    for its wait. A ranking that is later than the default is of no use to a feed: see "Capacity" in docs/operations.md."""
    max_share_per_key: float = Field(default=0.5, gt=0, le=1)
    """Share of the queue that one API key may fill. By default a key that is alone may fill half, with its last request a little
    more. The fuller the queue, the less each key may hold."""
    key_candidates_per_second: float = Field(default=0.0, ge=0)
    """Candidates per second that one API key may send, with bursts of two seconds' worth; a context alone counts as one candidate. 0 means
    no limit: among trusted callers the shares are enough."""
    stall_seconds: float = Field(default=4.0, gt=0)
    """If work is queued and no forward pass has finished for this long, the process is not ready. The default is longer than any normal
    forward pass."""
    stall_exit_seconds: float = Field(default=30.0, gt=0)
    """If that lasts for this long, waiting callers get 503 and the process exits, so that it is started again: a hung device rarely
    recovers."""

    @model_validator(mode="after")
    def _stalls_first(self) -> Queue:
        if self.stall_seconds > self.stall_exit_seconds:
            raise ValueError(
                f"queue.stall_seconds ({self.stall_seconds:g}) must be at most queue.stall_exit_seconds ({self.stall_exit_seconds:g}): "
                "a stalled process must stop being ready before it exits"
            )
        return self

    @cached_property
    def max_context_tokens(self) -> int:
        """Most context tokens (user and history) waiting."""
        return 8 * self.max_candidates


class Batching(Group):
    """How waiting requests share a forward pass."""

    max_requests: int = Field(default=64, ge=1)
    """Most requests in one forward pass; 1 turns sharing off. There is a limit because each request costs time too."""
    max_candidates: int = Field(default=2048, ge=1)
    """Most candidates in one forward pass, and eight times as many context tokens. With the default, a forward pass stays far below the
    deadline."""
    chunk_candidates: int = Field(default=512, ge=1)
    """Longer candidate lists are cut into chunks of this many, so that a small request only waits for one chunk of a long list."""
    window_seconds: float = Field(default=0.0, ge=0, le=1)
    """How long a busy engine lets the next batch grow; an idle engine never waits. Try 0.001 on CUDA under load."""

    @cached_property
    def max_context_tokens(self) -> int:
        """Most context tokens in one forward pass."""
        return 8 * self.max_candidates


class Cache(Group):
    """The context cache: keys and values of users seen before."""

    bytes: int | None = Field(default=None, ge=0)
    """Size of the context cache on the engine's device; 0 turns it off. By default 256 MiB on a CPU, or an eighth of a GPU's memory."""


class Deadline(Group):
    """How long a request may take, from its first byte to its scores. Its headers may ask for another deadline."""

    default_seconds: float = Field(default=10.0, gt=0)
    """Deadline of a request that does not name one, and the longest for an explanation. The default is longer than any feed waits."""
    max_seconds: float = Field(default=60.0, gt=0)
    """No request gets longer than this, whatever its headers or the default say, so that no header holds a place in the queue for ever."""


class Retrieval(Group):
    """Finding posts for a user in a corpus. Without a checkpoint and a corpus, /retrieve and /recommend answer 404."""

    checkpoint: Folder | None = None
    """Directory of the retrieval checkpoint (the two towers). By default there is none: most services only rank."""
    corpus: Folder | None = None
    """Directory of the corpus: posts as vectors of that checkpoint. Set both or neither."""
    feed: SecretStr | None = None
    """Where changes of posts come from: `redis://HOST:PORT/STREAM` (see docs/deploy.md). Without a feed, changes come through the admin
    interface, to this process only."""
    feed_lag_seconds: float = Field(default=300.0, gt=0)
    """How far behind its feed this process may be and still be ready. With the default, a feed that is down for five minutes takes no
    replica out."""

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
    """How long requests are still taken after readiness has become 503. The default is enough for a load balancer that probes every two
    seconds."""
    timeout_seconds: float = Field(default=30.0, gt=0)
    """How long admitted requests may then take. The default is the longest likely deadline. A supervisor must wait longer than both times
    together."""


class Auth(Group):
    """API keys. Without any, no key is required."""

    keys: dict[str, SecretStr] = Field(default={})
    """Name of the caller → SHA-256 of its key in hex: `{"feed": "9f86d0…"}`. Only the name is logged. By default there are
    none, and everybody may call."""
    keys_file: Path | None = None
    """JSON file with such an object. SIGHUP reads it again, so keys can be changed without a restart. By default there is none, because
    the environment is enough for a few keys."""

    @model_validator(mode="after")
    def _one_place(self) -> Auth:
        if self.keys and self.keys_file is not None:
            raise ValueError("auth.keys and auth.keys_file exclude each other: put all keys into the file")
        return self

    @field_validator("keys_file")
    @classmethod
    def _readable(cls, path: Path | None) -> Path | None:
        if path is not None:
            _keys_in(path)
        return path

    def read(self) -> dict[str, bytes]:
        """Name → SHA-256 of the key; what the file holds now, if there is one. Raises SettingsProblem for a file that cannot be used."""
        keys = self.keys if self.keys_file is None else _keys_in(self.keys_file)
        return {name: bytes.fromhex(digest.get_secret_value()) for name, digest in sorted(keys.items())}

    @field_validator("keys")
    @classmethod
    def _hashes(cls, keys: dict[str, SecretStr]) -> dict[str, SecretStr]:
        if not keys:
            raise ValueError(NO_KEY)
        digests = [digest.get_secret_value().lower() for digest in keys.values()]
        if len({*digests}) < len(digests):
            raise ValueError("two names have the same key, so these callers could not be told apart")
        for name, digest in keys.items():
            if not re.fullmatch(r"[A-Za-z0-9_.-]{1,64}", name):
                raise ValueError("a key's name is 1 to 64 letters, digits, dots, dashes or underscores")
            _require_sha256(digest, f"the key named {name}")
        return {name: SecretStr(digest.get_secret_value().lower()) for name, digest in keys.items()}


def _keys_in(path: Path) -> dict[str, SecretStr]:
    """The keys in a file. Raises SettingsProblem, which repeats nothing of it."""
    name = str(path).encode(errors="backslashreplace").decode()  # pydantic takes no name that is not UTF-8
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise SettingsProblem(f"{name} cannot be read: {getattr(error, 'strerror', 'it is not UTF-8')}") from None
    if problem := problem_of_keys(text.strip()):
        raise SettingsProblem(f"{name}: {problem}")
    try:
        return Auth(keys=json.loads(text)).keys
    except ValidationError as error:
        problems = "; ".join(entry["msg"].removeprefix("Value error, ") for entry in error.errors(include_input=False))
        raise SettingsProblem(f"{name}: {problems}") from None


class Admin(Group):
    """The admin interface, on 127.0.0.1. It only exists if a port and a token are set."""

    port: int | None = Field(default=None, ge=0, le=65535)
    """Port of the admin interface, on 127.0.0.1. By default it is off."""
    token_sha256: SecretStr | None = None
    """SHA-256 of the bearer token in hex. The configuration never holds the token itself."""
    root: Path | None = None
    """A reload may name checkpoints below this directory. By default the parent of the first checkpoint, or the checkpoint itself if the
    parent is `/`."""

    @model_validator(mode="after")
    def _guarded(self) -> Admin:
        if self.token_sha256 is not None:
            _require_sha256(self.token_sha256, "admin.token_sha256")
        elif self.port is not None:
            raise ValueError("admin.port needs admin.token_sha256: the admin interface is never open")
        return self


class Probes(Group):
    """A separate port for probes and metrics."""

    host: str = "127.0.0.1"
    """Address of the port for probes. By default it can only be reached from this machine."""
    port: int | None = Field(default=None, ge=0, le=65535)
    """With this port, probes, /info and /metrics also answer there, and /metrics no longer on the main port. By default there is none,
    because one port is simpler."""

    @field_validator("host")
    @classmethod
    def _listable(cls, host: str) -> str:
        listen_hosts(host)
        return host


class Explore(Group):
    """Pages and replies that show why a ranking is as it is."""

    enabled: bool | None = None
    """Whether /explore and /explain answer. By default only if `HOST` is loopback, because an explanation costs as much as a hundred
    requests."""


class Reload(Group):
    """How checkpoints are loaded, and when the process looks for a new one."""

    watch_seconds: float = Field(default=0.0, ge=0)
    """How often the checkpoint's directory is checked for a new manifest; 0 means never. By default somebody asks for
    each reload."""
    timeout_seconds: float = Field(default=900.0, gt=0)
    """How long a load, including the first one, may take before it is given up. The default is enough for a hundred gigabytes from a slow
    disk."""


class Logs(Group):
    """What is written to standard error."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    """Lowest level that is written. The default writes one line for each request."""
    format: Literal["auto", "json", "console"] = "auto"
    """`json` writes one JSON object per line, `console` readable text. `auto` is `console` on a terminal, otherwise `json`."""
    success_sample: float = Field(default=1.0, ge=0, le=1)
    """Share of successful requests that get a line; failures always get one. By default all; lower it if that is too much."""


class Served(Group):
    """The log of what was served, which the next model learns from; needs the `served` extra. docs/served.md says what is in it."""

    directory: Path | None = None
    """Directory of the log, which is made if it is not there. By default nothing is logged: histories are personal data."""
    share: float = Field(default=1.0, ge=0, le=1)
    """Share of the users whose rankings are logged, by a hash of the user id: a user is logged always or never. Anonymous requests are
    drawn one by one. By default all; lower it if the log is too large."""
    probabilities: bool = True
    """Whether the log holds the probabilities, which are about half of its size. By default it does, because estimates of another model's
    value need them."""
    keep_days: int = Field(default=30, ge=0, le=36_500)
    """Parts of days that ended longer ago than this are removed; 0 keeps them for ever. By default a month, so that nobody keeps histories
    without having decided to."""
    part_bytes: int = Field(default=64 * 2**20, ge=2**16)
    """A part is closed when it is about this large. With the default, a day has hundreds of files rather than thousands."""
    part_seconds: float = Field(default=300.0, ge=1, le=86_400)
    """A part is closed when it has been open for this long; `kill -9` loses the open one. By default five minutes, at most that much is
    lost."""

    @model_validator(mode="after")
    def _writable(self) -> Served:
        if self.directory is not None and importlib.util.find_spec("pyarrow") is None:
            raise ValueError("served.directory needs pyarrow: pip install 'phoenix-ranking-server[served]'")
        return self


class Tracing(Group):
    """OpenTelemetry spans; needs the `tracing` extra. The collector and the sampling are set with OpenTelemetry's own variables."""

    enabled: bool = False
    """Whether spans are made. Set the collector in `OTEL_EXPORTER_OTLP_TRACES_ENDPOINT`. To sample a share of the requests that have no
    sampled parent, set `OTEL_TRACES_SAMPLER=parentbased_traceidratio` and the share in `OTEL_TRACES_SAMPLER_ARG`. By default it is off and
    costs nothing."""


class Settings(BaseSettings):
    """All settings, read once at the start. In the environment, --queue.max-requests is RANKER_QUEUE__MAX_REQUESTS. Flags win."""

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
    """Address to listen on; several are separated by commas, and `*` is every IPv4 and IPv6 address. By default the service can only be
    reached from this machine."""
    hosts: str = ""
    """Names in the `Host` header that the service accepts, separated by commas; `*` is any. By default, if `HOST` is loopback, only
    loopback's names, so that no web page can reach it by DNS rebinding; otherwise any, because Kubernetes' probes use a pod's address."""
    port: int = Field(default=8000, ge=0, le=65535)
    """Port of the service; 0 takes a free one and logs it."""
    root_path: str = ""
    """Path below which a proxy serves this, without a slash at the end. Rarely needed: pages and documents use relative addresses."""
    checkpoint: Folder = Path("weights/demo")
    """Checkpoint directory to serve. By default the demo that is installed with the service, so that a first start works."""
    keep_alive_seconds: int = Field(default=75, ge=1, le=86_400)
    """How long an idle connection stays open. The default is longer than the 60 s of common balancers, so that they close first. A proxy
    that keeps idle connections for longer needs a higher value."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the model runs and the corpus is searched. By default CUDA if there is a GPU."""
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """Data type of the trunk. By default bfloat16 on a GPU and on a CPU that multiplies it, else float32; `/info` says which."""
    backend: Literal["auto", "dense", "native", "native-avx2", "torch"] = "auto"
    """Engine that runs the model. `dense` is the slow reference. `native` uses the processor's widest vectors; `native-avx2` uses the same
    kernel on every x86-64 machine of a mixed fleet. By default the fastest that runs here."""
    candidate_positions: Literal["shared", "sequential"] = "shared"
    """`sequential` gives the published pipeline's numbers, which depend on a candidate's place in the list. By default scores do not
    depend on it."""
    threads: int = Field(default=0, ge=0, le=1024)
    """CPU threads of the engine; 0 means as many as it may use, which takes the limit of its control group into account. Set it if cores
    are shared."""
    workers: int = Field(default=0, ge=0, le=64)
    """HTTP workers in front of one engine process; with 0 or 1, one process does both. That is enough until HTTP fills a core: see
    "Several processes" in docs/operations.md."""
    engine_loss: Literal["restart", "exit"] = "restart"
    """With several workers, what happens if the engine process ends: `restart` starts it again, and workers answer 503 until it is back;
    `exit` ends all processes with code 70."""

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
    served: Served = Served()
    tracing: Tracing = Tracing()

    @field_validator("host")
    @classmethod
    def _listable(cls, host: str) -> str:
        listen_hosts(host)
        return host

    @field_validator("hosts")
    @classmethod
    def _names(cls, hosts: str) -> str:
        for name in filter(None, hosts.split(",")):
            if name != "*" and not re.fullmatch(r"(\*\.)?[A-Za-z0-9_][A-Za-z0-9_.-]*|\[[0-9A-Fa-f:.]+\]", name):
                raise ValueError(
                    "must be names separated by commas, without ports; *.example.com is every name below it, * any"
                )
        return hosts

    @field_validator("root_path")
    @classmethod
    def _path(cls, path: str) -> str:
        if path and not re.fullmatch(r"/[^\s?#%]*[^/\s?#%]", path):
            raise ValueError("must begin with / and not end with it, without blanks, ?, # or %")
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

    @classmethod
    def settings_customise_sources(
        cls, settings_cls: type[BaseSettings], *sources: PydanticBaseSettingsSource, **more: Any
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Pydantic's sources, highest first."""
        return tuple(_KeysOfOnePlace(source) for source in (*sources, *more.values()))

    @property
    def explores(self) -> bool:
        """Whether /explore and what explains a ranking are served."""
        if self.explore.enabled is not None:
            return self.explore.enabled
        return is_loopback(self.host)

    def allowed_hosts(self, host: str, *, is_main: bool = True) -> list[str]:
        """The names in `Host` that a port on this address accepts; `*` for any. HOSTS apply to the main port, and are added on other ports
        of loopback."""
        names = [name for name in self.hosts.split(",") if name and (is_main or is_loopback(host))]
        if "*" in names or (names and is_main):
            return names
        own = [f"[{address}]" if ":" in address else address for address in listen_hosts(host)]
        return [*dict.fromkeys([*names, *LOOPBACK, *own])] if is_loopback(host) else ["*"]

    def effective(self) -> dict[str, Any]:
        """Every value in force as plain JSON, secrets as asterisks: for the start-up log and /info."""
        return self.model_dump(mode="json")


def load_settings(
    argv: Sequence[str] = (),
    program: str = "python -m app",
    *,
    with_posts: bool = False,
) -> Settings:
    """Settings from flags, then the environment, then the file that `--config` or `RANKER_CONFIG` names, then defaults. `--help`
    prints every setting and ends the process.

    If none of them names a checkpoint, it is the demo that is installed with the service. `with_posts` adds the demo's posts, which one
    process at a time can serve.

    Raises SettingsProblem for a `RANKER_` name, a flag or a name in the file that is unknown, and for a value that does not fit.
    """
    names_by_flag = {_flag(name): name for name in names()}
    groups = {flag.partition(".")[0] for flag in names_by_flag}
    config, flags = config_of(argv, os.environ)
    if {"--help", "-h"} & {*flags}:
        from app.settings_help import print_help

        print_help(Settings, program)
        raise SystemExit(0)
    for place, flag in enumerate(flags):
        flag_name, equals, value = flag.partition("=")
        if flag_name == "--auth.keys" and (
            problem := problem_of_keys(value if equals else "".join(flags[place + 1 : place + 2]))
        ):
            raise SettingsProblem(f"{flag_name}: {problem}")
        if flag_name.startswith("--") and flag_name not in {*names_by_flag, *groups, "--help"}:
            raise SettingsProblem(
                f"{flag_name} is not a setting; the nearest one is {_nearest(flag_name, names_by_flag)}, "
                "and --help lists them all"
            )
    _refuse_unknown(os.environ, [*names_by_flag.values(), CONFIG])
    for name, value in os.environ.items():
        if name.upper() == f"{PREFIX}AUTH__KEYS" and (problem := problem_of_keys(value)):
            raise SettingsProblem(f"{PREFIX}AUTH__KEYS: {problem}")
    kind = _with_file(_read_config(Path(config))) if config else Settings
    try:
        settings = kind(_cli_parse_args=flags, _cli_prog_name=program)  # type: ignore[call-arg]  # of BaseSettings
    except ValidationError as error:
        raise SettingsProblem("; ".join(_sentences(error))) from None
    except SettingsError as error:
        raise SettingsProblem(f"{str(error).removeprefix('error parsing CLI: ')}; --help lists every setting") from None
    return _with_demo(settings, with_posts=with_posts)


def _with_demo(settings: Settings, *, with_posts: bool) -> Settings:
    """The settings with the demo as their checkpoint if they name none, and with its posts if they name no part of retrieval either."""
    if "checkpoint" in settings.model_fields_set or not DEMO.is_dir():
        return settings
    demo: dict[str, Any] = {"checkpoint": DEMO}
    is_without = not {"checkpoint", "corpus"} & settings.retrieval.model_fields_set
    if with_posts and is_without and DEMO_POSTS.is_dir():
        demo["retrieval"] = settings.retrieval.model_copy(update={"checkpoint": DEMO_TOWERS, "corpus": DEMO_POSTS})
    return settings.model_copy(update=demo)


def problem_of(checkpoint: Path) -> str:
    """Why a directory cannot be served; empty if it looks like a checkpoint."""
    try:
        return "" if (checkpoint / "manifest.json").is_file() else f"is not a checkpoint: {NO_CHECKPOINT}"
    except OSError as error:  # such as a folder that may not be entered
        return f"cannot be read: {error.strerror}"


def config_of(arguments: Sequence[str], environ: Mapping[str, str]) -> tuple[str, list[str]]:
    """The file that `--config FILE` or `--config=FILE` names, else RANKER_CONFIG, empty without one; and the other arguments, dashed.

    Raises SettingsProblem for `--config` without a file.
    """
    flags = [_dashed(flag) for flag in arguments]
    others = list(flags)
    for place, flag in enumerate(flags):
        name, equals, value = flag.partition("=")
        if name == "--config":
            if not value and (equals or place + 1 == len(flags)):
                raise SettingsProblem("--config needs a file")
            others[place : place + (1 if equals else 2)] = []
            return value if equals else flags[place + 1], others
    return environ.get(CONFIG, ""), others


def _read_config(path: Path) -> dict[str, Any]:
    """The settings in a TOML file. Raises SettingsProblem, also for a name that is none."""
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SettingsProblem(f"{path} cannot be read: {error.strerror}") from None
    except ValueError as error:  # of TOML and of UTF-8
        raise SettingsProblem(f"{path} is not TOML: {error}") from None
    setting_names = [name.removeprefix(PREFIX).lower().replace("__", ".") for name in names()]
    for name in _leaves(values, setting_names):
        if name not in setting_names:
            raise SettingsProblem(
                f"{path}: {name} is not a setting; the nearest one is {_nearest(name, setting_names)}"
            )
    return values


def _leaves(values: Mapping[str, Any], setting_names: Sequence[str], prefix: str = "") -> Iterator[str]:
    """The names of all values, such as `queue.max_requests`. A setting whose value is a table counts as one."""
    for name, value in values.items():
        if isinstance(value, dict) and value and f"{prefix}{name}" not in setting_names:
            yield from _leaves(value, setting_names, f"{prefix}{name}.")
        elif value != {}:
            yield f"{prefix}{name}"


class _KeysOfOnePlace(PydanticBaseSettingsSource):
    """A source of settings, without its `auth.keys` where a higher one has some: keys of several places do not add up."""

    def __init__(self, source: PydanticBaseSettingsSource) -> None:
        super().__init__(source.settings_cls)
        self._source = source

    def get_field_value(self, field: FieldInfo, field_name: str) -> tuple[Any, str, bool]:
        return self._source.get_field_value(field, field_name)

    def __call__(self) -> dict[str, Any]:
        values = self._source()
        auth, higher = values.get("auth"), self.current_state.get("auth")
        if isinstance(auth, dict) and isinstance(higher, dict) and "keys" in higher:
            return values | {"auth": {name: value for name, value in auth.items() if name != "keys"}}
        return values


def _with_file(values: dict[str, Any]) -> type[Settings]:
    """`Settings` that take these values where neither a flag nor the environment has one."""

    class FileSettings(Settings):
        @classmethod
        def settings_customise_sources(
            cls, settings_cls: type[BaseSettings], *sources: PydanticBaseSettingsSource, **more: Any
        ) -> tuple[PydanticBaseSettingsSource, ...]:
            higher = super().settings_customise_sources(settings_cls, *sources, **more)
            return (*higher, _KeysOfOnePlace(InitSettingsSource(settings_cls, values)))

    return FileSettings


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
    addresses: list[str] = []
    for part in (text.strip() for text in host.split(",")):
        bare = part[1:-1] if part.startswith("[") and part.endswith("]") else part
        if part == "*":
            addresses += ["0.0.0.0", "::"]  # noqa: S104  # what the operator asked for
        elif ":" in bare or bare != part:
            try:
                addresses.append(str(ipaddress.IPv6Address(bare)))
            except ValueError:
                raise ValueError(f"{part} is not an IPv6 address; set the port separately") from None
        elif all(re.fullmatch(HOST_LABEL, label) for label in bare.removesuffix(".").split(".")):
            addresses.append(bare)
        else:
            raise ValueError("must be an address, a host name, several of them separated by commas, or *")
    return list(dict.fromkeys(addresses))


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches those addresses."""
    return all(address in ("localhost", "::1") or address.startswith("127.") for address in listen_hosts(host))


def _flag(name: str) -> str:
    """`RANKER_QUEUE__MAX_CANDIDATES` as `--queue.max-candidates`."""
    return "--" + name.removeprefix(PREFIX).lower().replace("__", ".").replace("_", "-")


def _dashed(flag: str) -> str:
    """`--queue.max_candidates` reads as `--queue.max-candidates`; values are left alone."""
    if not flag.startswith("--"):
        return flag
    name, equals, value = flag.partition("=")
    return name.replace("_", "-") + equals + value


def _nearest(name: str, setting_names: Mapping[str, object] | Sequence[str]) -> str:
    return difflib.get_close_matches(name, list(setting_names), n=1, cutoff=0)[0]


def _refuse_unknown(environ: Mapping[str, str], setting_names: Sequence[str]) -> None:
    for name in sorted(environ):
        upper_name = name.upper()
        if not upper_name.startswith(PREFIX) or upper_name in setting_names:
            continue
        group = [other for other in setting_names if other.startswith(f"{upper_name}__")]
        hint = (
            f"{name} is not a setting; the nearest one is {group[0] if group else _nearest(upper_name, setting_names)}"
        )
        if re.search(r"_SERVICE_(HOST|PORT)|_PORT_\d+_(TCP|UDP)", name):
            hint += " (Kubernetes injects such names for a Service called ranker: set enableServiceLinks to false)"
        raise SettingsProblem(hint)


def _sentences(error: ValidationError) -> Iterator[str]:
    for problem in error.errors(include_input=False, include_url=False):
        path, sentence = "__".join(str(part) for part in problem["loc"]), problem["msg"].removeprefix("Value error, ")
        is_named = not path or sentence.startswith(
            f"{path}."
        )  # of a group, which is no setting, the sentence names its settings
        yield sentence if is_named else f"{PREFIX}{path.upper()}: {sentence}"


def problem_of_keys(text: str) -> str:
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
        raise ValueError(f"{what} is the SHA-256 of nothing, so a caller without a key would match it: was KEY set?")
