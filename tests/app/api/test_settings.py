"""Settings: where values come from, and that a slip is named."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest

from app.queue.loading import engine_options
from app.settings import Batching, Group, Limits, Queue, Settings, SettingsProblem, listen_hosts, load_settings, names
from loadtest.server import DEMO, POSTS, TOWERS

pytestmark = pytest.mark.one_process("it is about settings alone")

DIGEST = hashlib.sha256(b"secret").hexdigest()
OTHER_DIGEST = "b" * 64
BOTH = f'{{"a": "{DIGEST}", "a": "{OTHER_DIGEST}"}}'


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


def test_keys_are_those_of_the_highest_place_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A key that somebody replaces must not count any more."""
    config = tmp_path / "settings.toml"
    config.write_text(f'[auth]\nkeys = {{old = "{DIGEST}"}}\n[queue]\nmax_candidates = 77\n')
    flags = ["--config", str(config)]
    assert load_settings(flags).auth.keys.keys() == {"old"}
    monkeypatch.setenv("RANKER_AUTH__KEYS", f'{{"new": "{OTHER_DIGEST}"}}')
    assert load_settings(flags).auth.keys.keys() == {"new"}
    settings = load_settings([*flags, "--auth.keys", f'{{"newest": "{"c" * 64}"}}'])
    assert settings.auth.keys.keys() == {"newest"}
    assert settings.queue.max_candidates == 77
    for twice in ([f"--auth.keys={BOTH}"], ["--auth.keys", BOTH]):
        with pytest.raises(SettingsProblem, match="has one name twice"):
            load_settings(twice)


@pytest.mark.parametrize("hosts", ["*", "*.example.com", "ranker,[::1],127.0.0.1", ""])
def test_hosts_that_a_port_can_have_are_taken(hosts: str) -> None:
    assert load_settings([f"--hosts={hosts}"]).hosts == hosts


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


def test_names_that_kubernetes_injects_are_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANKER_PORT_8000_TCP_ADDR", "10.0.0.1")
    with pytest.raises(SettingsProblem, match="enableServiceLinks"):
        load_settings()


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
        ("RANKER_AUTH__KEYS", f'{{"a": "{DIGEST}", "b": "{DIGEST}"}}'),
        ("RANKER_AUTH__KEYS", f'{{"a": "{DIGEST}", "a": "{OTHER_DIGEST}"}}'),
        ("ranker_auth__keys", ""),
        ("RANKER_AUTH__keys", f'{{"a": "{DIGEST}", "a": "{OTHER_DIGEST}"}}'),
        ("RANKER_AUTH__KEYS", "[" * 3000),
        ("RANKER_LIMITS__MAX_BODY_BYTES", "9" * 20),
        ("RANKER_LIMITS__MAX_CANDIDATES", str(2**63 - 1)),
        ("RANKER_LIMITS__MAX_HISTORY", str(2**63 - 1)),
        ("RANKER_LIMITS__MAX_RETRIEVED", str(2**62)),
        ("RANKER_CACHE__BYTES", str(2**64)),
        ("RANKER_QUEUE__MAX_CANDIDATES", "9" * 32),
        ("RANKER_QUEUE__STALL_SECONDS", "31"),
        ("RANKER_QUEUE__STALL_EXIT_SECONDS", "3"),
        ("RANKER_SERVED__KEEP_DAYS", "1000000"),
        ("RANKER_ADMIN__PORT", "9"),
        ("RANKER_RETRIEVAL__FEED", "redis://reader:secret/x@redis:6379/posts"),
        ("RANKER_RETRIEVAL__FEED", "redis://redis:secret/posts"),
        ("RANKER_HOST", "[::1"),
        ("RANKER_HOST", "[::1]:8000"),
        ("RANKER_HOST", "10.0.0.1:8000"),
        ("RANKER_HOST", "a b"),
        ("RANKER_HOST", "ranker..internal"),
        ("RANKER_HOST", "a" * 64 + ".internal"),
        ("RANKER_PROBES__HOST", "::g"),
        ("RANKER_ROOT_PATH", "ranker"),
        ("RANKER_ROOT_PATH", "/ranker/"),
        ("RANKER_ROOT_PATH", "/a%20b"),
        ("RANKER_HOSTS", "ranker*"),
        ("RANKER_HOSTS", "*example.com"),
        ("RANKER_HOSTS", "feed,ranker.example.com:8443"),
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


@pytest.mark.parametrize("name", [b"keys.json", b"k\xe9ys.json"])
@pytest.mark.parametrize("content", [None, "{}"])
def test_a_file_of_keys_that_cannot_be_used_is_named(name: bytes, content: str | None, tmp_path: Path) -> None:
    file = tmp_path / os.fsdecode(name)
    if content is not None:
        file.write_text(content)
    with pytest.raises(SettingsProblem, match=r"^RANKER_AUTH__KEYS_FILE: .*k\S*ys\.json"):
        load_settings([f"--auth.keys-file={file}"])


def test_secrets_are_hidden_in_what_is_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANKER_AUTH__KEYS", f'{{"feed": "{DIGEST.upper()}"}}')
    monkeypatch.setenv("RANKER_ADMIN__PORT", "9")
    monkeypatch.setenv("RANKER_ADMIN__TOKEN_SHA256", DIGEST)
    settings = load_settings()
    assert settings.auth.keys["feed"].get_secret_value() == DIGEST
    assert DIGEST not in str(settings.effective()).lower()
    assert "feed" in str(settings.effective())
    assert DIGEST not in repr(settings).lower()


def test_a_backend_may_name_its_vectors() -> None:
    narrow = engine_options(Settings(backend="native-avx2"))
    assert (narrow.backend, narrow.vectors) == ("native", "avx2")
    assert engine_options(Settings(backend="native")).vectors == "auto"


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--probes.port=9000", "--admin.port=9000"], "probes.port and admin.port are both 9000"),
        (["--port=9000", "--admin.port=9000"], "port and admin.port are both 9000"),
        (["--port=9000", "--host=0.0.0.0", "--probes.port=9000"], "port and probes.port are both 9000"),
        (["--port=9000", "--host=*", "--probes.port=9000"], "port and probes.port are both 9000"),
        (["--port=9000", "--host=10.0.0.1,127.0.0.1", "--probes.port=9000"], "port and probes.port are both 9000"),
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


@pytest.mark.parametrize(
    ("group", "bounds"),
    [
        (Limits(max_candidates=8192), {"max_batch_candidates": 32_768, "batch_candidates": 131_072}),
        (Limits(max_retrieved=100, max_body_bytes=2048), {"max_excluded": 500, "buffered_bytes": 2**17}),
        (Queue(), {"max_context_tokens": 262_144}),
        (Batching(), {"max_context_tokens": 16_384}),
    ],
    ids=str,
)
def test_bounds_follow_from_settings(group: Group, bounds: dict[str, float]) -> None:
    assert {name: getattr(group, name) for name in bounds} == bounds


def test_limits_that_follow_are_shown_with_those_that_are_set() -> None:
    assert {"max_candidates", "max_batch_candidates", "max_excluded"} <= set(Settings().effective()["limits"])


@pytest.mark.parametrize(
    ("host", "addresses", "names", "explores"),
    [
        ("127.0.0.1", ["127.0.0.1"], ["localhost", "127.0.0.1", "[::1]"], True),
        ("::1", ["::1"], ["localhost", "127.0.0.1", "[::1]"], True),
        ("[::1]", ["::1"], ["localhost", "127.0.0.1", "[::1]"], True),
        ("127.0.0.1,[::1]", ["127.0.0.1", "::1"], ["localhost", "127.0.0.1", "[::1]"], True),
        ("localhost, 127.0.0.2", ["localhost", "127.0.0.2"], ["localhost", "127.0.0.1", "[::1]", "127.0.0.2"], True),
        ("*", ["0.0.0.0", "::"], ["*"], False),  # noqa: S104
        ("::", ["::"], ["*"], False),
        ("127.0.0.1,10.0.0.7", ["127.0.0.1", "10.0.0.7"], ["*"], False),
        ("ranker.internal", ["ranker.internal"], ["*"], False),
    ],
)
def test_a_host_may_be_of_both_families(host: str, addresses: list[str], names: list[str], explores: bool) -> None:
    settings = load_settings(["--host", host])
    assert listen_hosts(settings.host) == addresses
    assert settings.allowed_hosts(settings.host) == names
    assert settings.explores is explores


def test_names_that_are_set_come_before_those_of_loopback() -> None:
    settings = load_settings(["--hosts", "ranker,feed"])
    assert settings.allowed_hosts("127.0.0.1") == ["ranker", "feed"]
    assert settings.allowed_hosts("127.0.0.1", is_main=False) == ["ranker", "feed", "localhost", "127.0.0.1", "[::1]"]
    assert settings.allowed_hosts("0.0.0.0", is_main=False) == ["*"]  # noqa: S104
    assert load_settings(["--hosts", "*"]).allowed_hosts("127.0.0.1") == ["*"]


def test_a_file_of_settings_yields_to_variables_and_flags(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "ranker.toml"
    file.write_text(
        'port = 1\nthreads = 3\n[queue]\nmax_requests = 5\nmax_candidates = 6\n[auth.keys]\nfeed = "'
        + "ab" * 32
        + '"\n'
    )
    monkeypatch.setenv("RANKER_QUEUE__MAX_REQUESTS", "7")
    settings = load_settings(["--config", str(file), "--threads", "2"])
    assert (settings.port, settings.threads) == (1, 2)
    assert (settings.queue.max_requests, settings.queue.max_candidates) == (7, 6)
    assert [*settings.auth.keys] == ["feed"]
    monkeypatch.setenv("RANKER_CONFIG", str(file))
    assert load_settings().port == 1


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "[queue]\nmax_requsts = 5\n",
            "ranker.toml: queue.max_requsts is not a setting; the nearest one is queue.max_requests",
        ),
        ("prot = 5\n", "ranker.toml: prot is not a setting; the nearest one is port"),
        ("queue = 5\n", "ranker.toml: queue is not a setting"),
        ("port = \n", "ranker.toml is not TOML"),
        ("port = 70000\n", "RANKER_PORT: Input should be less than or equal to 65535"),
    ],
)
def test_a_wrong_file_of_settings_is_one_sentence(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "ranker.toml"
    file.write_text(text)
    with pytest.raises(SettingsProblem) as caught:
        load_settings([f"--config={file}"])
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_without_a_checkpoint_the_demo_is_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert (load_settings().checkpoint, load_settings().retrieval.corpus) == (DEMO, None)
    both = load_settings(with_posts=True)
    assert (both.checkpoint, both.retrieval.checkpoint, both.retrieval.corpus) == (DEMO, TOWERS, POSTS)
    mine = load_settings(["--checkpoint=mine"], with_posts=True)
    assert (mine.checkpoint, mine.retrieval.corpus) == (Path("mine"), None)
    own = ["--retrieval.checkpoint=t", "--retrieval.corpus=c"]
    named = load_settings(own, with_posts=True)
    assert (named.checkpoint, named.retrieval.corpus) == (DEMO, Path("c"))
    monkeypatch.setenv("RANKER_CHECKPOINT", "mine")
    assert load_settings(with_posts=True).retrieval.corpus is None


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{}", "it holds no key"),
        ("", "it holds no key"),
        ("nonsense", "must be JSON"),
        ('{"a": "b"}', "must be a SHA-256"),
        ('{"a": "' + "ab" * 32 + '", "a": "' + "cd" * 32 + '"}', "has one name twice"),
        ('["a"]', "valid dictionary"),
    ],
)
def test_a_file_of_keys_that_cannot_be_used_stops_the_start(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "keys.json"
    file.write_text(text)
    with pytest.raises(SettingsProblem, match=r"keys\.json") as caught:
        load_settings(["--auth.keys-file", str(file)])
    assert said in str(caught.value)


def test_keys_stand_in_one_place(tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    file.write_text('{"a": "' + "ab" * 32 + '"}')
    with pytest.raises(SettingsProblem, match=r"^auth\.keys and auth\.keys_file exclude each other"):
        load_settings(["--auth.keys-file", str(file), "--auth.keys", '{"b": "' + "cd" * 32 + '"}'])
