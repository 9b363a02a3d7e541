"""The image: linted, pinned, not root, no more in it than it needs, and its commands do what they say here."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import threading
import tomllib
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
import yaml

from app.environment import names
from tests.docker.dockerfile import (
    ROOT,
    copied_sources,
    environment,
    health_command,
    is_sent,
    lineage,
    read_stages,
    user_at_run_time,
)
from tests.test_distribution import belongs, tracked

TEXT = (ROOT / "Dockerfile").read_text()
STAGES = read_stages(TEXT)
FINAL = ("cpu", "cuda")


def hadolint(text: str) -> subprocess.CompletedProcess[str]:
    command = [str(Path(sys.executable).with_name("hadolint")), "-"]
    return subprocess.run(command, input=text, capture_output=True, text=True, timeout=30, check=False)


@pytest.mark.parametrize(
    "fault", ["", "FROM python:latest", "RUN cd /tmp && ls | wc", "RUN pip install torch", "USER root"]
)
def test_the_linter_finds_planted_faults_and_no_others(fault: str) -> None:
    verdict = hadolint(f"{TEXT}\n{fault}\n" if fault else TEXT)
    assert (verdict.returncode == 0, verdict.stdout == "") == (not fault, not fault)


def images(dockerfile: str, compose: str) -> set[str]:
    """Every image that comes from a registry: bases, stages copied from, and those that compose starts."""
    stages = read_stages(dockerfile)
    copied = {
        source for stage in stages.values() for copy in stage.of("COPY") for source in re.findall(r"--from=(\S+)", copy)
    }
    started = {service["image"] for service in yaml.safe_load(compose)["services"].values() if "build" not in service}
    return ({stage.base for stage in stages.values()} | copied) - set(stages) | started


def undigested(found: set[str]) -> set[str]:
    """Those of which another content may come under the same name tomorrow."""
    return {image for image in found if not re.search(r"@sha256:[0-9a-f]{64}$", image)}


COMPOSE = (ROOT / "docker/compose.yaml").read_text()


def test_every_image_is_pinned_to_a_release_and_has_a_digest() -> None:
    found = images(TEXT, COMPOSE)
    assert len(found) == 4
    assert [image for image in found if not re.search(r":v?\d+\.\d+\.\d+(-[a-z-]+)?(@|$)", image)] == []
    assert undigested(found) == set()


@pytest.mark.parametrize(
    ("dockerfile", "compose"),
    [
        (TEXT + "\nFROM debian:12.11.0 AS more\n", COMPOSE),
        (TEXT + "\nFROM cpu AS more\nCOPY --from=debian:12.11.0 / /\n", COMPOSE),
        (TEXT, re.sub(r"prom/prometheus:\S+", "debian:12.11.0", COMPOSE)),
    ],
    ids=["base", "copied", "started"],
)
def test_an_image_that_comes_without_a_digest_is_noticed(dockerfile: str, compose: str) -> None:
    assert undigested(images(dockerfile, compose)) == {"debian:12.11.0"}


@pytest.mark.parametrize("name", FINAL)
def test_the_final_image_runs_as_a_fixed_user_and_keeps_no_build_stage(name: str) -> None:
    assert user_at_run_time(STAGES, name) == "10001:10001"
    assert STAGES[name].steps[-1] == ("USER", "10001:10001")  # nothing runs or is copied as root after it
    assert [stage.name for stage in lineage(STAGES, name)] == ["base", "runtime", name]
    assert STAGES[name].of("COPY") == [f"--from=build-{name} /opt/ranker /opt/ranker"]
    assert "useradd --uid 10001" in " ".join(STAGES["runtime"].of("RUN"))
    changed = read_stages(TEXT.replace("USER 10001:10001", ""))
    assert user_at_run_time(changed, name) == "root", "a user that was dropped is noticed"
    assert list(STAGES)[-1] == "cuda", "which a plain build makes"


@pytest.mark.parametrize("name", FINAL)
def test_every_setting_of_the_image_is_one(name: str) -> None:
    given = {key for key in environment(STAGES, name) if key.startswith("RANKER_")}
    assert {"RANKER_HOST", "RANKER_PORT", "RANKER_CHECKPOINT", "RANKER_DEVICE"} == given
    assert given <= set(names())


def served(command: str) -> Path:
    """The checkpoint in this repository that a `docker run` in it serves: by its mount, and by its variable or else the image's."""
    source, target = re.findall(r'-v "\$PWD/(\S+):(/\S+):ro"', command)[0]
    named = re.findall(r"-e RANKER_CHECKPOINT=(\S+)", command) or [environment(STAGES, "cpu")["RANKER_CHECKPOINT"]]
    return ROOT / source / Path(named[0]).relative_to(target)


def test_the_readmes_container_serves_a_checkpoint() -> None:
    [command] = re.findall("^docker run .*phoenix.*$", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert (served(command) / "manifest.json").is_file()
    wrong = 'docker run -v "$PWD/weights/demo:/weights:ro" phoenix-ranking-server:cpu'  # as it was: nothing is called `current`
    assert not served(wrong).exists()


def test_what_is_copied_exists_and_is_sent() -> None:
    ignore = (ROOT / ".dockerignore").read_text()
    sources = {source for stage in STAGES.values() for source in copied_sources(stage)}
    bench = {
        f"loadtest/{part}" for part in ("machine.py", "generate", "measure", "servers")
    }  # what `phoenix-ranker bench` runs
    locks = {"docker/requirements.lock", "docker/torch-*.lock"}
    assert sources == {"pyproject.toml", "LICENSE", *locks, "app", "model", "weights"} | bench
    for source in sources:
        found = list(ROOT.glob(source))
        assert found
        assert all(is_sent(str(path.relative_to(ROOT)), ignore) for path in found), source


@pytest.mark.parametrize(
    "path",
    [".git/config", ".venv/bin/python", "tests/ops/boards.py", "weights/demo/params.safetensors", "docker/.env",
     "app/__pycache__/rank.cpython-311.pyc", "docker/development.lock", "README.md", "loadtest/report.py"],
)  # fmt: skip
def test_what_the_image_does_not_need_stays_out_of_the_build(path: str) -> None:
    assert not is_sent(path, (ROOT / ".dockerignore").read_text())


@pytest.mark.parametrize("name", FINAL)
def test_nothing_is_installed_without_its_hash_but_the_project(name: str) -> None:
    steps = [step for stage in lineage(STAGES, f"build-{name}") for step in stage.of("RUN") if "pip install" in step]
    for step, ending in zip(steps, (" -r requirements.lock", f" -r torch-{name}.lock", " . && pip check"), strict=True):
        assert step.endswith(ending)
        assert "--no-deps" in step
        assert ("--require-hashes" in step) is (".lock" in ending)


def test_what_the_wheel_holds_is_sent() -> None:
    """What it holds is in tests/test_distribution.py: the kernel's sources too, which is compiled where it runs. The demo is mounted."""
    ignore = (ROOT / ".dockerignore").read_text()
    kept = {path for path in filter(belongs, tracked()) if not is_sent(path, ignore)}
    assert kept - {"loadtest/__init__.py"} == {path for path in kept if path.startswith("weights/demo")}
    assert is_sent("model/native/kernel.cpp", ignore)


KERNEL = """
import triton, triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

@triton.jit
def first(x):
    tl.store(x, 1.0)

triton.compile(ASTSource(first, {"x": "*fp32"}, {}), target=GPUTarget("cuda", 90, 32))
"""


@pytest.mark.parametrize("without", ["", "TRITON_CACHE_DIR"])
def test_the_image_compiles_its_first_kernel_though_its_home_cannot_be_written(without: str) -> None:
    pytest.importorskip("triton", reason="triton is not installed here")
    values = environment(STAGES, "cuda")
    written = STAGES["runtime"].of("VOLUME")
    with tempfile.TemporaryDirectory(prefix="image-") as root:
        for folder in (values["HOME"], *written):
            Path(root + folder).mkdir(parents=True)
        for folder in written:
            Path(root + folder).chmod(0o777)
        script = Path(root, "kernel.py")  # a file: Triton reads the source of its kernels
        script.write_text(KERNEL)
        for folder in (root + values["HOME"], root + "/home", root):
            Path(folder).chmod(0o555)
        inside = {name: root + value if value.startswith(values["HOME"]) else value for name, value in values.items()}
        inside |= {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT)}
        inside.pop(without, None)
        # root without the right to ignore modes is anybody, and can still read an interpreter below /root
        anybody = ["setpriv", "--bounding-set", "-dac_override,-dac_read_search"] if os.geteuid() == 0 else []
        command = [*anybody, sys.executable, str(script)]
        finished = subprocess.run(command, env=inside, cwd="/", capture_output=True, text=True, timeout=100)
        for folder in (root, root + "/home", root + values["HOME"]):
            Path(folder).chmod(0o700)
    assert (finished.returncode == 0) is not bool(without), finished.stderr[-2000:]
    assert not without or "Permission denied" in finished.stderr


@pytest.mark.parametrize(("status", "healthy"), [(200, True), (503, False), (None, False)])
def test_the_health_check_believes_readiness(status: int | None, healthy: bool) -> None:
    class Ready(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status or 500)
            self.end_headers()

        def log_message(self, *_: object) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Ready) as server:
        port = server.server_port
        threading.Thread(target=server.serve_forever, daemon=True).start()
        if status is None:
            server.shutdown()
            server.server_close()
        environment = {"RANKER_PORT": str(port), "PATH": str(Path(sys.executable).parent)}
        command = health_command(STAGES, "cuda")
        result = subprocess.run(command, env=environment, capture_output=True, timeout=20, check=False)
        server.shutdown()
    assert (result.returncode == 0) is healthy


def test_the_image_carries_the_projects_version() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert f"VERSION={project['version']}" in STAGES["runtime"].of("ARG")
