"""What docs/architecture.md says under "To add": each thing is added to a copy of the files that it names, and is there everywhere."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.zygote import zygote

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


ANEW = """
import os, sys
for name in list(sys.modules):
    if name.split(".")[0] in ("app", "loadtest", "model", "tests", "weights"):
        del sys.modules[name]
os.chdir(sys.argv[1])
sys.path.insert(0, sys.argv[1])
exec(sys.argv[2])
"""


def run(copy: Path, program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A program in a process that has imported the libraries, and that imports of ours what the copy holds."""
    return zygote.run([sys.executable, "-c", ANEW, str(copy), program, *arguments])


EACH = """
import json, sys, traceback
wrong = {}
for name, follows in json.loads(sys.argv[3]).items():
    try:
        exec(follows, {"__name__": name})
    except Exception:
        wrong[name] = traceback.format_exc()
print(json.dumps(wrong))
"""


def test_one_file_declares_it_and_the_rest_follows(tmp_path: Path) -> None:
    for copied in ("app", ".ci/list-files"):
        copy = shutil.copytree if (ROOT / copied).is_dir() else shutil.copy
        (tmp_path / copied).parent.mkdir(exist_ok=True)
        copy(ROOT / copied, tmp_path / copied)

    def wrong() -> dict[str, str]:
        asked = json.dumps({name: follows for name, (_, _, _, follows) in DRILLS.items()})
        found: dict[str, str] = json.loads(run(tmp_path, EACH, asked).stdout)
        return found

    assert wrong().keys() == DRILLS.keys(), "the control"
    for file, before, added, _ in DRILLS.values():
        text = (tmp_path / file).read_text()
        assert text.count(before) == 1
        (tmp_path / file).write_text(text.replace(before, added + before))
    assert wrong() == {}


ENDPOINT = {  # files that are new, or lines after a line that is there
    "app/http/best.py": (
        "",
        """
import orjson

from app.http.rank import RankCall, RankEndpoint


class BestCall(RankCall):
    __slots__ = ()

    def _render(self, job, ranked, pieces, done):
        rows = zip(ranked.scores.probabilities.sum(1).tolist(), job.candidates.post_ids.tolist())
        self.answer(200, [(b"content-type", b"application/json")], orjson.dumps({"best": max(rows)[1]}))


class BestEndpoint(RankEndpoint):
    def begin(self, headers, reply):
        return BestCall(self, dict(headers), reply)
""",
    ),
    "app/http/application.py": (
        "    endpoints: dict[str, Endpoint] = {\n",
        """        "/best": BestEndpoint(ranking, recorder, "/best"),\n""",
    ),
}
BEHIND_FRONTS = """
import asyncio, json
from app.errors import Overloaded
from app.http.application import create_app
from app.settings import Queue
from loadtest.soak.fake_engine import FakeEngine
from tests.app.fakes import Gate, run, until
from tests.app.fronts.linked import linked
from tests.app.serving import ask, chunk, good

async def main():
    gate, body = Gate(), json.dumps(good()).encode()
    async with linked(FakeEngine(before=gate), queue=Queue(max_requests=2, max_wait_seconds=0)) as found:
        app = create_app(found.settings, found.fronts[0])
        assert "/best" in app.endpoints
        asked = [asyncio.create_task(ask(app, [chunk(body, False)], path="/best"))]
        await gate.reached()
        asked += [asyncio.create_task(ask(app, [chunk(body, False)], path="/best")) for _ in range(2)]
        await until(lambda: found.service.admission.requests == 2 and asked[2].done())
        gate.opened.set()
        replies = [await each for each in asked]
        assert [messages[0]["status"] for messages in replies] == [200, 200, 429], replies
        assert json.loads(replies[0][1]["body"])["best"] in [each["post_id"] for each in good()["candidates"]]

run(main())
"""


def test_an_endpoint_that_takes_a_place_is_two_files_and_works_behind_fronts(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "app", tmp_path / "app")
    assert run(tmp_path, BEHIND_FRONTS).returncode != 0, "the control"
    for file, (after, added) in ENDPOINT.items():
        path = tmp_path / file
        text = path.read_text() if after else ""
        assert text.count(after) == 1 or not after
        path.write_text(text.replace(after, after + added) if after else added)
    application = tmp_path / "app/http/application.py"
    line = "from app.http.explain import"
    application.write_text(application.read_text().replace(line, f"from app.http.best import BestEndpoint\n{line}"))
    ended = run(tmp_path, BEHIND_FRONTS)
    assert ended.returncode == 0, ended.stderr


ACTIVATION = {  # file → the line that is there, and what takes its place
    "model/config.py": ('Literal["gelu_tanh", "gelu", "silu"]', 'Literal["gelu_tanh", "gelu", "silu", "relu2"]'),
    "model/layers.py": (
        '    if activation == "silu":\n',
        '    if activation == "relu2":\n        return functional.relu(x).square()\n    if activation == "silu":\n',
    ),
    "model/split/kernels/rows.py": (
        '    if ACTIVATION == "gelu":\n',
        '    if ACTIVATION == "relu2":\n        return tl.maximum(g, 0.0) * tl.maximum(g, 0.0)\n    if ACTIVATION == "gelu":\n',
    ),
}
EVERYWHERE = """
import os
os.environ["TRITON_INTERPRET"] = "1"
import numpy as np, torch, triton, triton.language as tl
from model.create import EngineOptions, create_engine
from model.dense import DenseEngine
from model.engine import Item
from model.layers import activate
from model.split.kernels.rows import activated
from tests.model.builders import random_config, random_ranker, random_request

@triton.jit
def kernel(x, out):
    places = tl.arange(0, 16)
    tl.store(out + places, activated(tl.load(x + places), "relu2"))

x, out = torch.linspace(-2, 2, 16), torch.empty(16)
kernel[(1,)](x, out)
assert torch.equal(out, activate(x, "relu2"))
ranker = random_ranker(random_config(activation="relu2"))
engine = create_engine(ranker, EngineOptions(dtype="float32"))
assert "activation" in engine.info.notes["fallback"], engine.info.notes  # the native engine says that it declines it
items = [Item(*random_request(ranker.config, history=9, candidates=5, seed=1))]
(ours,), (plain,) = engine.forward(items), DenseEngine(ranker, torch.float32).forward(items)
np.testing.assert_allclose(ours.scores.logits, plain.scores.logits, atol=1e-4)
"""


def test_an_activation_is_three_files(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    shutil.copytree(ROOT / "model", tmp_path / "model")
    assert run(tmp_path, EVERYWHERE).returncode != 0, "the control"
    for file, (before, after) in ACTIVATION.items():
        text = (tmp_path / file).read_text()
        assert text.count(before) == 1
        (tmp_path / file).write_text(text.replace(before, after))
    ended = run(tmp_path, EVERYWHERE)
    assert ended.returncode == 0, ended.stderr


def test_the_page_has_a_row_for_each() -> None:
    page = (ROOT / "docs/architecture.md").read_text()
    files = {name: drill[0] for name, drill in DRILLS.items()} | {
        "endpoint": "app/http/application.py",
        "activation of the trunk": "model/layers.py",
    }
    for name, file in files.items():
        [row] = [
            line for line in page.splitlines() if line.startswith(f"| to add a{'n' * (name[0] in 'aeiou')} {name} ")
        ]
        assert f"`{file}`" in row
