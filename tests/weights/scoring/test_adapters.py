"""The examples of docs/training.md for Ray Data and Spark give the scores of one process, bit for bit. They run as they stand there."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyarrow")

import pyarrow as pa
import pyarrow.parquet as pq

from tests.weights.scoring.test_scorer import DEMO, as_table, by_key
from weights.scoring.job import partition_of
from weights.scoring.scorer import Scorer
from weights.world.simulate import World

ROOT = Path.cwd()
FILES = 3
# A cluster that is in this process alone, as small as it can be; the example by itself would take the whole machine.
SMALL = "import ray\nray.init('local', num_cpus=2, object_store_memory=80 * 2**20, include_dashboard=False, log_to_driver=False)\n"


def example(title: str) -> str:
    blocks = re.findall(r"(?s)```python\n(.*?)```", (ROOT / "docs/training.md").read_text())
    [found] = [block for block in blocks if block.startswith(f"# {title}:")]
    return str(found)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "title",
    [
        pytest.param(
            "Ray Data",
            marks=pytest.mark.skipif(not importlib.util.find_spec("ray"), reason="Ray is not here: make test-ray"),
        ),
        pytest.param(
            "Spark",
            marks=pytest.mark.skipif(
                not (importlib.util.find_spec("pyspark") and shutil.which("java")),
                reason="pyspark or Java is not here: pip install pyspark, apt-get install default-jre-headless",
            ),
        ),
    ],
)
def test_the_example_gives_the_scores_of_one_process(title: str, world: World, scorer: Scorer, tmp_path: Path) -> None:
    table = as_table(world)
    place = partition_of(table["user_id"].to_numpy(), FILES)
    (tmp_path / "log").mkdir()
    for number in range(FILES):
        pq.write_table(table.filter(place == number), tmp_path / "log" / f"{number}.parquet")
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights/mine").symlink_to(ROOT / DEMO)
    (tmp_path / "example.py").write_text(SMALL * (title == "Ray Data") + example(title))
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "PYSPARK_PYTHON": sys.executable,
        "SPARK_LOCAL_IP": "127.0.0.1",
    }
    command = [sys.executable, "example.py"]
    run = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-2000:]
    found: Any = pa.concat_tables([pq.read_table(file) for file in (tmp_path / "scores").glob("*.parquet")])
    assert by_key(found).equals(by_key(scorer.score_table(table)))


@pytest.mark.parametrize("title", ["Ray Data", "Spark"])
def test_the_example_is_a_program_of_ours(title: str) -> None:
    """Where neither is installed: it parses, and what it imports of ours is there."""
    text = example(title)
    compile(text, title, "exec")
    ours = re.findall(r"(?m)^from ((?:model|weights)[\w.]*) import (\w+)$", text)
    assert len(ours) == 3
    assert all(hasattr(importlib.import_module(module), name) for module, name in ours)
