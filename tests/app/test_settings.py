"""Settings: where values come from, and that a slip is named."""

from __future__ import annotations

import hashlib
import os
import re
from dataclasses import fields
from pathlib import Path
from typing import get_args, get_type_hints

import pytest

from app.engine.loading import engine_options
from app.environment import GONE, load_settings, names
from app.limits import Batching, Group, Limits, Queue
from app.settings import PREFIX, Connections, Settings, SettingsProblem
from model.create import EngineOptions

DIGEST = hashlib.sha256(b"secret").hexdigest()


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ:
        if name.startswith("RANKER_"):
            monkeypatch.delenv(name)


def test_flags_beat_the_environment_which_beats_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANKER_PORT", "8101")
    monkeypatch.setenv("RANKER_QUEUE__MAX_CANDIDATES", "77")
    assert load_settings().port == 8101
    settings = load_settings(["--port", "8102"])
    assert (settings.port, settings.queue.max_candidates, settings.host) == (8102, 77, "127.0.0.1")


@pytest.mark.parametrize("flag", ["--queue.max-candidates", "--queue.max_candidates"])
@pytest.mark.parametrize("joined", [True, False])
def test_flags_are_named_like_the_settings(flag: str, joined: bool) -> None:
    argv = [f"{flag}=78"] if joined else [flag, "78"]
    assert load_settings(argv).queue.max_candidates == 78


def test_every_name_of_the_environment_has_a_flag(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        load_settings(["--help"])
    shown = capsys.readouterr().out
    for name in names():
        flag = "--" + name.removeprefix("RANKER_").lower().replace("__", ".").replace("_", "-")
        assert flag in shown


def test_the_contracts_names_exist() -> None:
    wanted = ("CHECKPOINT", "HOST", "PORT", "DEVICE", "DTYPE", "CANDIDATE_POSITIONS")
    assert {f"RANKER_{name}" for name in wanted} <= set(names())


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("RANKER_PROT", "RANKER_PORT"),
        ("RANKER_QUEUE__MAX_CANDIDATE", "RANKER_QUEUE__MAX_CANDIDATES"),
        ("RANKER_QUEUE", "RANKER_QUEUE__MAX_CANDIDATES"),
        ("RANKER_CACHE_BYTES", "RANKER_CACHE__BYTES"),
        ("ranker_prot", "RANKER_PORT"),
    ],
)
def test_an_unknown_name_is_an_error_with_a_hint(monkeypatch: pytest.MonkeyPatch, name: str, nearest: str) -> None:
    monkeypatch.setenv(name, "1")
    with pytest.raises(SettingsProblem) as caught:
        load_settings()
    assert name in str(caught.value)
    assert nearest in str(caught.value)


def test_names_that_kubernetes_injects_are_explained() -> None:
    with pytest.raises(SettingsProblem, match="enableServiceLinks"):
        load_settings(environ={"RANKER_PORT_8000_TCP_ADDR": "10.0.0.1"})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("RANKER_PORT", "none"),
        ("RANKER_PORT", "70000"),
        ("RANKER_DEVICE", "tpu"),
        ("RANKER_DRAIN__DELAY_SECONDS", "-1"),
        ("RANKER_DRAIN__DELAY_SECONDS", "inf"),
        ("RANKER_THREADS", "100000"),
        ("RANKER_AUTH__KEYS", '{"feed": "secret"}'),
        ("RANKER_AUTH__KEYS", f'{{"fe ed": "{DIGEST}"}}'),
        ("RANKER_AUTH__KEYS", "nonsense"),
        ("RANKER_AUTH__KEYS", ""),
        ("RANKER_AUTH__KEYS", "{}"),
        ("RANKER_ADMIN__PORT", "9"),
        ("RANKER_RETRIEVAL__FEED", "redis://reader:secret/x@redis:6379/posts"),
        ("RANKER_RETRIEVAL__FEED", "redis://redis:secret/posts"),
    ],
)
def test_a_bad_value_is_named_and_not_shown(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.setenv(name, value)
    for what in ("CHECKPOINT", "CORPUS"):
        monkeypatch.setenv(f"RANKER_RETRIEVAL__{what}", "here")
    with pytest.raises(SettingsProblem) as caught:
        load_settings()
    assert name.split("__")[0].removeprefix("RANKER_").lower() in str(caught.value).lower()
    assert "secret" not in str(caught.value)


def test_secrets_are_hidden_in_what_is_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANKER_AUTH__KEYS", f'{{"feed": "{DIGEST.upper()}"}}')
    monkeypatch.setenv("RANKER_ADMIN__PORT", "9")
    monkeypatch.setenv("RANKER_ADMIN__TOKEN_SHA256", DIGEST)
    settings = load_settings()
    assert settings.auth.keys["feed"].get_secret_value() == DIGEST
    assert DIGEST not in str(settings.effective()).lower()
    assert "feed" in str(settings.effective())
    assert DIGEST not in repr(settings).lower()


def test_settings_do_not_change() -> None:
    with pytest.raises(ValueError, match="frozen"):
        Settings().port = 1  # type: ignore[misc]
    assert Settings().checkpoint == Path("weights/demo")


def test_choices_of_the_engine_are_the_models() -> None:
    wanted = {field.name: get_args(get_type_hints(EngineOptions)[field.name]) for field in fields(EngineOptions)}
    for name in ("device", "dtype", "backend", "candidate_positions"):
        ours = (each for each in get_args(Settings.model_fields[name].annotation) if each != "native-avx2")
        assert tuple(ours) == wanted[name], name
    narrow = engine_options(Settings(backend="native-avx2"))
    assert (narrow.backend, narrow.vectors) == ("native", "avx2")
    assert "avx2" in wanted["vectors"]
    assert engine_options(Settings(backend="native")).vectors == "auto"


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--probes.port=9000", "--admin.port=9000"], "probes.port and admin.port are both 9000"),
        (["--port=9000", "--grpc.port=9000"], "port and grpc.port are both 9000"),
        (["--port=9000", "--admin.port=9000"], "port and admin.port are both 9000"),
        (["--port=9000", "--host=0.0.0.0", "--probes.port=9000"], "port and probes.port are both 9000"),
    ],
)
def test_ports_that_are_the_same_are_refused_with_a_sentence(flags: list[str], named: str) -> None:
    with pytest.raises(SettingsProblem, match=f"^{named}: each needs a port of its own$"):
        load_settings([*flags, f"--admin.token-sha256={DIGEST}"])


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--auth.keys", '{"feed": "%s"}'], "the key named feed"),
        (["--admin.port=0", "--admin.token-sha256", "%s"], "admin.token_sha256"),
    ],
)
def test_the_digest_of_an_empty_secret_is_refused(flags: list[str], named: str) -> None:
    """As of a variable that was not set: whoever sends no key, or an empty token, would be let in."""
    *before, last = flags
    load_settings([*before, last % DIGEST])
    for nothing in (hashlib.sha256().hexdigest(), hashlib.sha256().hexdigest().upper()):
        with pytest.raises(SettingsProblem, match=f"{named} is the SHA-256 of nothing"):
            load_settings([*before, last % nothing])


def test_ports_that_are_free_or_on_other_addresses_are_not() -> None:
    load_settings(["--probes.port=0", "--admin.port=0", f"--admin.token-sha256={DIGEST}"])
    load_settings(["--port=9000", "--host=127.0.0.1", "--probes.port=9000", "--probes.host=127.0.0.2"])


NAMES_OF_1773CCA = """
HOST PORT CHECKPOINT DEVICE DTYPE BACKEND CANDIDATE_POSITIONS VECTORS THREADS FRONTS ENGINE_LOSS
LIMITS__MAX_BODY_BYTES LIMITS__MAX_CANDIDATES LIMITS__MAX_HISTORY LIMITS__MAX_VALUES LIMITS__MAX_BATCH_REQUESTS
LIMITS__MAX_BATCH_CANDIDATES LIMITS__MAX_RETRIEVED LIMITS__MAX_EXCLUDED BUDGETS__CONNECTIONS BUDGETS__BODY_BYTES
BUDGETS__REPLY_BYTES BUDGETS__BATCH_CANDIDATES BUDGETS__EXCLUDED_IDS BUDGETS__CHANGES QUEUE__MAX_CANDIDATES
QUEUE__MAX_CONTEXT_TOKENS QUEUE__MAX_REQUESTS QUEUE__MAX_WAIT_SECONDS QUEUE__MAX_SHARE_PER_KEY
QUEUE__KEY_CANDIDATES_PER_SECOND QUEUE__STALL_SECONDS QUEUE__STALL_EXIT_SECONDS BATCHING__ENABLED
BATCHING__MAX_REQUESTS BATCHING__MAX_CANDIDATES BATCHING__MAX_CONTEXT_TOKENS BATCHING__CHUNK_CANDIDATES
BATCHING__WINDOW_SECONDS CACHE__BYTES RETRIEVAL__CHECKPOINT RETRIEVAL__CORPUS RETRIEVAL__DTYPE RETRIEVAL__CACHE_BYTES
RETRIEVAL__BATCH_REQUESTS RETRIEVAL__MAX_WAITING RETRIEVAL__COMPACT_ROWS DEADLINE__DEFAULT_SECONDS
DEADLINE__MAX_SECONDS DRAIN__DELAY_SECONDS DRAIN__TIMEOUT_SECONDS CONNECTIONS__HEADER_SECONDS
CONNECTIONS__BODY_SECONDS CONNECTIONS__STALL_SECONDS CONNECTIONS__KEEP_ALIVE_SECONDS CONNECTIONS__MAX_HEADER_BYTES
CONNECTIONS__HELD_REFUSALS CONNECTIONS__BACKLOG AUTH__KEYS ADMIN__HOST ADMIN__PORT ADMIN__TOKEN_SHA256 ADMIN__ROOT
PROBES__HOST PROBES__PORT EXPLORE__ENABLED EXPLORE__MAX_CANDIDATES EXPLORE__MAX_EVENTS EXPLORE__CONCURRENT
EXPLORE__DEADLINE_SECONDS SHADOW__CHECKPOINT SHADOW__SHARE SHADOW__MAX_WAITING SHADOW__MAX_WAIT_SECONDS SPLIT__USERS
SPLIT__EXPERIMENT GRPC__MAX_CALLS GRPC__MAX_CONNECTIONS GRPC__HOST GRPC__PORT RELOAD__WATCH_SECONDS
RELOAD__TIMEOUT_SECONDS LOGS__LEVEL LOGS__FORMAT LOGS__SUCCESS_SAMPLE LOGS__BUFFER_BYTES TRACING__ENABLED
TRACING__ENDPOINT TRACING__SAMPLE_RATIO
"""
EARLIER = NAMES_OF_1773CCA.split()


@pytest.mark.parametrize("name", EARLIER)
def test_every_earlier_setting_is_one_still_or_is_refused_with_what_to_do(name: str) -> None:
    if f"{PREFIX}{name}" in names():
        assert name not in GONE
        return
    flag = "--" + name.lower().replace("__", ".")
    for given in (f"{PREFIX}{name}", flag, flag.replace("_", "-")):
        with pytest.raises(SettingsProblem, match=f"^{given} is no longer a setting: [^;]*[a-z]") as caught:
            load_settings(
                [f"{given}=1"] if given == flag else [given, "1"] if given.startswith("--") else [], {given: "1"}
            )
        for named in re.findall(r"RANKER_\w+", str(caught.value).split(": ")[1]):
            assert named in names()


def test_nothing_is_gone_that_never_was() -> None:
    assert set(GONE) <= set(EARLIER)
    assert len(list(names())) <= 57


@pytest.mark.parametrize(
    ("group", "bounds"),
    [
        (
            Limits(),
            {"max_values": 30_000, "max_batch_requests": 64, "max_batch_candidates": 16_384, "max_excluded": 10_000},
        ),
        (Limits(), {"batch_candidates": 65_536, "buffered_bytes": 64 * 2**20}),
        (
            Limits(max_candidates=8192),
            {"max_values": 57_344, "max_batch_candidates": 32_768, "batch_candidates": 131_072},
        ),
        (Limits(max_retrieved=100, max_body_bytes=2048), {"max_excluded": 500, "buffered_bytes": 2**17}),
        (Queue(), {"max_context_tokens": 262_144}),
        (Batching(), {"max_context_tokens": 16_384}),
        (Connections(), {"stall_seconds": 4.0}),
    ],
    ids=str,
)
def test_bounds_follow_from_settings(group: Group, bounds: dict[str, float]) -> None:
    assert {name: getattr(group, name) for name in bounds} == bounds


def test_limits_that_follow_are_shown_with_those_that_are_set() -> None:
    assert {"max_candidates", "max_values", "max_batch_candidates", "max_excluded"} <= set(
        Settings().effective()["limits"]
    )
