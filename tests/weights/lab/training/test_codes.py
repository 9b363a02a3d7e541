"""Content codes in training: what is decided for them, where they begin, and that new posts are ordered better with them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("pyarrow")

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq

from model.ranker import Ranker, code_embeddings
from tests.weights.call import call
from tests.weights.lab.training.small_run import WORLD, small_config, small_trainer
from tests.weights.lab.training.test_contexts import write_pair
from weights.checkpoint import load_manifest
from weights.lab.evaluate.metrics import auc_within
from weights.lab.evaluate.predict import predict
from weights.lab.training import initial
from weights.lab.training.choices import plan
from weights.lab.training.examples import Examples, HiddenShares
from weights.lab.training.log import Log, read_log, write_log
from weights.lab.training.posts import write_posts
from weights.lab.training.towers import TowerSettings, tower_settings, towers_config, train_towers
from weights.lab.world.simulate import World, simulate
from weights.tables import TableError


@pytest.fixture(scope="module")
def new_posts() -> World:
    """A world whose posts are all new, and about topics that only their codes tell."""
    return simulate(
        replace(
            WORLD, users=80, days=14, stray_topic_share=1.0, classic_share=0.0, new_posts=True, content_codes=True,
            interest_low=-2.0, interest_high=3.0, freshness_sd=0.1, activity_sd=0.1, author_quality_sd=0.1,
        )
    )  # fmt: skip


def coded(log: Log, levels: int = 2) -> Log:
    """The log with codes 1 … 7 of each post."""
    codes = np.stack([log.post_id.astype(np.int64) // 8**level % 7 + 1 for level in range(levels)], 1)
    return replace(log, codes=codes)


def test_a_log_with_codes_gets_a_model_with_codes(world: World) -> None:
    few = replace(world.log, post_id=world.log.post_id % np.uint64(40) + np.uint64(1))
    plain, made = plan(few), plan(coded(few, 3))
    assert (plain.config.code_levels, made.config.code_levels, made.config.code_values) == (0, 3, 7)
    assert (plain.settings.hidden_post_share, made.settings.hidden_post_share) == (0.02, 0.5)
    assert (plain.settings.hidden_code_share, made.settings.hidden_code_share) == (0.0, 0.5)
    assert plan(coded(world.log)).settings.hidden_code_share == 0.0, "its posts are mostly new"
    assert any("3 levels, the largest code 7" in line for line in made.lines())
    assert any("so often that the codes are learned" in line for line in made.lines())
    assert not any("codes" in line for line in plain.lines())
    assert tower_settings(coded(few), made).negatives_by == tower_settings(few, plain).negatives_by == "post"


def test_codes_outside_the_architecture_are_refused(world: World) -> None:
    log = coded(world.log)
    for levels, values in ((1, 7), (2, 6)):
        with pytest.raises(TableError, match="do not fit the architecture"):
            Examples(log, replace(small_config(), code_levels=levels, code_values=values))
    padded = Examples(log, replace(small_config(), code_levels=3, code_values=9))
    assert padded.candidates(padded.rows(0)).codes[:, 2].tolist() == [0] * len(padded.rows(0))


def test_towers_read_a_level_that_the_log_lacks_as_none(world: World) -> None:
    config = towers_config(replace(small_config(), code_levels=3, code_values=9))
    fewer = coded(world.log)
    padded = replace(fewer, codes=np.pad(fewer.codes, ((0, 0), (0, 1))))
    settings = TowerSettings(steps=2, batch_requests=16)
    one, other = (train_towers(log, config, settings, until_ts=None).state_dict() for log in (fewer, padded))
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_hidden_codes_are_none_in_the_stated_share(world: World) -> None:
    examples = Examples(coded(world.log), replace(small_config(), code_levels=2, code_values=7))
    groups = [np.array([index]) for index in range(200, 264)]
    plain, _, _ = examples.training_batch(groups, np.random.default_rng(1), HiddenShares(), 64)
    hidden, _, _ = examples.training_batch(groups, np.random.default_rng(1), HiddenShares(codes=0.5), 64)
    for name in ("history_codes", "candidate_codes"):
        before, after = getattr(plain, name), getattr(hidden, name)
        assert 0.45 < (after == 0)[before != 0].float().mean() < 0.55
        assert torch.equal(before[after != 0], after[after != 0])
    assert torch.equal(plain.candidate_post_rows, hidden.candidate_post_rows)


@pytest.mark.parametrize("levels", [1, 14])
def test_codes_of_a_post_begin_as_large_as_its_author(levels: int) -> None:
    config = replace(small_config(), code_levels=levels, code_values=50)
    ranker = Ranker(config).requires_grad_(False)
    initial.upstream(ranker, torch.Generator().manual_seed(1))
    codes = torch.randint(1, 51, (400, levels), generator=torch.Generator().manual_seed(2))
    size = code_embeddings(codes, ranker.tokens.code_table, config).square().sum(-1).mean()
    authors = ranker.tables.author[1:].square().sum(-1).mean() * config.author_hashes.count
    assert size == pytest.approx(float(authors), rel=0.15)
    width = config.width
    blocks = (
        projection[-width:] for projection in (ranker.tokens.history_projection, ranker.tokens.candidate_projection)
    )
    assert torch.equal(*blocks)


@pytest.mark.slow
def test_new_posts_are_ordered_better_with_codes(new_posts: World) -> None:
    scores = {}
    for levels in (2, 0):
        config = replace(small_config(), code_levels=levels, code_values=16 if levels else 0)
        examples = Examples(new_posts.log, config)
        until = int(np.searchsorted(examples.times, new_posts.settings.test_ts))
        trainer = small_trainer(Examples(new_posts.log.before(new_posts.settings.test_ts), config), epochs=6)
        ranker = trainer.run(lambda status: None, lambda run: None)
        scores[levels] = predict(ranker, examples, np.arange(until, len(examples))).probabilities
    favorite = new_posts.log.action_names.index("favorite")
    test = new_posts.log.take(new_posts.log.impression_ts >= new_posts.settings.test_ts)
    sources = scores | {"blind": new_posts.probabilities_without_topic(), "optimum": new_posts.truth.probabilities}
    within = {
        name: auc_within(test.user_id.astype(np.int64), test.actions[:, favorite], each[:, favorite])[1].mean()
        for name, each in sources.items()
    }
    assert within["blind"] < within["optimum"] - 0.1
    assert within[0] < within["blind"] + 0.02
    assert within[2] > within[0] + 0.05, within


@pytest.mark.slow
def test_train_and_posts_take_codes_of_a_log(new_posts: World, tmp_path: Path) -> None:
    log = tmp_path / "log.parquet"
    write_log(log, new_posts.log)
    small = [word for name in ("width=16", "layers=1", "epochs=0.2") for word in ("--set", name)]
    trained = call("train", "--log", log, "--out", tmp_path / "ranker", *small)
    assert trained.exit_code == 0, trained.output
    assert load_manifest(tmp_path / "ranker").config.code_levels == 2
    assert write_posts(tmp_path / "posts.parquet", new_posts.log) == len(new_posts.log)
    posts = pq.read_table(tmp_path / "posts.parquet")
    codes = dict(zip(posts["post_ids"].to_pylist(), posts["codes"].to_pylist(), strict=True))
    assert [codes[post] for post in new_posts.log.post_id[:50].tolist()] == new_posts.log.codes[:50].tolist()


REFUSED = {
    "row 2: codes must be a list of at most 64 content codes": [[1], [2, -1], [3]],
    "row 3: codes must be a list of at most 64 content codes": [[1], [2], [2**20 + 1]],
    "codes holds a list of 65 codes, at most 64 are read": [[1] * 65, [2], [3]],
    "codes has nulls in its lists; write 0 for none": [[1], [2, None], [3]],
    "codes holds int64, not lists of integers": [1, 2, 3],
    "codes does not fit lists of integers": [[1.5], [2.0], [3.0]],
}


@pytest.mark.parametrize("is_cached", [False, True])
@pytest.mark.parametrize("reason", REFUSED)
def test_codes_that_nothing_reads_are_refused(reason: str, is_cached: bool, world: World, tmp_path: Path) -> None:
    path = tmp_path / "log.parquet"
    write_log(path, world.log.take(np.arange(3)))
    table = pq.read_table(path)
    pq.write_table(table.append_column("codes", pa.array(REFUSED[reason])), path)
    with pytest.raises(TableError, match=reason) as refusal:
        read_log(path, cache=tmp_path / "cache" if is_cached else None)
    assert str(path) in str(refusal.value)


def test_codes_in_csv_are_refused_with_what_can_hold_them(world: World, tmp_path: Path) -> None:
    write_log(tmp_path / "log.parquet", world.log.take(np.arange(3)))
    table = pq.read_table(tmp_path / "log.parquet").append_column("codes", pa.array(["[1, 2]", "[3]", "[4]"]))
    pyarrow.csv.write_csv(table, tmp_path / "log.csv")
    with pytest.raises(TableError, match="codes holds string, not lists of integers, which Parquet and JSON lines can"):
        read_log(tmp_path / "log.csv")


@pytest.mark.parametrize("is_cached", [False, True])
@pytest.mark.parametrize("suffix", [".parquet", ".jsonl"])
def test_short_lists_and_nulls_are_zeros(suffix: str, is_cached: bool, world: World, tmp_path: Path) -> None:
    write_log(tmp_path / "log.parquet", world.log.take(np.arange(4)))
    lists = pa.array([[5], None, [1, 0, 7], []], pa.list_(pa.int64()))
    table = pq.read_table(tmp_path / "log.parquet").append_column("codes", lists)
    if suffix == ".parquet":
        pq.write_table(table, tmp_path / "log.parquet")
    else:
        (tmp_path / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in table.to_pylist()))
    log = read_log(tmp_path / f"log{suffix}", cache=tmp_path / "cache" if is_cached else None)
    by_post = dict(zip(log.post_id.tolist(), log.codes.tolist(), strict=True))
    expected = [[5, 0, 0], [0, 0, 0], [1, 0, 7], [0, 0, 0]]
    assert [by_post[post] for post in table["post_id"].to_pylist()] == expected


@pytest.mark.parametrize("is_cached", [False, True])
@pytest.mark.parametrize(
    ("code", "levels", "reason"),
    [(-1, 2, "at most 64 content codes"), (2**20 + 1, 2, "at most 64 content codes"), (1, 65, "a list of 65 codes")],
)
def test_codes_of_served_contexts_are_checked(
    code: int, levels: int, reason: str, is_cached: bool, world: World, tmp_path: Path
) -> None:
    write_pair(world, tmp_path / "log")
    path = tmp_path / "log/contexts/part-0.parquet"
    table = pq.read_table(path)
    lists = [[[code] * levels for _ in posts] for posts in table["post_ids"].to_pylist()]
    pq.write_table(table.append_column("codes", pa.array(lists, pa.list_(pa.list_(pa.int64())))), path)
    with pytest.raises(TableError, match=f"part-0.parquet.*{reason}"):
        read_log(tmp_path / "log", cache=tmp_path / "cache" if is_cached else None)


def test_codes_of_served_contexts_are_as_long_as_their_posts(world: World, tmp_path: Path) -> None:
    write_pair(world, tmp_path)
    path = tmp_path / "contexts/part-0.parquet"
    table = pq.read_table(path)
    lists = [[[1]] * (len(posts) + 1) for posts in table["post_ids"].to_pylist()]
    pq.write_table(table.append_column("codes", pa.array(lists, pa.list_(pa.list_(pa.int64())))), path)
    with pytest.raises(TableError, match="codes is not as long as post_ids"):
        read_log(tmp_path)
