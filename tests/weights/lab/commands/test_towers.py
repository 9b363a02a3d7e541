"""From a log to towers, a corpus and its recall: the commands, what they refuse, and that the service recommends from them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("pyarrow")

import numpy as np
import pyarrow.parquet as pq
from starlette.testclient import TestClient

from app.main import create_app
from app.settings import Settings
from loadtest.server import wait_until
from tests.support.asgi import ADDRESS
from tests.weights.call import call
from weights.checkpoint import load_encoder
from weights.lab.evaluate.recall import POPULARITY, TOWERS, evaluate_recall
from weights.lab.training.examples import Examples
from weights.lab.training.log import Log, read_log, write_log
from weights.lab.world.simulate import World

FEW = ("--set", "steps=25", "--set", "batch_requests=16", "--set", "warmup_steps=5")


@pytest.fixture(scope="module")
def log(world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("towers") / "log.parquet"
    write_log(path, world.log)
    return path


@pytest.fixture(scope="module")
def towers(log: Path) -> Path:
    out = log.with_name("towers")
    trained = call("train-towers", "--log", log, "--out", out, *FEW)
    assert trained.exit_code == 0, trained.output
    assert "steps=25" in trained.stdout
    return out


def test_a_log_becomes_a_corpus_that_is_recommended_from(log: Path, towers: Path, tmp_path: Path) -> None:
    written = call("posts", log, "--out", tmp_path / "posts.parquet")
    assert written.exit_code == 0, written.output
    assert pq.read_table(tmp_path / "posts.parquet").num_rows == len(np.unique(read_log(log).post_id))
    built = call("corpus", "build", tmp_path / "posts.parquet", "--encoder", towers, "--out", tmp_path / "corpus")
    assert built.exit_code == 0, built.output
    settings = Settings.model_validate(
        {
            "checkpoint": "weights/demo",
            "retrieval": {"checkpoint": str(towers), "corpus": str(tmp_path / "corpus")},
        }
    )
    with TestClient(create_app(settings), base_url=ADDRESS) as client:
        wait_until(lambda: client.get("/readyz").status_code == 200)
        reply = client.post("/recommend", json={"user_id": 7, "k": 5, "impression_ts": 1_780_000_000})
        assert reply.status_code == 200, reply.text
        assert len(reply.json()["candidates"]) == 5


def test_recall_is_printed_beside_simpler_sources(log: Path, towers: Path, tmp_path: Path) -> None:
    judged = call("eval-retrieval", towers, "--log", log, "--out", tmp_path / "recall.json", "--queries", "200")
    assert judged.exit_code == 0, judged.output
    assert judged.stdout.startswith("recall@100 of the towers is ")
    figures = json.loads((tmp_path / "recall.json").read_text())
    assert {TOWERS, POPULARITY} < figures["recalls"].keys()
    assert set(figures["recalls"][TOWERS]) == {"all", "known users", "new users", "known posts", "new posts"}


def test_recall_is_the_share_of_liked_posts_among_the_first(towers: Path) -> None:
    shown = 600  # posts; in training all users like post 1 alone, later half of the new users like post 1, half like post 600
    training = [(user, post, post == 1) for user in range(1, 13) for post in range(1, shown + 1)]
    later = [(100 + user, 1 if user % 2 else shown, True) for user in range(12)]
    user, post, liked = (np.array(column) for column in zip(*training, *later, strict=True))
    names = load_encoder(towers).manifest.action_names
    zeros = np.zeros(len(user), np.int64)
    log = Log(
        request_id=user.astype(np.uint64), impression_ts=1_780_000_000 + user, user_id=user.astype(np.uint64),
        post_id=post.astype(np.uint64), author_id=np.ones(len(user), np.uint64), product_surface=zeros, created_at=zeros,
        dwell_seconds=zeros.astype(np.float32), actions=np.repeat(liked[:, None], len(names), 1), action_names=names,
    )  # fmt: skip
    encoder = load_encoder(towers)
    recalls = evaluate_recall(Examples(log, encoder.manifest.config), 12, liked.astype(float), encoder.towers)
    assert (recalls.queries, recalls.users, recalls.posts, recalls.liked) == (12, 12, shown, 12)
    popularity = recalls.recalls[POPULARITY]["new users"]
    assert [popularity[depth].value for depth in (10, 100, 500)] == [0.5, 0.5, 1.0]  # 599 posts share places 2 to 600
    assert np.isnan(recalls.recalls[POPULARITY]["known users"][10].value)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (("--until", "2001-01-01"), "lies outside the log"),
        (("--score-weights", "no_action=1"), "no_action"),
        (("--score-weights", "report=-1"), "do not say which posts were liked"),
        (("--set", "stepz=3"), "did you mean steps"),
    ],
)
def test_train_towers_refuses_in_one_sentence(
    log: Path, tmp_path: Path, options: tuple[str, ...], sentence: str
) -> None:
    refused = call("train-towers", "--log", log, "--out", tmp_path / "x", *options)
    assert (refused.exit_code, sentence in refused.stderr) == (1, True), refused.output
    assert len(refused.stderr.strip().splitlines()) == 1
    assert not (tmp_path / "x").exists()


def test_eval_retrieval_needs_a_log_or_a_ranker(towers: Path) -> None:
    refused = call("eval-retrieval", towers)
    assert (refused.exit_code, refused.stderr.strip()) == (1, "Give either --log or --ranker.")
