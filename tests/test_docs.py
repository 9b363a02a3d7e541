"""The pages: what they name is there, and README's commands run. Those of docs/api.md are run by `tests/e2e/test_api_page.py`."""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path

import pytest
import typer
from fastapi.routing import APIRoute
from typer.core import TyperGroup

from app import cli
from app.main import create_admin_app, create_app
from app.settings import CONFIG, names
from app.telemetry.logs import AccessLine
from app.telemetry.metrics import Metrics, Snapshot, figures
from loadtest.__main__ import COMMANDS
from loadtest.machine import ROOT
from loadtest.server import free_port
from model.engine import CacheStats
from model.retrieval.inputs import Mark
from tests.support import rankers
from weights.command_line import app as weights_app

ENDED = ROOT / "CHANGELOG.md"  # names what is no longer there
PAGES = [
    *(ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "SECURITY", "CHANGELOG")),
    ROOT / "app/client/README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]
FILE = re.compile(r"\.?[\w.-]+(?:/[\w.-]+)*(?:/|/[\w.-]+\.(?:py|yaml|yml|cfg|lock|md|h|cpp))")
TOKEN_SHA256 = "0" * 64

Check = Callable[[str, Path], Iterator[str]]


def links(text: str, page: Path) -> Iterator[str]:
    """Links to files that are not there, or to headings that their page does not have."""
    for target in re.findall(r"\]\(([^)\s]+)\)", without_code(text)):
        path, _, anchor = target.partition("#")
        if re.match(r"[a-z]+:", target):
            continue
        found = (page.parent / path).resolve() if path else page
        if not found.exists() or (anchor and anchor not in anchors(found.read_text() if path else text)):
            yield target


def anchors(text: str) -> set[str]:
    """The names that GitHub gives to the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", without_blocks(text), re.M)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def targets(text: str, page: Path) -> Iterator[str]:
    """Targets of make that the Makefile does not have."""
    known = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    for target in re.findall(r"(?:`|^ *)make ([a-z][a-z-]*)", text, re.M):
        if target not in known:
            yield f"make {target}"


def settings(text: str, page: Path) -> Iterator[str]:
    """Settings that there are not, with or without the prefix. `GROUP__…` stands for a group."""
    known = {*names(), CONFIG}
    for name in re.findall(r"RANKER_[A-Z0-9_]*[A-Z0-9]", text):
        if name not in known and not any(each.startswith(f"{name}__") for each in known):
            yield name
    for name in re.findall(r"\b[A-Z]+__(?:[A-Z0-9_]+)?", text):
        if not any(each == f"RANKER_{name}" or (name.endswith("__") and f"_{name}" in each) for each in known):
            yield name


def metrics(text: str, page: Path) -> Iterator[str]:
    """Series that a scrape does not have."""
    for name in re.findall(r"\branker_[a-z_]+[a-z]\b", text):
        if name not in series():
            yield name


@cache
def series() -> set[str]:
    """The names of all series, those of histograms without their endings too."""
    registry = Metrics()
    everything = Snapshot(
        ready=True, queue_requests=0, queue_candidates=0, cache=CacheStats(), model={}, last_forward_timestamp_seconds=0.0,
        device_memory_bytes=0, engine_steps_down=0, searches_waiting=0, corpus=Figures(), milestone=None, feed_lag_seconds=0.0,
        stalled_seconds=0.0,
    )  # fmt: skip
    registry.watch(lambda: everything)
    families = [*registry.registry.collect(), *figures(everything)]
    return {name for family in families for name in (family.name, f"{family.name}_total") if name.startswith("ranker_")}


class Figures:
    """A corpus without posts."""

    posts = changes = 0
    mark = Mark(digest="0")


def commands(text: str, page: Path) -> Iterator[str]:
    """Commands of `phoenix-ranker`, `python -m weights` and `python -m loadtest` that there are not."""
    pattern = r"(phoenix-ranker|python -m weights|python -m loadtest) ([a-z][a-z-]*)(?: ([a-z]+)\b)?"
    for program, command, inner in re.findall(pattern, text):
        if command not in known_commands()[program]:
            yield f"{program} {command}"
        elif command == "corpus" and inner and inner not in known_commands()["corpus"]:
            yield f"{program} {command} {inner}"


@cache
def known_commands() -> dict[str, set[str]]:
    """The commands of each program, and those of `corpus`."""
    group, weights = typer.main.get_command(cli.cli), typer.main.get_command(weights_app)
    assert isinstance(group, TyperGroup)
    assert isinstance(weights, TyperGroup)
    corpus = weights.commands["corpus"]
    assert isinstance(corpus, TyperGroup)
    found = {"phoenix-ranker": group, "python -m weights": weights, "corpus": corpus}
    return {name: {*each.commands} for name, each in found.items()} | {"python -m loadtest": {*COMMANDS}}


def paths(text: str, page: Path) -> Iterator[str]:
    """Files and folders of the repository that are not there; those of `app` may be named from there."""
    for span in re.findall(r"`([^`\n]+)`", text):
        places = (ROOT, ROOT / "app", ROOT / "app/api", page.parent)
        if FILE.fullmatch(span) and not any((place / span).exists() for place in places):
            yield span


def endpoints(text: str, page: Path) -> Iterator[str]:
    """Endpoints that are no route."""
    for method, path in re.findall(r"`(GET|POST) (/[\w/{}.@-]*)", text):
        if (method, path) not in routes():
            yield f"{method} {path}"


@cache
def routes() -> set[tuple[str, str]]:
    """Method and path of every route, also of the admin port."""
    ranker = rankers.create(admin={"port": 1, "token_sha256": TOKEN_SHA256})
    apps = create_app(ranker.settings, ranker), create_admin_app(ranker.settings, ranker)
    every = [route for each in apps for route in each.routes if isinstance(route, APIRoute)]
    return {(method, route.path) for route in every for method in route.methods or ()}


def without_code(text: str) -> str:
    """The page without its blocks and spans of code."""
    return re.sub(r"`[^`\n]*`", "", without_blocks(text))


def without_blocks(text: str) -> str:
    """The page without its blocks of code."""
    return re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)


CHECKS: dict[Check, str] = {
    links: "[a](nowhere.md) [b](README.md#no-such-heading)",
    targets: "`make nothing`\n\n```\nmake nothing\n```",
    settings: "`RANKER_NOTHING` `QUEUE__NOTHING` `NOTHING__…`",
    metrics: "`ranker_nothing_total`",
    commands: "`phoenix-ranker nothing` `phoenix-ranker corpus nothing` `python -m weights nothing` `python -m loadtest nothing`",
    paths: "`app/nothing.py` `docker/nothing/`",
    endpoints: "`GET /nothing`",
}
"""Each check with a text that breaks it in every way that it knows."""


def named(value: object) -> str:
    return value.relative_to(ROOT).as_posix() if isinstance(value, Path) else getattr(value, "__name__", str(value))


@pytest.mark.parametrize("page", PAGES, ids=named)
@pytest.mark.parametrize("check", CHECKS, ids=named)
def test_what_a_page_names_is_there(check: Check, page: Path) -> None:
    if page != ENDED or check in (links, targets):
        assert [*check(page.read_text(), page)] == []


@pytest.mark.parametrize(("check", "broken"), CHECKS.items(), ids=named)
def test_what_is_not_there_is_noticed(check: Check, broken: str) -> None:
    wrong = len(re.findall("nothing|nowhere|no-such", broken, re.I))
    assert len([*check(broken, ROOT / "docs")]) == wrong if check is not links else 2


def test_the_operators_page_has_a_section_for_each_alert() -> None:
    alerts = re.findall(r"- alert: (\w+)", (ROOT / "docker/prometheus/rules.yml").read_text())
    assert alerts
    assert {alert.lower() for alert in alerts} <= anchors((ROOT / "docs/operations.md").read_text())


def test_the_operators_page_lists_every_series() -> None:
    page = (ROOT / "docs/operations.md").read_text()
    families = {name.removesuffix("_total") for name in series()}
    assert {name for name in families if name not in page} == set()


def test_the_operators_page_has_a_row_for_each_setting() -> None:
    page = (ROOT / "docs/operations.md").read_text()
    table = page.partition("| `RANKER_…` | default | what |")[2].partition("\n\n")[0]
    rows = re.findall(r"^\| `([A-Z0-9_]+)` \|", table, re.M)
    assert sorted(f"RANKER_{name}" for name in rows) == sorted({*names()} - {CONFIG})


def test_the_operators_page_lists_every_event_and_no_other() -> None:
    page = (ROOT / "docs/operations.md").read_text()
    rows = page.partition("| event | what it means |")[2].partition("## Capacity")[0]
    listed = {name for row in re.findall(r"^\| (`.*?) \|", rows, re.M) for name in re.findall(r"`(\w+)`", row)}
    trees = [ast.parse(path.read_text()) for path in (ROOT / "app").rglob("*.py") if "client" not in path.parts]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    assert {event for node in nodes for event in events(node)} - listed == set()
    assert listed - {node.value for node in nodes if isinstance(node, ast.Constant)} == set()


def test_the_operators_page_has_every_key_of_a_log_line() -> None:
    page = (ROOT / "docs/operations.md").read_text()
    keys = page.partition("| key of `request` and `probe` |")[2].partition("| event |")[0]
    rows = re.findall(r"^\| (`.*?) \|", keys, re.M)
    assert sorted(name for row in rows for name in re.findall(r"`(\w+)`", row)) == sorted(AccessLine.__struct_fields__)


def test_the_map_of_the_code_names_every_file_of_the_api() -> None:
    page = (ROOT / "docs/architecture.md").read_text()
    files = {path.name for path in (ROOT / "app/api").glob("*.py")} - {"__init__.py"}
    assert {name for name in files if not re.search(rf"`(?:api/)?{name}`", page)} == set()


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_a_line_for_cron_has_the_whole_path(page: Path) -> None:
    """Cron looks for commands in /usr/bin and /bin alone."""
    commands = re.findall(r"^[\d*][^\s|]*(?: [\d*][^\s|]*){4} (\S+)", page.read_text(), re.M)
    assert [command for command in commands if not command.startswith("/")] == []


def events(node: ast.AST) -> Iterator[str]:
    """The events that a call of `log` or of a fresh logger may write."""
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute) or not node.args:
        return
    if node.func.attr in ("debug", "info", "warning", "error") and re.fullmatch(
        r"log|structlog\.get_logger\(.*\)", ast.unparse(node.func.value)
    ):
        named = [part.value for part in ast.walk(node.args[0]) if isinstance(part, ast.Constant)]
        yield from (each for each in named if isinstance(each, str))


def shell_blocks() -> list[str]:
    return re.findall(r"^```sh\n(.*?)^```", (ROOT / "README.md").read_text(), re.M | re.S)


def run(script: str, **environment: str) -> str:
    """What bash prints in a clone whose environment is made. Fails where a command does."""
    command = ["bash", "-euo", "pipefail", "-c", script.replace("make serve", "make --silent -o .venv/.serving serve")]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_the_first_commands_of_the_readme_rank_as_it_says() -> None:
    port, text = str(free_port()), (ROOT / "README.md").read_text()
    said = re.search(r'"post_id":"(\d+)","score":(-?[\d.]+),"rank":(\d+)', text)
    assert said is not None
    assert "`kill %1` stops the server" in text
    script = shell_blocks()[0].replace(":8000", f":{port}")
    reply = json.loads(run(f"trap 'kill %1; wait' EXIT\n{script}", RANKER_PORT=port))
    first = reply["candidates"][0]
    assert (first["post_id"], str(first["rank"])) == (said[1], said[3])
    assert first["score"] == pytest.approx(float(said[2]), abs=0.02), "bf16 and float32 differ by up to 0.01"


def test_the_first_commands_of_the_readme_end_with_the_server() -> None:
    script = (
        shell_blocks()[0]
        .replace("make serve", "make --silent -o .venv/.serving serve")
        .replace(":8000", f":{free_port()}")
    )
    environment = os.environ | {"RANKER_CHECKPOINT": "/nowhere"}
    command = ["bash", "-c", script]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode != 0
    assert "/nowhere is not a checkpoint" in done.stderr


@pytest.mark.slow
def test_the_commands_of_the_readme_serve_a_published_checkpoint(tmp_path: Path) -> None:
    """A small one of the same form lies where the README says that the artifacts are. The compiled kernel of this machine is at hand."""
    shutil.copytree(ROOT / "tests/golden/phoenix-mini/ranker", tmp_path / "oss-phoenix-artifacts/ranker")
    with suppress(FileNotFoundError):
        shutil.copytree(Path.home() / ".cache/phoenix-ranking-server", tmp_path / ".cache/phoenix-ranking-server")
    port, made = str(free_port()), tmp_path / "phoenix"
    script = shell_blocks()[1].replace("weights/phoenix", str(made)).rstrip()
    ready = f"curl -sf --retry 90 --retry-delay 1 --retry-all-errors http://127.0.0.1:{port}/info"
    script = script.replace("\nmake", " >&2\nmake")  # what the import prints is no reply
    found = run(f"trap 'kill %1; wait' EXIT\n{script} &\n{ready}", HOME=str(tmp_path), RANKER_PORT=port)
    info = json.loads(found)
    assert info["model"]["name"] == "phoenix"
