"""The nightly turn from the command line: it publishes, refuses by name, goes back, and survives being killed at each step."""

from __future__ import annotations

import fcntl
import json
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from msgspec import structs

pytest.importorskip("duckdb")
pytest.importorskip("sklearn")

from model.synthetic import random_ranker
from tests.support.parts import write_rows
from tests.weights.call import run
from tests.weights.lab.joining_rows import T0, event, ranking, write_events, write_part
from tests.weights.lab.loop.nights import OPTIONS, Nights, printing_into
from weights.checkpoint import load_checkpoint, save_checkpoint
from weights.errors import CheckpointError
from weights.fetch import point
from weights.format.writer import alone_in
from weights.lab.joining.join import JoinSettings
from weights.lab.loop.gate import GateSettings
from weights.lab.loop.turn import CONTINUED, Paths, TurnSettings, refresh
from weights.lab.training.log import date_of, read_log
from weights.served import ServedRanking, read_part

pytestmark = pytest.mark.slow  # a checkpoint is trained first, by each process of the tests
STEPS = ("Joining.", "Training.", "Judging.", "Decided.")
"""The lines that refresh prints at its steps."""


@dataclass(frozen=True)
class Loop:
    """A directory with a log of what was served, events, a link and the root of the turns."""

    nights: Nights
    root: Path

    @property
    def turns(self) -> Path:
        return self.root / "loop"

    @property
    def link(self) -> Path:
        return self.root / "current"

    def command(self, *options: object) -> list[str]:
        where = ("--served", self.root / "served", "--events", self.root / "events")
        files = [*(self.root / "events").glob("*.parquet")]
        ends = [pc.max(pq.read_table(file).column("event_ts")).as_py() for file in files]
        until = ("--until", max(ends)) if ends else ()
        places = ("--checkpoint", self.link, "--out", self.turns)
        return [*map(str, ("refresh", *where, *places, *OPTIONS, *until, *options))]

    def refresh(self, *options: object) -> tuple[int, str]:
        return run(*self.command(*options))

    def back(self) -> tuple[int, str]:
        return run("refresh", "--back", "--checkpoint", self.link, "--out", self.turns)

    def night(self, day: int, served: dict[str, Any] | None = None, **events: Any) -> None:
        """Serve and act for a day."""
        self.nights.serve(self.root, day, **(served or {}))
        self.nights.act(self.root, day, **events)

    def served(self, day: int) -> int:
        """How many rankings were served on a day."""
        times = self.nights.examples.times
        return int(((times >= self.nights.start_ts(day)) & (times < self.nights.start_ts(day + 1))).sum())

    def version(self) -> str:
        """The version that the link names, every byte of it checked."""
        return load_checkpoint(self.link).manifest.version

    def figures(self, turn: int) -> dict[str, Any]:
        values: dict[str, Any] = json.loads((self.turns / f"turns/{turn:05}/figures.json").read_text())
        return values

    def names(self, folder: str) -> list[str]:
        return sorted(path.name for path in (self.turns / folder).iterdir())


@pytest.fixture
def loop(nights: Nights, tmp_path: Path) -> Loop:
    nights.link(tmp_path)
    return Loop(nights, tmp_path)


def test_a_night_is_published_once(loop: Loop) -> None:
    """Although nobody took an action that the score is for, and a model with other actions served too."""
    first = loop.version()
    assert load_checkpoint(loop.link).manifest.score_weights["block_author"] < 0
    loop.night(0, never="block_author")
    old = structs.replace(ranking(1, T0), model_version="old")
    write_part(
        loop.root / "served", "old", [old], next((loop.root / "served").glob("date=*")).name.removeprefix("date=")
    )
    code, said = loop.refresh()
    assert (code, "Turn 00001 published version" in said) == (0, True), said
    assert "left out: 1, of another model" in said
    night = loop.figures(1)["night"]
    assert night["expected_activity"] == pytest.approx(night["activity"], rel=0.3)
    published = loop.version()
    assert published != first
    manifest = load_checkpoint(loop.link).manifest
    assert (manifest.name, manifest.training["turn"]) == ("small", "00001")
    assert {name: manifest.training["settings"][name] for name in CONTINUED} == {**CONTINUED, "epochs": 1.0}
    figures = loop.figures(1)
    assert [check["name"] for check in figures["checks"] if check["passed"]] == [
        "clock", "histories", "events", "enough", "labels", "quality", "order",
    ]  # fmt: skip
    posts = figures["judged"]["unseen"]["post"]
    assert posts["share"] > 0
    for figures_of_both in (posts["order"], posts["order_of_others"]):
        assert all(figure["low"] < figure["value"] < figure["high"] for figure in figures_of_both)
    assert posts["order_of_others"][0] != posts["order_of_others"][1], "the serving model and the new one"
    report = (loop.turns / "turns/00001/report.md").read_text()
    assert f"published version {published}" in report
    (line,) = [line for line in report.splitlines() if line.startswith("| post |")]
    assert f"{posts['order'][1]['value']:.3f} (" in line
    code, said = loop.refresh()
    assert (code, "Nothing new" in said) == (0, True), said
    assert loop.version() == published
    assert loop.names("turns") == ["00001"]


@pytest.mark.parametrize(
    ("name", "served", "events"),
    [
        ("labels", {}, {"is_shuffled": True}),
        ("events", {}, {"share": 0.5}),
        ("clock", {}, {"late_seconds": 3600}),
        ("clock", {}, {"late_seconds": -3600}),
        ("histories", {"is_empty": True}, {}),
    ],
    ids=["labels shuffled", "half of the events missing", "clock ahead", "clock behind", "histories empty"],
)
def test_a_poisoned_night_is_refused_by_name(
    loop: Loop, name: str, served: dict[str, Any], events: dict[str, Any]
) -> None:
    before = loop.version()
    loop.night(0, served, **events)
    code, said = loop.refresh()
    assert (code, f"Turn 00001 is refused: {name}" in said) == (3, True), said
    assert loop.version() == before
    assert loop.figures(1)["outcome"]["failed"][0] == name
    assert loop.names("log") == loop.names("checkpoints") == []
    code, said = loop.refresh()
    assert (code, "Nothing new" in said) == (0, True), "what was refused is not tried again"


def test_a_night_after_a_poisoned_one_is_published_without_it(loop: Loop) -> None:
    loop.night(0)
    assert loop.refresh()[0] == 0
    loop.night(1, is_shuffled=True)
    assert loop.refresh()[0] == 3
    loop.night(2)
    code, said = loop.refresh()
    assert code == 0, said
    assert loop.names("log") == ["00001", "00003"]
    days = {
        int(time) // 86_400 for name in loop.names("log") for time in read_log(loop.turns / "log" / name).impression_ts
    }
    assert len(days) == 2


def test_a_short_night_waits_for_the_next_one(loop: Loop) -> None:
    loop.night(0)
    bound = "--bound", "min_rankings=200"
    code, said = loop.refresh(*bound)
    assert (code, "is refused: enough." in said) == (3, True), said
    loop.night(1)
    code, said = loop.refresh(*bound)
    assert code == 0, said
    assert loop.figures(2)["night"]["rankings"] > 200


def test_a_night_of_which_nothing_was_shown_waits(loop: Loop) -> None:
    """Whatever the bounds; a new checkpoint was looked for that no training had made."""
    loop.night(0)
    elsewhere = loop.root / "events" / "shown.parquet"
    write_events(elsewhere, [event(1, 0, "shown", loop.nights.start_ts(0))])
    code, said = loop.refresh("--bound", "min_positives=0")
    assert (code, "is refused: enough." in said) == (3, True), said
    (check,) = [check for check in loop.figures(1)["checks"] if check["name"] == "enough"]
    assert check["sentence"].endswith("none of their posts was shown"), check
    elsewhere.unlink()
    assert loop.refresh("--bound", "min_positives=0")[0] == 0, "the next turn takes it"


def test_a_worse_model_is_refused_and_its_night_stays(loop: Loop) -> None:
    before = loop.version()
    loop.night(0)
    code, said = loop.refresh("--set", "learning_rate=0.5", "--set", "gradient_norm=1000")
    assert (code, "is refused: quality, order." in said) == (3, True), said
    assert loop.version() == before
    assert (loop.names("log"), loop.names("checkpoints")) == (["00001"], [])
    loop.night(1)
    code, said = loop.refresh()
    assert code == 0, said
    assert loop.names("log") == ["00001", "00002"]


def test_back_returns_to_the_version_before(loop: Loop) -> None:
    code, said = loop.back()
    assert (code, "holds no turns" in said) == (1, True), said
    versions = [loop.version()]
    for day in (0, 1):
        loop.night(day)
        assert loop.refresh()[0] == 0
        versions.append(loop.version())
    assert loop.back()[0] == 0
    assert loop.version() == versions[1]
    code, said = loop.refresh()
    assert (code, "Nothing new" in said) == (0, True), said
    assert loop.version() == versions[1], "it is not published again"
    assert loop.back()[0] == 0
    assert loop.version() == versions[0]
    code, said = loop.back()
    assert (code, "knows no version before" in said) == (1, True), said
    loop.night(2)
    assert loop.refresh()[0] == 0
    assert loop.version() not in versions
    assert loop.back()[0] == 0
    assert loop.version() == versions[0]


def test_a_link_that_somebody_else_has_set_is_gone_back_to(loop: Loop, tmp_path: Path) -> None:
    loop.night(0)
    assert loop.refresh()[0] == 0
    published = loop.version()
    point(loop.link, str(loop.nights.checkpoint))
    assert loop.back()[0] == 0
    assert loop.version() == published


def relabelled(loop: Loop) -> str:
    """A checkpoint like the first one with another name and version, beside the link; what the link is to name."""
    shutil.copytree(loop.nights.checkpoint, loop.root / "mended")
    assert run("relabel", loop.root / "mended", "--name", "mended", "--score-weights", "favorite=2")[0] == 0
    return "mended"


def test_a_link_that_is_set_during_a_turn_stays(loop: Loop) -> None:
    """The new model was not judged against what somebody has set."""
    mended = relabelled(loop)
    loop.night(0)

    def set_link(line: str) -> None:
        if line == "Judging.":
            point(loop.link, mended)

    paths = Paths(loop.root / "served", str(loop.root / "events"), loop.link, loop.turns)
    until_ts = loop.nights.start_ts(1) + 3600
    settings = TurnSettings(
        JoinSettings(window_seconds=3600, until_ts=until_ts),
        GateSettings(min_rankings=100, min_lead=-1.0, max_entropy_loss=9.0, max_calibration_loss=9.0),
        training={"batch_contexts": 16, "epochs": 0.2},
    )
    served = load_checkpoint(loop.link).manifest.digest
    with pytest.raises(CheckpointError) as refused:
        refresh(paths, settings, set_link)
    manifest = load_checkpoint(loop.link).manifest
    for words in (f"names mended {manifest.version}", manifest.digest[:12], served[:12], "run refresh again"):
        assert words in str(refused.value)
    assert os.readlink(loop.link) == mended
    assert loop.names("turns") == loop.names("log") == loop.names("checkpoints") == []
    result = refresh(paths, settings)
    assert result.decision == "published", result
    assert load_checkpoint(loop.link).manifest.name == "mended"
    assert loop.back()[0] == 0
    assert os.readlink(loop.link) == mended


def as_if_killed_before_the_switch(loop: Loop, target: str) -> str:
    """The state as it is when it says what the link is to name, which does not name it yet but `target`; the version that is pending."""
    pending = loop.version()
    state = json.loads((loop.turns / "state.json").read_text())
    state |= {"pending": os.readlink(loop.link), "serving": load_checkpoint(loop.nights.checkpoint).manifest.digest}
    (loop.turns / "state.json").write_text(json.dumps(state))
    point(loop.link, target)
    return pending


def test_a_link_that_is_set_after_a_killed_turn_stays(loop: Loop) -> None:
    mended = relabelled(loop)
    loop.night(0)
    assert loop.refresh()[0] == 0
    as_if_killed_before_the_switch(loop, mended)
    code, said = loop.refresh()
    assert (code, said.count("\n"), "names mended" in said) == (1, 1, True), said
    assert os.readlink(loop.link) == mended
    code, said = loop.refresh()
    assert (code, "Nothing new" in said, os.readlink(loop.link)) == (0, True, mended), said


def test_a_link_that_is_set_after_a_decision_stays(loop: Loop) -> None:
    """As if the turn was killed between the decision and the state."""
    mended = relabelled(loop)
    loop.night(0)
    assert loop.refresh()[0] == 0
    point(loop.link, mended)
    (loop.turns / "state.json").unlink()
    code, said = loop.refresh()
    assert (code, said.count("\n"), "names mended" in said) == (1, 1, True), said
    assert os.readlink(loop.link) == mended
    code, said = loop.refresh(*BEFORE_TRAINING)
    assert (code, "Joining." in said, os.readlink(loop.link)) == (3, True, mended), said


def test_an_outcome_of_an_earlier_version_is_carried_out(loop: Loop) -> None:
    """It does not say which checkpoint was judged against."""
    loop.night(0)
    assert loop.refresh()[0] == 0
    published = loop.version()
    path = loop.turns / "turns/00001/outcome.json"
    outcome = json.loads(path.read_text())
    del outcome["serving"]
    path.write_text(json.dumps(outcome))
    point(loop.link, str(loop.nights.checkpoint))
    (loop.turns / "state.json").unlink()
    assert loop.refresh()[0] == 0
    assert loop.version() == published


def test_a_switch_that_was_interrupted_is_made_and_told(loop: Loop) -> None:
    loop.night(0)
    assert loop.refresh()[0] == 0
    unfinished = loop.root / ".current.0123abcd"
    unfinished.symlink_to(os.readlink(loop.link))
    other = loop.root / ".current.4567abcd"
    other.symlink_to("of-somebody-else")
    pending = as_if_killed_before_the_switch(loop, str(loop.nights.checkpoint))
    code, said = loop.refresh()
    told = f"{loop.link} names version {pending} now: a run was interrupted when it switched it."
    assert (code, told in said, "Nothing new" in said) == (0, True, True), said
    assert loop.version() == pending
    assert (unfinished.is_symlink(), other.is_symlink()) == (False, True)


def test_back_names_a_version_that_was_changed_in_place(loop: Loop) -> None:
    point(loop.link, relabelled(loop))
    for day in (0, 1):
        loop.night(day)
        assert loop.refresh("--bound", "min_activity=0", "--bound", "min_lead=-1", "--bound", "min_order=0")[0] == 0
    assert loop.back()[0] == 0
    assert run("relabel", loop.link.resolve(), "--name", "small", "--score-weights", "favorite=3")[0] == 0
    loop.night(2)
    assert loop.refresh("--bound", "min_activity=0", "--bound", "min_lead=-1", "--bound", "min_order=0")[0] == 0
    code, said = loop.back()
    assert (code, f"names version {loop.version()} again" in said) == (0, True), said
    state = json.loads((loop.turns / "state.json").read_text())
    assert state["versions"][-1]["version"] == loop.version()


def killed_at(command: Sequence[str], line: str) -> tuple[int | None, str]:
    """Run a command in a process of its own and kill it when it prints this line; its exit code and what it printed until then."""
    multiprocessing.set_forkserver_preload(["weights.lab.loop.turn", "weights.command_line", "sklearn.metrics"])
    context, said = multiprocessing.get_context("forkserver"), list[str]()
    reading, writing = context.Pipe(duplex=False)
    process = context.Process(target=printing_into, args=(writing, [*command]))
    process.start()
    writing.close()
    with os.fdopen(os.dup(reading.fileno())) as printed:
        for each in printed:
            said.append(each)
            if each.strip() == line:
                process.kill()
    process.join()
    return process.exitcode, "".join(said)


def test_a_turn_that_is_killed_at_each_step_is_finished(loop: Loop) -> None:
    loop.night(0)
    first = loop.version()
    for step in STEPS:
        code, said = killed_at(loop.command(), step)
        assert said.splitlines()[-1] == step or step == STEPS[-1], said
        assert code == -signal.SIGKILL or step == STEPS[-1], said
        assert loop.version() == first or step == STEPS[-1], "whole, and the one before"
    code, said = loop.refresh()
    assert code == 0, said
    assert loop.version() != first
    assert loop.names("turns") == loop.names("log") == loop.names("checkpoints") == ["00001"]
    assert not [*loop.turns.rglob(".*.partial")]
    code, said = loop.refresh()
    assert (code, "Nothing new" in said) == (0, True), said


def test_what_a_killed_turn_joined_counts_for_the_same_options(loop: Loop) -> None:
    """With other options it is joined again: absence would mean something else in it."""
    loop.night(0)
    for is_joined_before in (False, True):
        code, said = killed_at(loop.command(), "Training.")
        assert (code, "Joining." in said) == (-signal.SIGKILL, not is_joined_before), said
    other = ("--observed", "favorite")
    code, said = loop.refresh(*other, "--bound", "min_activity=0")
    assert "Joining." in said, said
    assert code in (0, 3), said


def test_a_decision_that_was_not_carried_out_is_carried_out(loop: Loop) -> None:
    """As if it was killed between the decision and the switch."""
    first = os.readlink(loop.link)
    loop.night(0)
    assert loop.refresh()[0] == 0
    published = loop.version()
    point(loop.link, first)
    (loop.turns / "state.json").unlink()
    code, said = loop.refresh()
    assert (code, "Turn 00001 was interrupted" in said) == (0, True), said
    assert loop.version() == published
    assert loop.back()[0] == 0
    assert os.readlink(loop.link) == first


def rows_of_user(loop: Loop, user: int) -> dict[str, int]:
    """How many impressions of a user each joined night holds."""
    return {
        name: int((pq.read_table(loop.turns / "log" / name / "impressions")["user_id"].to_numpy() == user).sum())
        for name in loop.names("log")
    }


def busiest_in(impressions: pa.Table) -> int:
    users, counts = np.unique(impressions["user_id"].to_numpy(), return_counts=True)
    return int(users[counts.argmax()])


def forget(loop: Loop, user: int) -> tuple[int, str]:
    return run("served", "forget", loop.root / "served", "--user", str(user), "--loop", loop.turns)


def test_a_user_is_removed_from_the_joined_nights(loop: Loop) -> None:
    for day in (0, 1):
        loop.night(day)
        assert loop.refresh("--bound", "min_lead=-1")[0] == 0
    impressions = [pq.read_table(loop.turns / f"log/0000{night}/impressions") for night in (1, 2)]
    contexts = [pq.read_table(loop.turns / f"log/0000{night}/contexts") for night in (1, 2)]
    user = busiest_in(pa.concat_tables(impressions))
    others = [table.filter(pc.field("user_id") != user) for table in impressions]
    theirs = [
        table.filter(pc.is_in(table["context_id"], pc.unique(of_others["context_id"])))
        for table, of_others in zip(contexts, others, strict=True)
    ]
    gone = [
        sum(map(len, before)) - sum(map(len, after)) for before, after in ((impressions, others), (contexts, theirs))
    ]
    assert min(gone) > 0
    code, said = forget(loop, user)
    told = f"{loop.turns}: {gone[0]} impressions and {gone[1]} contexts removed from 2 joined nights"
    assert (code, told in said) == (0, True), said
    for place, night in enumerate(("00001", "00002")):
        assert pq.read_table(loop.turns / "log" / night / "impressions").equals(others[place])
        assert pq.read_table(loop.turns / "log" / night / "contexts").equals(theirs[place])
    assert "0 impressions and 0 contexts removed from 0 joined nights" in forget(loop, user)[1]
    version = loop.version()
    loop.night(2)
    code, said = loop.refresh("--bound", "min_lead=-1")
    assert (code, loop.version() != version) == (0, True), said
    assert not [*loop.turns.rglob("*.forget")]


def test_a_killed_turn_joins_again_without_a_forgotten_user(loop: Loop) -> None:
    loop.night(0)
    assert killed_at(loop.command(), "Training.")[0] == -signal.SIGKILL
    user = busiest_in(pq.read_table(loop.turns / "log/00001/impressions"))
    code, said = forget(loop, user)
    assert (code, "turn 00001 was not finished: it begins again by joining" in said) == (0, True), said
    assert loop.names("log") == loop.names("turns") == loop.names("checkpoints") == []
    code, said = loop.refresh("--bound", "min_lead=-1")
    assert (code, "Joining." in said) == (0, True), said
    assert rows_of_user(loop, user) == {"00001": 0}


def test_a_turn_that_runs_is_waited_for_by_forget(loop: Loop) -> None:
    """Not by reading beside it, which would leave what it has joined."""
    (loop.turns / "turns").mkdir(parents=True)
    (loop.root / "served").mkdir()
    command = [sys.executable, "-m", "weights", "served", "forget", str(loop.root / "served"), "--user", "1"]
    with alone_in(loop.turns):
        other = subprocess.Popen([*command, "--loop", str(loop.turns)], stdout=subprocess.PIPE, text=True)
        assert other.stdout is not None
        lines = [other.stdout.readline(), other.stdout.readline()]
        assert "is in use by a turn: its nights are read when that ends" in lines[1]
        assert other.poll() is None
    assert "0 impressions" in other.communicate()[0]
    code, said = run("served", "forget", loop.root / "served", "--user", "1", "--loop", loop.root)
    assert (code, "holds no nightly turns: give the --out of refresh" in said) == (1, True), said


def test_a_turn_beside_another_says_so(loop: Loop) -> None:
    loop.night(0)
    loop.turns.mkdir()
    held = os.open(loop.turns, os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)
    for code, said in (loop.refresh(), run(*loop.command("--back"))):
        assert code == 1
        assert said.count("\n") == 1, said
    os.close(held)
    assert loop.refresh()[0] == 0


def test_old_nights_and_checkpoints_are_removed(loop: Loop) -> None:
    for day in range(3):
        loop.night(day)
        code, said = loop.refresh("--nights", "2", "--keep", "2")
        assert code == 0, said
    assert loop.names("log") == ["00002", "00003"]
    assert loop.names("checkpoints") == ["00002", "00003"]
    assert loop.names("turns") == ["00001", "00002", "00003"]
    assert [*loop.turns.glob("turns/*/work")] == []
    assert loop.nights.checkpoint.is_dir(), "what refresh has not made stays"


def test_events_that_ended_are_named(loop: Loop) -> None:
    loop.night(0)
    assert loop.refresh()[0] == 0
    loop.nights.serve(loop.root, 1)
    code, said = loop.refresh()
    assert (code, "is refused: events" in said) == (3, True), said
    assert "hours older than the newest ranking" in said
    loop.nights.act(loop.root, 1)
    assert loop.refresh()[0] == 0, "when they have come, the night is taken"


def test_a_night_that_training_refuses_is_joined_anew(loop: Loop) -> None:
    """All of its posts are for one time, so no history comes before another."""
    loop.night(0, {"is_for_one_time": True})
    code, said = loop.refresh()
    assert (code, said.splitlines()[-1].count("holds only one time")) == (1, 1), said
    loop.night(1)
    code, said = loop.refresh()
    assert (code in (0, 3), "Joining." in said) == (True, True), said
    assert loop.figures(1)["join"]["joined_rankings"] > 200, "both nights"


def test_no_model_is_judged_by_what_the_serving_one_has_seen(loop: Loop) -> None:
    """Such as one that was trained by hand on the newest log, before the first turn."""
    loop.night(0)
    loop.night(1)
    first, times = load_checkpoint(loop.link), loop.nights.examples.times
    served = times[(times >= loop.nights.start_ts(0)) & (times < loop.nights.start_ts(2))]

    def trained_until(until_ts: int) -> None:
        labels = {
            name: getattr(first.manifest, name) for name in ("name", "action_names", "continuous", "score_weights")
        }
        path = loop.root / f"until-{until_ts}"
        save_checkpoint(path, first.ranker, **labels, training={"until_ts": until_ts})
        point(loop.link, str(path))

    trained_until(int(served[-1]) + 1)
    code, said = loop.refresh()
    assert (code, said.splitlines()[-1].count("was trained until")) == (1, 1), said
    seen = int(served[int(0.9 * len(served))])
    trained_until(seen)
    code, said = loop.refresh()
    assert code in (0, 3), said
    assert loop.figures(1)["judged"]["requests"] == int((served >= seen).sum()), "a tenth, not a fifth"


def moved_to(loop: Loop, actions: tuple[str, ...], **config: int) -> None:
    """Move the link to an untrained model with these actions and changes of the configuration."""
    manifest = load_checkpoint(loop.link).manifest
    save_checkpoint(
        loop.root / "other",
        random_ranker(replace(manifest.config, actions=len(actions), **config)),
        name="small",
        action_names=actions,
        continuous=manifest.continuous,
        score_weights=manifest.score_weights,
    )
    point(loop.link, str(loop.root / "other"))


def with_one_more_action(row: ServedRanking, names: tuple[str, ...]) -> ServedRanking:
    """The ranking by a model with these actions, one more than the row's."""
    actions = np.pad(row.context.actions, ((0, 0), (0, 1)))
    return structs.replace(
        row, action_names=names, weights=np.ones(len(names)), context=replace(row.context, actions=actions)
    )


def test_nights_of_other_actions_are_left_out_and_told(loop: Loop) -> None:
    loop.night(0)
    assert loop.refresh()[0] == 0
    names = (*load_checkpoint(loop.link).manifest.action_names, "bookmark")
    moved_to(loop, names)

    loop.night(1, {"change": lambda row: with_one_more_action(row, names)})
    code, said = loop.refresh("--bound", "min_activity=0")
    told = "1 earlier nights are left out of the training: the model that serves has other actions (00001)"
    assert (code in (0, 3), told in said) == (True, True), said
    assert told in (loop.turns / "turns/00002/report.md").read_text()
    assert loop.figures(2)["left_out_nights"] == ["00001"]
    (check,) = [check for check in loop.figures(2)["checks"] if check["name"] == "events"]
    assert "the serving model expects" in check["sentence"], "what is usual is of other actions"


def test_nights_with_and_without_codes_train_together(loop: Loop) -> None:
    loop.night(0)
    assert loop.refresh()[0] == 0
    actions = load_checkpoint(loop.link).manifest.action_names
    moved_to(loop, actions, code_levels=2, code_values=16)

    def with_codes(code: int) -> Callable[[ServedRanking], ServedRanking]:
        return lambda row: structs.replace(
            row,
            candidates=replace(row.candidates, codes=np.full((len(row.scores), 2), code)),
            context=replace(row.context, codes=np.full((len(row.context), 2), code)),
        )

    for day, code in ((1, 1), (2, 17)):  # the model has no code 17
        loop.night(day, {"change": with_codes(code)})
        ended, said = loop.refresh("--bound", "min_activity=0")
        assert ended in (0, 3), said
        assert loop.figures(day + 1)["left_out_nights"] == []


def test_rankings_of_parts_that_come_late_are_told(loop: Loop) -> None:
    loop.night(0)
    (part,) = (loop.root / "served").glob("*/*.parquet")
    rows = [*read_part(part)]
    late = part.with_name("late.parquet.open")
    write_rows(part, rows[:-40])
    write_rows(late, rows[-40:])
    bound = "--bound", "min_activity=99"  # refused before it trains
    code, said = loop.refresh(*bound)
    assert (code, "1 parts are still being written" in said, "WARNING" in said) == (3, True, False), said
    late.rename(late.with_suffix(""))
    told = "WARNING: 40 rankings are in parts that came after their night was joined: no night has them"
    code, said = loop.refresh(*bound)
    assert (code, "Nothing new" in said, told in said) == (0, True, True), said
    loop.night(1)
    code, said = loop.refresh(*bound)
    assert (code, told in said) == (3, True), said
    assert told in (loop.turns / "turns/00002/report.md").read_text()
    assert loop.figures(2)["join"]["late_rankings"] == 40
    code, said = loop.refresh(*bound)
    assert (code, "WARNING" in said) == (0, False), said


def warned_of(said: str) -> int:
    """Of how many rankings in late parts a turn warns."""
    found = re.search(r"WARNING: (\d+) rankings are in parts that came after their night", said)
    return int(found[1]) if found else 0


def test_only_rankings_of_parts_not_read_before_are_late(loop: Loop) -> None:
    """Not those of a copy; a user who is removed meanwhile does not make them fewer."""
    loop.night(0)
    (part,) = (loop.root / "served").glob("*/*.parquet")
    rows, late = [*read_part(part)], part.with_name("late.parquet")
    write_rows(part, rows[:-40])
    assert loop.refresh(*BEFORE_TRAINING)[0] == 3
    state = json.loads((loop.turns / "state.json").read_text())
    assert state["done"]["parts"] == {f"{part.parent.name}/part.parquet": len(rows) - 40}
    for name in ("outcome.json", "figures.json"):
        assert part.name not in (loop.turns / "turns/00001" / name).read_text(), "the state alone has the names"
    copy = part.with_name("copy.parquet")
    shutil.copy(part, copy)
    assert warned_of(loop.refresh(*BEFORE_TRAINING)[1]) == 0
    copy.unlink()
    users = {row.context.user_id for row in rows[-40:]}
    gone = next(row.context.user_id for row in rows if row.context.user_id not in users)
    assert run("served", "forget", loop.root / "served", "--user", gone)[0] == 0
    write_rows(late, rows[-40:])
    assert warned_of(loop.refresh(*BEFORE_TRAINING)[1]) == 40
    del state["done"]["parts"]
    (loop.turns / "state.json").write_text(json.dumps(state))
    assert warned_of(loop.refresh(*BEFORE_TRAINING)[1]) == 0, "an earlier version has not kept the names"


def test_rankings_of_another_model_are_not_late(loop: Loop) -> None:
    """A model with other actions served for some hours, and took the turn after them."""
    loop.night(0)
    assert loop.refresh(*BEFORE_TRAINING)[0] == 3
    names = (*load_checkpoint(loop.link).manifest.action_names, "bookmark")
    moved_to(loop, names)
    loop.night(1)
    part = loop.root / f"served/date={date_of(loop.nights.start_ts(1))}/part.parquet"
    rows = [*read_part(part)]
    write_rows(part, rows[:-60])
    write_rows(part.with_name("other.parquet"), [with_one_more_action(row, names) for row in rows[-60:]])
    bounds = ("--bound", "min_rankings=50", "--bound", "min_positives=1")
    code, said = loop.refresh(*BEFORE_TRAINING, *bounds)
    assert (code, "of another model" in said) == (3, True), said
    point(loop.link, str(loop.nights.checkpoint))
    loop.night(2)
    code, said = loop.refresh(*BEFORE_TRAINING)
    assert (code, warned_of(said)) == (3, 0), said


def test_days_on_which_nothing_was_served_are_nothing_new(loop: Loop) -> None:
    loop.night(0)
    for day in (1, 2):
        loop.nights.act(loop.root, day)
    assert loop.refresh()[0] == 0
    code, said = loop.refresh()
    assert (code, "Nothing new" in said) == (0, True), said


BEFORE_TRAINING = ("--bound", "min_activity=99")
"""The night is refused before it trains."""


def test_one_clock_that_is_ahead_does_not_end_the_loop(loop: Loop) -> None:
    """The service's at one ranking, which an event names."""
    ahead = structs.replace(ranking(1, int(time.time()) + 400 * 86_400), action_names=loop.nights.log.action_names)
    write_part(loop.root / "served", "ahead", [ahead], "2027-12-31")
    (loop.root / "events").mkdir()
    write_events(loop.root / "events" / "ahead.parquet", [event(1, 0, "favorite")])
    for day in (0, 1):
        loop.night(day)
        code, said = loop.refresh(*BEFORE_TRAINING, "--until", "")
        assert (code, f"Turn {day + 1:05} is refused: events" in said) == (3, True), said
        assert "left out: 1, served in the future" in said


def test_until_in_the_future_does_not_end_the_loop(loop: Loop) -> None:
    loop.night(0)
    code, said = loop.refresh(*BEFORE_TRAINING, "--until", int(time.time()) + 365 * 86_400)
    assert (code, "is in the future" in said) == (1, True), said
    assert loop.refresh(*BEFORE_TRAINING)[0] == 3


def test_a_state_of_the_future_is_told_with_the_way_out(loop: Loop) -> None:
    """As a turn of an earlier version left it after a clock was wrong."""
    loop.night(0)
    assert loop.refresh(*BEFORE_TRAINING)[0] == 3
    path = loop.turns / "state.json"
    right = path.read_text()
    state = json.loads(right)
    path.write_text(json.dumps(state | {"through_ts": int(time.time()) + 365 * 86_400}))
    loop.night(1)
    code, said = loop.refresh(*BEFORE_TRAINING)
    assert (code, said.count("\n"), "which is in the future" in said) == (1, 1, True), said
    way_out = json.loads((loop.turns / "turns/00001/outcome.json").read_text())["through_ts"]
    assert ("turns/NAME/outcome.json" in said, way_out) == (True, state["through_ts"]), said
    path.write_text(json.dumps(state | {"through_ts": way_out}))
    code, said = loop.refresh(*BEFORE_TRAINING)
    assert (code, "Turn 00002 is refused: events" in said) == (3, True), said


def test_a_turn_with_nothing_new_says_what_is_left_out(loop: Loop) -> None:
    loop.night(0)
    assert loop.refresh(*BEFORE_TRAINING)[0] == 3
    (old,) = (loop.root / "served").glob("*/*.parquet")
    loop.night(1)
    (part,) = {*(loop.root / "served").glob("*/*.parquet")} - {old}
    part.write_bytes(part.read_bytes()[:-100])
    for _ in ("beside an older part", "alone"):
        code, said = loop.refresh(*BEFORE_TRAINING)
        assert (code, "Nothing new" in said) == (0, True), said
        assert f"WARNING: 1 files are left out, they cannot be read: {part}" in said
        old.unlink(missing_ok=True)
    part.unlink()
    write_part(loop.root / "served", "other", [ranking(1, T0)], part.parent.name.removeprefix("date="))
    code, said = loop.refresh(*BEFORE_TRAINING)
    assert (code, "Nothing new" in said, "left out: 1, of another model" in said) == (0, True, True), said


def test_a_first_turn_without_a_part_that_can_be_read_fails(loop: Loop) -> None:
    loop.night(0)
    (part,) = (loop.root / "served").glob("*/*.parquet")
    part.write_bytes(part.read_bytes()[:-100])
    code, said = loop.refresh()
    assert (code, f"1 files are left out, they cannot be read: {part}" in said) == (1, True), said


def test_a_night_of_one_request_id_is_refused_for_that(loop: Loop) -> None:
    loop.night(0)
    assert loop.refresh(*BEFORE_TRAINING)[0] == 3
    loop.night(1, {"change": lambda row: structs.replace(row, request_id="same")})
    code, said = loop.refresh(*BEFORE_TRAINING)
    told = "several have the same request_id"
    assert (code, "is refused: events" in said, f"left out: {loop.served(1)}, {told}" in said) == (3, True, True), said
    (check,) = loop.figures(2)["checks"]
    assert told in check["sentence"]
    assert told in (loop.turns / "turns/00002/report.md").read_text()


def test_nothing_is_new_where_all_parts_were_removed(loop: Loop) -> None:
    """As `SERVED__KEEP_DAYS` removes them where nothing is served for long."""
    loop.night(0)
    (part,) = (loop.root / "served").glob("*/*.parquet")
    whole = part.read_bytes()
    part.unlink()
    code, said = loop.refresh(*BEFORE_TRAINING)
    assert (code, "holds no rankings: its parts are files" in said) == (1, True), "at the first turn, a wrong place"
    part.write_bytes(whole)
    assert loop.refresh(*BEFORE_TRAINING)[0] == 3
    part.unlink()
    code, said = loop.refresh(*BEFORE_TRAINING)
    assert (code, "Nothing new" in said) == (0, True), said


def test_rankings_on_surfaces_the_model_lacks_are_left_out(loop: Loop) -> None:
    def on(surface: int, of_history: int) -> Callable[[ServedRanking], ServedRanking]:
        return lambda row: structs.replace(
            row,
            candidates=replace(row.candidates, surfaces=np.full_like(row.candidates.surfaces, surface)),
            context=replace(row.context, surfaces=np.full_like(row.context.surfaces, of_history)),
        )

    def some(row: ServedRanking) -> ServedRanking:
        number = int(row.request_id.removeprefix("feed-")) % 3
        return on(int(number == 0), int(number == 1))(row)

    loop.night(0, {"change": some})
    assert loop.refresh()[0] == 0
    moved_to(loop, load_checkpoint(loop.link).manifest.action_names, product_surfaces=1)
    loop.night(1, {"change": on(1, 0)})
    code, said = loop.refresh(*BEFORE_TRAINING)
    told = "rankings are left out: the model that serves does not have their product surfaces"
    assert (code, "Nothing new" in said, told in said) == (0, True, True), said
    loop.night(2, {"change": on(0, 0)})
    code, said = loop.refresh("--bound", "min_activity=0")
    assert code in (0, 3), said
    assert told in said
    figures = loop.figures(2)
    assert figures["night"]["rankings"] == loop.served(2)
    assert loop.served(1) < figures["left_out_rankings"] < loop.served(0) + loop.served(1)
    assert f"{figures['left_out_rankings']:,} {told}" in (loop.turns / "turns/00002/report.md").read_text()


def test_what_cannot_be_used_is_refused_in_a_sentence(loop: Loop, tmp_path: Path) -> None:
    loop.night(0)
    checks = {
        "is not a link": ("--checkpoint", loop.nights.checkpoint),
        "There is no setting 'min_order_'": ("--bound", "min_order_=1"),
        "must be a share": ("--held-out", "1"),
        "with its architecture: leave history_length, user_rows out of --set": (
            "--set",
            "history_length=5",
            "--set",
            "user_rows=4096",
        ),
        "not a directory": ("--served", tmp_path / "nowhere"),
    }
    before = loop.version()
    for reason, options in checks.items():
        code, said = loop.refresh(*options)
        assert code == 1, said
        assert (reason in said, said.count("\n")) == (True, 1 + said.count("Joining.")), said
    code, said = run("refresh", "--checkpoint", loop.link, "--out", loop.turns)
    assert (code, "Give --served and --events" in said) == (1, True), said
    loop.turns.joinpath("state.json").write_text("{}x")
    code, said = loop.refresh()
    assert (code, "is not as refresh writes it" in said) == (1, True), said
    assert loop.version() == before
