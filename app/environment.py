"""Reads the settings from flags and the environment, and refuses what it does not know. The only reader of `RANKER_` names."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterator, Mapping, Sequence

from pydantic import BaseModel, ValidationError
from pydantic_settings import SettingsError

from app.settings import NO_KEY, PREFIX, Group, Settings, SettingsProblem

FIXED = "its value is fixed now; remove it"
GONE = {
    "VECTORS": "set RANKER_BACKEND=native-avx2 for the narrower vectors",
    "LIMITS__MAX_VALUES": "it follows from RANKER_LIMITS__MAX_CANDIDATES",
    "LIMITS__MAX_BATCH_REQUESTS": FIXED,
    "LIMITS__MAX_BATCH_CANDIDATES": "it is four times RANKER_LIMITS__MAX_CANDIDATES",
    "LIMITS__MAX_EXCLUDED": "it is five times RANKER_LIMITS__MAX_RETRIEVED",
    "BUDGETS__BODY_BYTES": "it is 64 times RANKER_LIMITS__MAX_BODY_BYTES",
    "BUDGETS__REPLY_BYTES": "it is 64 times RANKER_LIMITS__MAX_BODY_BYTES",
    "BUDGETS__BATCH_CANDIDATES": "it is sixteen times RANKER_LIMITS__MAX_CANDIDATES",
    "BUDGETS__EXCLUDED_IDS": FIXED,
    "BUDGETS__CHANGES": FIXED,
    "QUEUE__MAX_CONTEXT_TOKENS": "it is eight times RANKER_QUEUE__MAX_CANDIDATES",
    "BATCHING__ENABLED": "set RANKER_BATCHING__MAX_REQUESTS=1 to turn batching off",
    "BATCHING__MAX_CONTEXT_TOKENS": "it is eight times RANKER_BATCHING__MAX_CANDIDATES",
    "RETRIEVAL__DTYPE": FIXED,
    "RETRIEVAL__CACHE_BYTES": FIXED,
    "RETRIEVAL__BATCH_REQUESTS": FIXED,
    "RETRIEVAL__MAX_WAITING": "it is a quarter of RANKER_QUEUE__MAX_REQUESTS",
    "RETRIEVAL__COMPACT_ROWS": FIXED,
    "CONNECTIONS__STALL_SECONDS": "it is four fifths of RANKER_CONNECTIONS__HEADER_SECONDS",
    "CONNECTIONS__MAX_HEADER_BYTES": FIXED,
    "CONNECTIONS__HELD_REFUSALS": FIXED,
    "CONNECTIONS__BACKLOG": FIXED,
    "ADMIN__HOST": "the admin interface is always on 127.0.0.1; remove it",
    "EXPLORE__MAX_CANDIDATES": FIXED,
    "EXPLORE__MAX_EVENTS": FIXED,
    "EXPLORE__CONCURRENT": FIXED,
    "EXPLORE__DEADLINE_SECONDS": "it is RANKER_DEADLINE__DEFAULT_SECONDS",
    "SHADOW__MAX_WAITING": FIXED,
    "SHADOW__MAX_WAIT_SECONDS": FIXED,
    "GRPC__HOST": "gRPC is on the address in RANKER_HOST",
    "GRPC__MAX_CALLS": "it is RANKER_BATCHING__MAX_REQUESTS",
    "GRPC__MAX_CONNECTIONS": FIXED,
    "LOGS__BUFFER_BYTES": FIXED,
    "TRACING__ENDPOINT": "set OTEL_EXPORTER_OTLP_TRACES_ENDPOINT",
    "TRACING__SAMPLE_RATIO": "set OTEL_TRACES_SAMPLER=parentbased_traceidratio and OTEL_TRACES_SAMPLER_ARG",
}
"""Settings of earlier versions, without the prefix, and what to do instead."""


def load_settings(argv: Sequence[str] = (), environ: Mapping[str, str] | None = None) -> Settings:
    """Settings from flags, then the environment, then defaults. `environ` is only looked at for unknown names.

    Raises SettingsProblem for a `RANKER_` name or a flag that is unknown or gone, and for a value that does not fit.
    """
    flags = [_dashed(flag) for flag in argv]
    for flag in argv:
        if flag.startswith("--"):
            name = flag[2:].split("=")[0].replace(".", "__").replace("-", "_").upper()
            _refuse_gone(flag.split("=")[0], name)
            _refuse_unknown_flag(flag.split("=")[0], name)
    _refuse_unknown(found := os.environ if environ is None else environ)
    if found.get(f"{PREFIX}AUTH__KEYS") == "":  # other settings without a value are those that nobody has set
        raise SettingsProblem(f"{PREFIX}AUTH__KEYS: {NO_KEY}")
    try:
        return Settings(_cli_parse_args=flags)  # type: ignore[call-arg]  # an initialiser's argument of BaseSettings
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


def _refuse_gone(given: str, name: str) -> None:
    if name in GONE:
        raise SettingsProblem(f"{given} is no longer a setting: {GONE[name]}")


def _refuse_unknown_flag(flag: str, name: str) -> None:
    flags = {known.removeprefix(PREFIX): _flag(known) for known in names()}
    if name != "HELP" and name not in flags and name not in {known.partition("__")[0] for known in flags}:
        nearest = flags[difflib.get_close_matches(name, flags, n=1, cutoff=0)[0]]
        raise SettingsProblem(f"{flag} is not a setting; the nearest one is {nearest}, and --help lists them all")


def _flag(name: str) -> str:
    """`RANKER_QUEUE__MAX_CANDIDATES` as `--queue.max-candidates`."""
    return "--" + name.removeprefix(PREFIX).lower().replace("__", ".").replace("_", "-")


def _refuse_unknown(environ: Mapping[str, str]) -> None:
    known = list(names())
    for name in sorted(environ):
        if not name.upper().startswith(PREFIX) or name.upper() in known:
            continue
        _refuse_gone(name, name.upper().removeprefix(PREFIX))
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
