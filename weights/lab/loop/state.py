"""What a nightly turn leaves for the next one, as JSON in the root's directory. Reads and writes; decides nothing.

`ROOT/state.json` holds what has happened. `ROOT/turns/NAME/outcome.json` holds what one turn has decided. It is written before anything is
switched, so a turn that is killed after it is finished by the next run.
"""

from __future__ import annotations

import glob
import os
import shutil
from pathlib import Path
from typing import TypeVar

import msgspec
from msgspec import Struct

from weights.checkpoint import load_manifest
from weights.errors import CheckpointError
from weights.fetch import point
from weights.format.writer import sync, write_whole
from weights.lab.loop.gate import Usual
from weights.turns import CHECKPOINTS, LOGS, OUTCOME_NAME, TURNS

STATE_NAME = "state.json"
MOST_NIGHTS = 60
"""So many nights are remembered."""

T = TypeVar("T", bound=Struct)


class NightRecord(Struct, frozen=True, forbid_unknown_fields=True):
    """A night that passed its checks: the turn's name, its impressions, actions per impression, how far the AUC within users of one of
    the models was from 0.5, and the names of the actions of the model that served."""

    name: str
    impressions: int
    activity: float
    order: float
    actions: tuple[str, ...] = ()


class Version(Struct, frozen=True, forbid_unknown_fields=True):
    """A checkpoint that the link has named. `target`: the text of the link."""

    target: str
    version: str


class Done(Struct, frozen=True, forbid_unknown_fields=True):
    """How many rankings the turn had read of those served up to its `through_ts`, from the beginning of a UTC day on, Unix seconds; and of
    each part of these days all of them, by its name below the log's directory. `parts`: None in a file of an earlier version, and in
    an outcome that the state has."""

    from_ts: int
    rankings: int
    parts: dict[str, int] | None = None


class Outcome(Struct, frozen=True, forbid_unknown_fields=True):
    """What a turn has decided. `failed`: the names of the checks that failed. `through_ts`: rankings served up to here are done, Unix
    seconds. `night`: None where the night may not train a model. `publish`: None where the new checkpoint is refused. `serving`: the digest
    of the checkpoint that was judged against; empty in a file of an earlier version."""

    turn: int
    failed: tuple[str, ...]
    through_ts: int | None
    sentence: str
    night: NightRecord | None = None
    publish: Version | None = None
    done: Done | None = None
    serving: str = ""

    def brief(self) -> Outcome:
        """The same without the names of the parts, which may be thousands."""
        return msgspec.structs.replace(self, done=self.done and msgspec.structs.replace(self.done, parts=None))


class State(Struct, frozen=True, forbid_unknown_fields=True):
    """`turns`: how many there were. `through_ts`: rankings served up to here are done. `nights`: those that passed, the newest last.
    `versions`: what the link has named, the newest last; `--back` drops the last. `pending`: what the link has still to name, if anything;
    `serving`: the digest of the checkpoint that it then replaces, empty in a file of an earlier version.
    """

    turns: int = 0
    through_ts: int | None = None
    nights: tuple[NightRecord, ...] = ()
    versions: tuple[Version, ...] = ()
    pending: str = ""
    done: Done | None = None
    serving: str = ""

    def usual(self, actions: tuple[str, ...]) -> Usual:
        """What the nights that passed and were served by models with these actions were like."""
        nights = [night for night in self.nights if night.actions == actions]
        return Usual([night.activity for night in nights], [night.order for night in nights])

    def after(self, outcome: Outcome, keep: int) -> State:
        """The state after a turn. `keep`: how many versions are remembered, the present one among them."""
        nights, versions = self.nights, self.versions
        if outcome.night:
            nights = (*nights, outcome.night)[-MOST_NIGHTS:]
        if outcome.publish:
            versions = (*versions, outcome.publish)[-keep:]
        pending = outcome.publish.target if outcome.publish else ""
        serving = outcome.serving if outcome.publish else ""
        return State(outcome.turn, outcome.through_ts, nights, versions, pending, outcome.done, serving)


def name_of(turn: int) -> str:
    """The name of a turn, of its night and of its checkpoint."""
    return f"{turn:05}"


def read_json_as(path: Path, kind: type[T]) -> T | None:
    """The values in a file; None if there is no file. Raises CheckpointError for a file that was not written by us."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except FileNotFoundError:
        return None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} is not as refresh writes it: {error}.") from error


def write_json(path: Path, values: Struct) -> None:
    """Write the values in one step. Raises OSError."""
    text = msgspec.json.format(msgspec.json.encode(values), indent=1)
    write_whole(path, lambda new: new.write_bytes(text + b"\n"))
    sync(path.parent)


def read_state(root: Path) -> State:
    """The state of a root; that of a new one if it has none. Raises CheckpointError."""
    return read_json_as(root / STATE_NAME, State) or State()


def take_up(root: Path, state: State, outcome: Outcome, keep: int) -> State:
    """Write the state after a turn. `keep`: how many versions are remembered, the present one among them."""
    state = state.after(outcome, keep)
    write_json(root / STATE_NAME, state)
    write_json(root / TURNS / name_of(outcome.turn) / OUTCOME_NAME, outcome.brief())
    return state


def forget_turn(root: Path, name: str) -> None:
    """Remove what a turn has made."""
    for folder in (TURNS, LOGS, CHECKPOINTS):
        shutil.rmtree(root / folder / name, ignore_errors=True)


def settle(root: Path, link: Path, keep: int) -> tuple[State, Outcome | None, bool]:
    """Finish what a killed run has decided and not done. Returns the state, the outcome of the turn that was finished here, and whether
    the link was still to be switched.

    Raises CheckpointError where somebody else has set the link meanwhile: it stays, and what was decided is forgotten.
    """
    state = read_state(root)
    _remove_unfinished_links(link, state)
    name = name_of(state.turns + 1)
    outcome = read_json_as(root / TURNS / name / OUTCOME_NAME, Outcome)
    if outcome:
        if outcome.publish and (problem := problem_of_link(link, outcome.serving, outcome.publish.target)):
            forget_turn(root, name)
            raise CheckpointError(problem)
        state = take_up(root, with_present_version(link, state), outcome, keep)
    is_pending = bool(state.pending)
    if is_pending:
        state = switch(root, link, state)
    return state, outcome, is_pending


def _remove_unfinished_links(link: Path, state: State) -> None:
    """Remove what a run left that was killed while it switched the link."""
    targets = {version.target for version in state.versions}
    for left in link.parent.glob(f".{glob.escape(link.name)}.{'[0-9a-f]' * 8}"):
        if left.is_symlink() and os.readlink(left) in targets:
            left.unlink(missing_ok=True)


def problem_of_link(link: Path, serving: str, target: str = "") -> str | None:
    """Why the link may not be switched to `target`: it names neither that nor the checkpoint with the digest `serving`, which was judged
    against. None if it may, and where that digest is not known."""
    if not serving or (target and leads_to(link, target)):
        return None
    manifest = load_manifest(link)
    if manifest.digest == serving:
        return None
    return (
        f"{link} names {manifest.name} {manifest.version} (digest {manifest.digest[:12]}) now, and the checkpoint that was to be replaced "
        f"is another (digest {serving[:12]}): the link stays as it is; run refresh again"
    )


def leads_to(link: Path, target: str) -> bool:
    """Whether the link names what it would name with this text."""
    return link.resolve() == (link.parent / target).resolve()


def with_present_version(link: Path, state: State) -> State:
    """The state with the version that the link names now as its newest, also where somebody else has set the link or has changed the
    checkpoint in place."""
    target, versions = os.readlink(link), state.versions
    if versions and leads_to(link, versions[-1].target):
        target, versions = versions[-1].target, versions[:-1]
    return msgspec.structs.replace(state, versions=(*versions, Version(target, load_manifest(link).version)))


def switch(root: Path, link: Path, state: State) -> State:
    """Point the link to what the state says is pending, and note that this is done. Raises CheckpointError where somebody else has set the
    link meanwhile: then the version that is pending is forgotten."""
    done = msgspec.structs.replace(state, pending="", serving="")
    if problem := problem_of_link(link, state.serving, state.pending):
        write_json(root / STATE_NAME, msgspec.structs.replace(done, versions=state.versions[:-1]))
        raise CheckpointError(problem)
    point(link, state.pending)
    write_json(root / STATE_NAME, done)
    return done
