"""Contexts as served: training reads them where the log has them, counts them, and says where they differ from the log's rows."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

pa = pytest.importorskip("pyarrow")
import pyarrow.parquet as pq  # noqa: E402

from model.inputs import Context  # noqa: E402
from tests.support.random_models import random_model  # noqa: E402
from tests.weights.call import call  # noqa: E402
from tests.weights.lab.training.small_run import WORLD, small_config, small_trainer  # noqa: E402
from weights.actions import DWELL_TIME  # noqa: E402
from weights.checkpoint import save_checkpoint  # noqa: E402
from weights.lab.training.examples import Examples, HiddenShares  # noqa: E402
from weights.lab.training.log import aligned, read_log, write_log  # noqa: E402
from weights.lab.training.page_example import request_body  # noqa: E402
from weights.lab.world.simulate import World  # noqa: E402
from weights.tables import TableError  # noqa: E402

LONG = 127
"""The window of the model that `log` plans."""
COLUMNS = ("post_ids", "author_ids", "actions", "surfaces", "dwell_seconds")


def write_pair(
    world: World,
    path: Path,
    change: Callable[[int, Context], Context | None] = lambda index, context: context,
    history_length: int = small_config().history_length,
) -> Examples:
    """Write a log with the context of each request that `change` gives one, and return the examples that it was made from."""
    examples = Examples(world.log, replace(small_config(), history_length=history_length))
    contexts = [change(index, examples.context(index)) for index in range(len(examples))]
    ids = np.array([0 if context is None else index + 1 for index, context in enumerate(contexts)], np.uint64)
    (path / "impressions").mkdir(parents=True)
    (path / "contexts").mkdir()
    counts = examples.stops - examples.starts
    write_log(path / "impressions/part-0.parquet", replace(world.log, context_id=np.repeat(ids, counts)))
    served = [context for context in contexts if context is not None]
    columns = {
        "context_id": pa.array(ids[ids > 0]),
        "post_ids": pa.array([context.post_ids for context in served], pa.list_(pa.uint64())),
        "author_ids": pa.array([context.author_ids for context in served], pa.list_(pa.uint64())),
        "product_surfaces": pa.array([context.surfaces for context in served], pa.list_(pa.int64())),
        "dwell_seconds": pa.array([context.dwell_seconds for context in served], pa.list_(pa.float32())),
    }
    for place, name in enumerate(world.log.action_names):
        values = [context.actions[:, place] for context in served]
        columns[f"action.{name}"] = pa.array(values, pa.list_(pa.float32()))
    table = pa.table(columns)
    pq.write_table(
        table.take(pa.array(np.random.default_rng(1).permutation(len(table)))), path / "contexts/part-0.parquet"
    )
    return examples


def newest(context: Context) -> Context:
    return context.last(3)


@pytest.mark.parametrize("is_cached", [False, True])
def test_training_reads_the_contexts_that_were_served(is_cached: bool, world: World, tmp_path: Path) -> None:
    before = write_pair(world, tmp_path, lambda index, context: newest(context) if index % 2 else None)
    log = read_log(tmp_path, cache=tmp_path.with_name("cache") if is_cached else None)
    examples, shorter = Examples(log, small_config()), 0
    for index in range(0, len(before), 7):
        expected = newest(before.context(index)) if index % 2 else before.context(index)
        context = examples.context(index)
        assert context.user_id == expected.user_id
        for name in COLUMNS:
            assert np.array_equal(getattr(context, name), getattr(expected, name)), name
            assert getattr(context, name).dtype == getattr(expected, name).dtype
        assert examples.history_lengths[index] == len(context)
        assert np.array_equal(examples.history_posts(index), context.post_ids)
        assert len(request_body(examples, index)["history"]) == len(context)
        shorter += len(context) < len(before.context(index))
    assert shorter > 20


def test_requests_with_other_contexts_share_none_in_training(world: World, tmp_path: Path) -> None:
    write_pair(world, tmp_path, lambda index, context: newest(context) if index % 3 else None)
    examples = Examples(read_log(tmp_path), small_config())
    groups = examples.groups(np.arange(len(examples)), 36, 15)
    assert sorted(np.concatenate(groups).tolist()) == list(range(len(examples)))
    assert max(map(len, groups)) > 1
    for group in groups:
        assert len(set(examples.served[group].tolist())) == 1
    served = [group for group in groups if examples.served[group[0]] >= 0][:8]
    _, seen, labels = examples.training_batch(served, np.random.default_rng(1), HiddenShares(), 64)
    for row, group in enumerate(served):
        assert (seen[row][labels.shown[row]] == examples.history_lengths[group[0]]).all()


def test_contexts_as_rows_give_them_change_no_bit_of_training(world: World, tmp_path: Path) -> None:
    before = write_pair(world, tmp_path)
    after = Examples(read_log(tmp_path), small_config())

    def trained(examples: Examples) -> dict[str, object]:
        trainer = small_trainer(examples, epochs=0.05, max_candidates=WORLD.slots, validation_requests=4)
        assert len(trainer.groups) == len(trainer.train), "no two requests share a context"
        return trainer.run(lambda status: None, lambda run: None).state_dict()

    first, second = trained(before), trained(after)
    assert all((first[name] == second[name]).all() for name in first)


def test_the_actions_of_contexts_follow_the_checkpoints_order(world: World, tmp_path: Path) -> None:
    before = write_pair(world, tmp_path)
    names = world.log.action_names[::-1]
    examples = Examples(aligned(read_log(tmp_path), names), small_config())
    index = int(before.history_lengths.argmax())
    assert np.array_equal(examples.context(index).actions, before.context(index).actions[:, ::-1])


def test_the_log_counts_contexts_and_empty_histories(world: World, tmp_path: Path) -> None:
    examples = write_pair(world, tmp_path, lambda index, context: context if index % 4 else None, LONG)
    shown = call("log", tmp_path)
    assert shown.exit_code == 0, shown.output
    served = sum(1 for index in range(len(examples)) if index % 4)
    assert (
        f"as served for {served:,} requests, reconstructed from the log's rows for {len(examples) - served:,}"
        in shown.stdout
    )
    assert f"histories: {(examples.history_lengths == 0).sum():,} of {len(examples):,} are empty" in shown.stdout
    assert "WARNING" not in shown.stdout


WARNED: dict[str, tuple[Callable[[int, Context], Context | None], str]] = {
    "empty": (lambda index, context: context.rows(slice(0)), "WARNING: 100% of the histories are empty"),
    "short": (lambda index, context: newest(context), "WARNING: served histories have .* events on average; those"),
    "old": (
        lambda index, context: context.first(len(context) // 2),
        "WARNING: the newest event of a served history is",
    ),
    "mixed": (
        lambda index, context: newest(context) if index % 2 else None,
        "WARNING: histories differ by where they come from",
    ),
}


@pytest.mark.parametrize("kind", WARNED)
def test_histories_that_differ_are_warned_of(kind: str, world: World, tmp_path: Path) -> None:
    change, warning = WARNED[kind]
    write_pair(world, tmp_path, change, LONG)
    shown = call("log", tmp_path)
    assert shown.exit_code == 0, shown.output
    assert re.search(f"^{warning}", shown.stdout, re.M), shown.stdout


def replaced(name: str, change: Callable[[list[object]], list[object]]) -> Callable[[pa.Table], pa.Table]:
    def edit(table: pa.Table) -> pa.Table:
        column = table.column(name)
        return table.set_column(table.column_names.index(name), name, pa.array(change(column.to_pylist()), column.type))

    return edit


REFUSED: dict[str, Callable[[pa.Table], pa.Table]] = {
    r"request \d+ has the context_id \d+, which contexts does not have": lambda table: table.slice(1),
    r"part-0\.parquet, row 3: author_ids is not as long as post_ids": replaced(
        "author_ids", lambda lists: [*lists[:2], [*lists[2], 7], *lists[3:]]
    ),
    r"part-0\.parquet, row 2: dwell_seconds must be seconds": replaced(
        "dwell_seconds", lambda lists: [lists[0], [-1.0] * len(lists[1]), *lists[2:]]
    ),
    r"part-0\.parquet, row 1: context_id must not be 0": replaced("context_id", lambda ids: [0, *ids[1:]]),
    r"two contexts have the context_id": replaced("context_id", lambda ids: [ids[1], *ids[1:]]),
    r"lacks the column action\.click": lambda table: table.drop_columns(["action.click"]),
    r"has the column extra, which the impressions do not have": lambda table: table.append_column(
        "extra", table["post_ids"]
    ),
    r"part-0\.parquet, row 4: author_ids is null; write an empty list": replaced(
        "author_ids", lambda lists: [*lists[:3], None, *lists[4:]]
    ),
    r"part-0\.parquet, row 1 or below: author_ids has a null within a list": replaced(
        "author_ids", lambda lists: [*lists[:3], [None] * len(lists[3]), *lists[4:]]
    ),
    r"part-0\.parquet, row 1 or below: author_ids must be a list of uint64": lambda table: table.set_column(
        table.column_names.index("author_ids"), "author_ids", pa.array([7] * len(table))
    ),
    r"part-0\.parquet, row 2: codes is not as long as post_ids": lambda table: table.append_column(
        "codes",  # one of row 3 stands in row 2: there are as many in all
        pa.array(
            [
                [[1]] * (len(posts) + {1: 1, 2: -1}.get(row, 0))
                for row, posts in enumerate(table["post_ids"].to_pylist())
            ]
        ),
    ),
    r"part-0\.parquet: codes must be a list of lists": lambda table: table.append_column(
        "codes", pa.array([1] * len(table))
    ),
    r"part-0\.parquet: codes must be": lambda table: table.append_column(
        "codes", pa.array([[[-1]] * len(posts) for posts in table["post_ids"].to_pylist()])
    ),
}


def test_lists_of_codes_may_be_long_ones(world: World, tmp_path: Path) -> None:
    write_pair(world, tmp_path)
    path = tmp_path / "contexts/part-0.parquet"
    table = pq.read_table(path)
    codes = [[[1, 2]] * len(posts) for posts in table["post_ids"].to_pylist()]
    pq.write_table(table.append_column("codes", pa.array(codes, pa.large_list(pa.large_list(pa.int32())))), path)
    log = read_log(tmp_path)
    assert log.contexts is not None
    assert set(map(tuple, log.contexts.codes.tolist())) == {(1, 2)}


def test_ids_of_contexts_in_json_are_exact(world: World, tmp_path: Path) -> None:
    examples = write_pair(world, tmp_path)
    path = tmp_path / "contexts/part-0.parquet"
    rows = pq.read_table(path).to_pylist()
    for one in rows:
        one["author_ids"] = [2**63 + 1] * len(one["author_ids"])
    path.with_suffix(".jsonl").write_text("\n".join(map(json.dumps, rows)))
    path.unlink()
    log = read_log(tmp_path)
    assert log.contexts is not None
    assert set(log.contexts.author_ids.tolist()) == {2**63 + 1}
    index = int(examples.history_lengths.argmax())
    assert np.array_equal(Examples(log, small_config()).context(index).post_ids, examples.context(index).post_ids)


def test_a_log_without_any_context_trains_on_its_rows(world: World, tmp_path: Path) -> None:
    """As where none of its rankings had a history."""
    before = write_pair(world, tmp_path, lambda index, context: None)
    examples = Examples(read_log(tmp_path), small_config())
    assert np.array_equal(examples.history_lengths, before.history_lengths)


@pytest.mark.slow
def test_eval_says_whose_histories_the_baselines_read(world: World, tmp_path: Path) -> None:
    before = write_pair(world, tmp_path / "log", lambda index, context: newest(context))
    save_checkpoint(
        tmp_path / "ranker", random_model(small_config(), 1), name="random", action_names=world.log.action_names,
        continuous=(DWELL_TIME,), score_weights={"favorite": 1.0},
    )  # fmt: skip
    told = call(
        "eval", "--checkpoint", tmp_path / "ranker", "--log", tmp_path / "log", "--since", WORLD.test_ts,
        "--out", tmp_path / "report", "--ablation-requests", 5,
    )  # fmt: skip
    assert told.exit_code == 0, told.output
    lengths = before.history_lengths[before.times >= WORLD.test_ts]
    means = np.minimum(lengths, 3).mean(), lengths.mean()
    assert f"as they were served, {means[0]:.1f} events on average. The baselines read" in told.stdout
    assert f"for the same requests, {means[1]:.1f} events." in told.stdout


@pytest.mark.parametrize("reason", REFUSED)
def test_contexts_that_cannot_be_used_are_refused(reason: str, world: World, tmp_path: Path) -> None:
    write_pair(world, tmp_path, lambda index, context: context if len(context) else None)
    path = tmp_path / "contexts/part-0.parquet"
    pq.write_table(REFUSED[reason](pq.read_table(path)), path)
    with pytest.raises(TableError, match=reason):
        read_log(tmp_path)


def test_contexts_that_no_impression_can_name_are_refused(world: World, tmp_path: Path) -> None:
    write_pair(world, tmp_path)
    path = tmp_path / "impressions/part-0.parquet"
    pq.write_table(pq.read_table(path).drop_columns(["context_id"]), path)
    with pytest.raises(
        TableError, match="has contexts, but its impressions lack the column context_id, which names them"
    ):
        read_log(tmp_path)


def test_scoring_reads_no_contexts_and_says_so(world: World, tmp_path: Path) -> None:
    write_pair(world, tmp_path / "log")
    scored = call("score", "--checkpoint", "weights/demo", "--log", tmp_path / "log", "--out", tmp_path / "out")
    assert scored.exit_code == 1
    assert f"give {tmp_path}/log/impressions" in scored.stderr
