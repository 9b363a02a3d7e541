"""From a log to towers, a corpus and its recall: the commands, what they refuse, and that the service recommends from them."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
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
from tests.weights.lab.training.small_run import WORLD
from weights.checkpoint import load_encoder, save_checkpoint
from weights.lab.evaluate.recall import POPULARITY, TOWERS, evaluate_recall
from weights.lab.training.examples import Examples
from weights.lab.training.log import Log, read_log, write_log
from weights.lab.world.simulate import World, simulate

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


@pytest.mark.slow
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


def test_towers_learn_from_a_log_with_more_places(world: World, tmp_path: Path) -> None:
    surfaces = world.log.product_surface.copy()
    surfaces[-1] = 19
    write_log(tmp_path / "log.parquet", replace(world.log, product_surface=surfaces))
    options = ("train-towers", "--log", tmp_path / "log.parquet", "--out", tmp_path / "towers", "--until", "all", *FEW)
    for words, problem in (
        ((), "product_surface must be an integer between 0 and 15"),
        (("--set", "product_surfaces=19"), "product_surface must be an integer between 0 and 18"),
        (("--set", "product_surfaces=many"), "Setting product_surfaces must be of type int, got 'many'."),
    ):
        refused = call(*options, *words)
        assert (refused.exit_code, refused.stderr.count("\n")) == (1, 1), refused.output
        assert problem in refused.stderr
    trained = call(*options, "--set", "product_surfaces=20")
    assert trained.exit_code == 0, trained.output
    assert load_encoder(tmp_path / "towers").manifest.config.product_surfaces == 20


@pytest.mark.slow
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


def nameless(log: Log) -> Log:
    """The log with actions whose names do not say which posts were liked."""
    return replace(log, action_names=tuple(f"z_{name[::-1]}" for name in log.action_names))


@pytest.mark.slow
@pytest.mark.parametrize(("rename", "weights"), [(replace, "click=1"), (nameless, "z_kcilc=1")])
def test_liked_is_what_the_towers_were_trained_for(
    rename: Callable[[Log], Log], weights: str, world: World, tmp_path: Path
) -> None:
    log, towers = tmp_path / "log.parquet", tmp_path / "towers"
    write_log(log, rename(world.log))
    trained = call("train-towers", "--log", log, "--out", towers, "--score-weights", weights, *FEW)
    assert trained.exit_code == 0, trained.output
    kept, given = (
        call("eval-retrieval", towers, "--log", log, *options) for options in ((), ("--score-weights", weights))
    )
    assert (kept.exit_code, given.exit_code) == (0, 0), kept.output + given.output
    assert f"liked by the score weights {weights}, with which the towers were trained" in kept.stdout
    assert f"liked by the score weights {weights}, given with --score-weights" in given.stdout
    assert kept.stdout.splitlines()[:2] == given.stdout.splitlines()[:2]


@pytest.mark.parametrize(
    ("rename", "code", "said"),
    [
        (replace, 0, "report=-20, proposed from the log\n"),
        (nameless, 1, "The names of the actions do not say which posts were liked: choose with --score-weights, "),
    ],
)
def test_towers_that_keep_no_weights_have_proposed_ones(
    rename: Callable[[Log], Log], code: int, said: str, world: World, towers: Path, tmp_path: Path
) -> None:
    """An earlier version trained such towers, and the demo's are such."""
    log, encoder = rename(world.log), load_encoder(towers)
    write_log(tmp_path / "log.parquet", log)
    training = {"until_ts": encoder.manifest.trained_until_ts}
    save_checkpoint(tmp_path / "old", encoder.towers, name="old", action_names=log.action_names, training=training)
    judged = call("eval-retrieval", tmp_path / "old", "--log", tmp_path / "log.parquet", "--queries", "50")
    assert (judged.exit_code, said in judged.output) == (code, True), judged.output


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


@pytest.mark.slow
def test_a_cached_log_gives_the_same_towers(log: Path, towers: Path, tmp_path: Path) -> None:
    cache = ("--cache", tmp_path / "cache")
    for _ in range(2):  # the second time the sorted copy is there already
        again = call("train-towers", "--log", log, "--out", tmp_path / "towers", "--replace", *FEW, *cache)
        assert again.exit_code == 0, again.output
        assert any((tmp_path / "cache").iterdir())
        assert load_encoder(tmp_path / "towers").manifest.files == load_encoder(towers).manifest.files
    judged = call("eval-retrieval", towers, "--log", log, "--queries", "50", *cache)
    assert judged.exit_code == 0, judged.output
    assert len(list((tmp_path / "cache").iterdir())) == 1, "the copy serves both commands"
    written = call("posts", log, "--out", tmp_path / "posts.parquet", *cache)
    assert written.exit_code == 0, written.output


@pytest.mark.slow
def test_new_posts_are_recommended_by_their_content(tmp_path: Path) -> None:
    """Of posts that are in no log, by an author of all topics, a user gets those whose codes are like what the user liked."""
    tastes = {"interest_low": -2.0, "interest_high": 3.0, "freshness_sd": 0.1, "activity_sd": 0.1}
    new = {"new_posts": True, "content_codes": True, "stray_topic_share": 1.0, "classic_share": 0.0}
    drawn = simulate(replace(WORLD, users=80, days=14, **tastes, **new))
    write_log(tmp_path / "log.parquet", drawn.log)
    few = [f"--set={setting}" for setting in ("steps=60", "batch_requests=32", "warmup_steps=20", "learning_rate=0.01")]
    trained = call("train-towers", "--log", tmp_path / "log.parquet", "--out", tmp_path / "towers", *few)
    assert trained.exit_code == 0, trained.output
    author, topics = int(drawn.authors.ids[0]), drawn.settings.topics
    rows = [{"post_ids": 10 + post, "author_ids": author, "codes": [1 + post % topics, 1]} for post in range(80)]
    (tmp_path / "posts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    built = call(
        "corpus", "build", tmp_path / "posts.jsonl", "--encoder", tmp_path / "towers", "--out", tmp_path / "corpus"
    )
    assert built.exit_code == 0, built.output
    retrieval = {"checkpoint": str(tmp_path / "towers"), "corpus": str(tmp_path / "corpus")}
    settings = Settings.model_validate({"checkpoint": "weights/demo", "threads": 1, "retrieval": retrieval})
    with TestClient(create_app(settings), base_url=ADDRESS) as client:
        wait_until(lambda: client.get("/readyz").status_code == 200)
        alike = 0
        for topic in range(topics):
            event = {"author_id": author, "actions": ["favorite", "dwell", "reply"], "codes": [1 + topic, 1]}
            history = [event | {"post_id": 10_000 + place} for place in range(8)]
            reply = client.post("/recommend", json={"user_id": 7, "history": history, "k": 10})
            assert reply.status_code == 200, reply.text
            posts = [int(post["post_id"]) for post in reply.json()["candidates"]]
            alike += sum((post - 10) % topics == topic for post in posts)
    assert alike >= 3 * topics, f"{alike} of {10 * topics}; by chance it would be 10"
