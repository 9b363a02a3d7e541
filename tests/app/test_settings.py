"""Settings: where values come from, and that a slip is named."""

from __future__ import annotations

import hashlib
import os
from dataclasses import fields
from pathlib import Path
from typing import get_args, get_type_hints

import pytest

from app.settings import Settings, SettingsProblem, load_settings, names
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
        ("RANKER_AUTH__KEYS", '{"feed": "secret"}'),
        ("RANKER_AUTH__KEYS", f'{{"fe ed": "{DIGEST}"}}'),
        ("RANKER_AUTH__KEYS", "nonsense"),
        ("RANKER_ADMIN__PORT", "9"),
    ],
)
def test_a_bad_value_is_named_and_not_shown(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.setenv(name, value)
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
        assert get_args(Settings.model_fields[name].annotation) == wanted[name], name


@pytest.mark.parametrize(
    ("endpoint", "shown"),
    [
        ("http://collector:4318/v1/traces", "http://collector:4318/v1/traces"),
        ("https://user:secret@collector/v1/traces", "https://**********@collector/v1/traces"),
        ("https://collector/v1/traces?key=secret", "https://collector/v1/traces?**********"),
        ("https://a:secret/@secret?@collector:1/v1#secret", "https://**********@collector:1/v1?**********"),
        ("user:secret@collector:4318", "**********@collector:4318"),
        (None, None),
    ],
)
def test_credentials_of_the_collector_are_used_and_never_shown(endpoint: str | None, shown: str | None) -> None:
    settings = Settings(tracing={"endpoint": endpoint})
    assert settings.tracing.endpoint == endpoint
    assert settings.effective()["tracing"]["endpoint"] == shown
    assert "secret" not in str(settings.effective())


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


def test_ports_that_are_free_or_on_other_addresses_are_not() -> None:
    load_settings(["--probes.port=0", "--admin.port=0", f"--admin.token-sha256={DIGEST}"])
    load_settings(["--port=9000", "--host=127.0.0.1", "--probes.port=9000", "--probes.host=127.0.0.2"])
