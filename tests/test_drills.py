"""What docs/architecture.md says under "To add": each thing is added to a copy of the files that it names, and is there everywhere."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DRILLS = {  # what is added → the one file that declares it, before which line, the lines, and what must follow from them
    "setting": (
        "app/limits.py",
        "    max_wait_seconds: float =",
        '''    drills: int = Field(default=7, ge=1)
    """Most drills. Default: one a day."""
''',
        """
import runpy
from app.environment import load_settings, names

assert "RANKER_QUEUE__DRILLS" in names()
assert load_settings(["--queue.drills=8"], {}).queue.drills == 8
assert load_settings([], {}).effective()["queue"]["drills"] == 7
assert "| `QUEUE__DRILLS` | 7 | Most drills. | one a day. |" in runpy.run_path(".ci/list-files")["settings"]()
""",
    ),
    "metric": (
        "app/telemetry/metrics.py",
        "        self.rejected = counter(",
        '        self.drills = counter("drills", "Drills.", "kind")\n',
        """
from app.telemetry.metrics import Metrics
from app.telemetry.sums import Deltas, Sums

here, front, sums = Metrics(), Metrics(), Sums()
deltas = Deltas(front.registry)
for metrics, count in ((here, 2), (front, 3)):
    metrics.drills.labels("fire").inc(count)
assert b'ranker_drills_total{kind="fire"} 2.0' in here.render()
sums.add("front", deltas.take())
assert b'ranker_drills_total{kind="fire"} 5.0' in sums.render(here.registry)
""",
    ),
    "error code": (
        "app/errors.py",
        "class MalformedJson(ServiceError, ",
        '''class Drill(ServiceError, status=503, code="drill"):
    """A drill."""


''',
        """
from fastapi import FastAPI

from app import errors
from app.http.openapi import describe_app

assert errors.error_class("drill") is errors.Drill
assert errors.Drill("Out.").problem()["code"] == "drill"
assert "`drill`: A drill." in str(describe_app(FastAPI(), ["like"], explores=True))
""",
    ),
}


@pytest.mark.parametrize("name", DRILLS)
def test_one_file_declares_it_and_the_rest_follows(name: str, tmp_path: Path) -> None:
    file, before, added, follows = DRILLS[name]
    for copied in ("app", ".ci/list-files"):
        copy = shutil.copytree if (ROOT / copied).is_dir() else shutil.copy
        (tmp_path / copied).parent.mkdir(exist_ok=True)
        copy(ROOT / copied, tmp_path / copied)
    command = [sys.executable, "-c", follows]
    environment = {"PYTHONPATH": f"{tmp_path}:{ROOT}"}
    text = (tmp_path / file).read_text()
    assert text.count(before) == 1
    assert subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True).returncode != 0  # the control
    (tmp_path / file).write_text(text.replace(before, added + before))
    run = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


def test_the_page_has_a_row_for_each() -> None:
    page = (ROOT / "docs/architecture.md").read_text()
    for name, (file, *_) in DRILLS.items():
        [row] = [
            line for line in page.splitlines() if line.startswith(f"| to add a{'n' * (name[0] in 'aeiou')} {name} ")
        ]
        assert f"`{file}`" in row
