"""The commands that look at a log, train, and draw worlds and examples. Their libraries are imported when they run."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from model.config import ModelConfig
from model.presets import Preset, with_preset
from weights.actions import SCORE_WEIGHT_SETS, continuous_outputs, dwell_output, left_out_terms, score_weights_of
from weights.commands.console import (
    Ids,
    Out,
    Replace,
    Seed,
    app,
    out_option,
    progress_bar,
    read_json,
    refusals,
    say,
    show,
)
from weights.errors import CheckpointError
from weights.format.manifest import EXAMPLE_NAME, NAMES_NAME, ActionCalibration, ContinuousOutput, Manifest
from weights.lab.commands.options import (
    REFUSED,
    TABLES,
    Cache,
    Kept,
    LogFile,
    Set,
    Until,
    WorldSet,
    assigned_values,
    check_no_architecture,
    kept_share,
    log_for,
    naming,
    read_with_bar,
    time_of,
    training_report,
    with_settings,
)
from weights.text_ids import IdKind

if TYPE_CHECKING:
    from model.ranker import Ranker
    from weights.checkpoint import Checkpoint
    from weights.lab.training.choices import Plan
    from weights.lab.training.curve import TrainedRun
    from weights.lab.training.log import Log
    from weights.lab.training.trainer import Status


@app.command()
def world(out: Out, seed: Seed = 1, set_: WorldSet = None) -> None:
    """Draw a synthetic world: a log of impressions, the true probabilities beside it, and names."""
    with refusals(*REFUSED):
        from weights.lab.world.settings import WorldSettings
        from weights.lab.world.simulate import simulate
        from weights.lab.world.store import save_world

        settings = with_settings(WorldSettings(seed=seed), set_)
        with progress_bar() as bar:
            drawn = simulate(settings, partial(bar, "sessions"))
        save_world(out, drawn)
    say(
        f"{out} holds {len(drawn.log)} impressions of {settings.all_users} users; the test period starts at {settings.test_ts}"
    )


@app.command("log")
def log_(
    log: Annotated[
        Path,
        typer.Argument(
            help="Log of impressions: Parquet, JSON lines or CSV, a file, directory or address; see docs/training.md."
        ),
    ],
    until: Until = "",
    set_: Set = None,
    ids: Ids = "uint64",
    cache: Cache = None,
) -> None:
    """Look at a log and print what `train` would decide from it, and why. Trains nothing."""
    with refusals(*REFUSED), naming(log):
        chosen = _plan_arguments(until, set_)
        impressions = read_with_bar(log, ids, _base(chosen[2]).product_surfaces, cache)
        plan, _ = _plan(impressions, 1, chosen)
        _say_plan(plan, impressions, plan.config)


def _print_settings(is_asked_for: bool) -> None:
    if is_asked_for:
        from rich.table import Table

        from weights.lab.training.settings import settings_table

        table = Table("setting", "default", "what it may be", "meaning")
        for name, default, values, meaning in settings_table():
            table.add_row(name, str(default), values, meaning)
        show(table)
        raise typer.Exit


@app.command()
def train(
    log: LogFile,
    out: Annotated[Path, out_option("Checkpoint directory to write.")],
    name: Annotated[str, typer.Option(help="Name of the checkpoint.")] = "trained",
    until: Until = "",
    config: Annotated[
        Path | None,
        typer.Option(
            help="JSON file with fields of the architecture, such as a manifest. They replace the chosen ones; --set wins over them."
        ),
    ] = None,
    preset: Annotated[Preset | None, typer.Option(help="Another trunk for the architecture.")] = None,
    start: Annotated[
        Path | None, typer.Option(help="Checkpoint to start from, with its architecture and its weights.")
    ] = None,
    state: Annotated[Path | None, out_option("Directory that keeps the state of the run, for --resume.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run in --state.")] = False,
    seed: Seed = 1,
    seeds: Annotated[
        int,
        typer.Option(min=1, max=100, help="Train so many, with --seed and the numbers after it, and keep the best."),
    ] = 1,
    search: Annotated[
        int,
        typer.Option(
            min=1, max=100, help="Try so many settings, the chosen ones first, and keep the best on validation."
        ),
    ] = 1,
    tensorboard: Annotated[
        Path | None,
        out_option("Directory for TensorBoard's event files of the run. Needs the extra tensorboard."),
    ] = None,
    set_: Set = None,
    score_weights: Annotated[
        str,
        typer.Option(
            help="Weights of the score: favorite=1,report=-20, a JSON file, or the name of a set. "
            "Default: those of --start, else proposed from the log."
        ),
    ] = "",
    ids: Ids = "uint64",
    cache: Cache = None,
    kept: Kept = None,
    replace_existing: Replace = False,
    settings: Annotated[
        bool,
        typer.Option(
            "--settings", callback=_print_settings, is_eager=True, help="Print the table of settings and exit."
        ),
    ] = False,
) -> None:
    """Train a checkpoint from a log: look at the log, decide how to train, say why, and train with the model code that serves."""
    with refusals(*REFUSED), naming(log):
        from weights.checkpoint import save_checkpoint
        from weights.format.writer import check_target, refused_writing
        from weights.lab.runs import Task, keep_best
        from weights.lab.training.curve import CURVE_NAME, curve_lines
        from weights.lab.training.log import aligned
        from weights.lab.training.run import validation_begins

        if seeds > 1 and search > 1:
            raise CheckpointError("--seeds and --search both train several times: give one of them.")
        if resume and state is None:
            raise CheckpointError("--resume needs --state, the directory of the run to continue.")
        if out.exists() and not replace_existing:
            raise CheckpointError(f"{out} exists already; choose another place or give --replace.")
        if start and (config or preset):
            raise CheckpointError("--start comes with its own architecture: give neither --config nor --preset.")
        share = kept_share(kept)
        chosen = _plan_arguments(until, set_)
        changed = _changed(read_json(config, dict) if config else {}, chosen[2])
        if start:
            check_no_architecture(chosen[2], "--start comes with its own architecture")

        begun = _begun(start, ids) if start else None
        base = begun.manifest.config if begun else _architecture(_base(chosen[2]), changed, preset)
        impressions = read_with_bar(log, ids, base.product_surfaces, cache)
        impressions = aligned(impressions, begun.manifest.action_names) if begun else impressions
        start_until_ts = begun.manifest.trained_until_ts if begun else None
        plan, taught = _plan(impressions, seed, chosen, start_until_ts, begun.ranker if begun else None)
        architecture = begun.manifest.config if begun else _architecture(plan.config, changed, preset)
        outputs, dwell = _outputs(architecture, begun)
        of_start = begun.manifest.score_weights if begun else {}
        chosen_weights = score_weights_of(score_weights, impressions.action_names) if score_weights else of_start
        chosen_weights, left_out = _of_taught(chosen_weights, taught, score_weights)
        if score_weights or any(chosen_weights.values()):
            source = f"{'--score-weights' if score_weights else 'those of --start'}{left_out}"
            plan = plan.scored_by(chosen_weights, source)
        _say_plan(plan, impressions, architecture)
        for line in left_out_terms(score_weights, outputs):
            say(line)
        weights = _checked_score_weights(plan.score_weights, taught or impressions.action_names)
        if begun and begun.manifest.calibration:
            say(
                f"The calibration of {start} is left out, for it is not that of the new weights: `calibrate` makes another."
            )
        training = plan.record()
        is_end_known = not begun or start_until_ts is not None
        if not is_end_known:
            training["until_ts"] = None
            say(
                f"{start} does not say until when it was trained: eval needs --since, a time after which it saw nothing."
            )
        labels: dict[str, Any] = {
            "name": name, "action_names": impressions.action_names, "score_weights": weights, "ids": ids,
            "continuous": outputs, "training": training,
        }  # fmt: skip
        with refused_writing(f"Checkpoint {out}"):  # refuse now, not after training
            check_target(out, replace=replace_existing)
            Manifest(**labels, version="", config=architecture, files={}, tensors={})

        task = Task(
            impressions, architecture, plan.until_ts, weights, begun.ranker if begun else None, dwell,
            state, tensorboard, resume, _training_bar,
        )  # fmt: skip
        best = keep_best(task, plan, seeds, search, say)
        own_validation = best.own_validation.lines()
        if start_until_ts and validation_begins(impressions, plan.until_ts, best.run.settings) < start_until_ts:
            own_validation.append(f"{start} was trained on some of these requests, so its own validation is too good.")
        for line in own_validation:
            say(line)
        labels["training"] |= best.record | {"own_validation": own_validation}
        manifest = save_checkpoint(
            out,
            best.run.ranker,
            **labels,
            calibration=_calibration(best.run, impressions, plan, share) if share < 1 else {},
            extras={CURVE_NAME: curve_lines(best.run.status.curve)},
            replace=replace_existing,
        )
    say(f"{out} holds {manifest.name} {manifest.version}, digest {manifest.digest}")
    if plan.until_ts is not None:
        since = "" if is_end_known else f" --since {plan.until_ts}"
        say(f"To evaluate it: phoenix-ranker eval --checkpoint {out} --log {log} --out {out}-report{since}")


PlanArguments = tuple[int | None, bool, dict[str, Any]]
"""`--until`, whether anything is held out, and `--set`, as `weights.lab.training.choices.plan` takes them."""


def _plan_arguments(until: str, set_: list[str] | None) -> PlanArguments:
    """Read before the log is, which can take minutes. Raises CheckpointError."""
    hold_out = until != "all"
    return time_of(until) if until and hold_out else None, hold_out, assigned_values(set_)


def _base(values: Mapping[str, Any]) -> ModelConfig:
    """The architecture as far as it is known before the log is read. Raises ConfigError for values that cannot be."""
    from weights.lab.training.settings import demo_config, replaced

    return replaced(demo_config(1), values)


def _say_plan(plan: Plan, log: Log, config: ModelConfig) -> None:
    """Print the log in a line, what it holds in counts, then what is decided from it."""
    from weights.lab.training.log_facts import facts

    summary, *decided = plan.lines()
    for line in (summary, *facts(log, config.history_length), *decided):
        say(line)


def _plan(
    log: Log, seed: int, chosen: PlanArguments, start_until_ts: int | None = None, start: Ranker | None = None
) -> tuple[Plan, list[str]]:
    """The plan, whose score is for taught actions alone, and these: training teaches them, or `start` was taught them before."""
    from weights.lab.training.choices import plan
    from weights.lab.training.run import taught_actions

    decided = plan(log, seed, *chosen, start_until_ts)
    taught = taught_actions(log, decided.until_ts, decided.settings, start)
    return decided.scored_by_taught(log, taught), taught


def _of_taught(weights: Mapping[str, float], taught: Collection[str], option: str) -> tuple[dict[str, float], str]:
    """These score weights without those of actions that nothing teaches, and words for what is left out.

    Raises CheckpointError if `option`, that of --score-weights, names such an action itself.
    """
    from weights.lab.training.choices import without

    untaught = [name for name, weight in weights.items() if weight and name not in taught]
    if untaught and option and option not in SCORE_WEIGHT_SETS:
        raise CheckpointError(
            f"--score-weights weighs {', '.join(untaught)}, which no impression to learn from knows: the score would be led by "
            "numbers that nothing taught. Leave it out; `relabel` can give it a weight once it has been trained."
        )
    return {name: weight for name, weight in weights.items() if name not in untaught}, without(untaught)


def _begun(start: Path, ids: IdKind) -> Checkpoint:
    from weights.checkpoint import load_checkpoint

    begun = load_checkpoint(start)
    if begun.manifest.ids != ids:
        raise CheckpointError(f"{start} has ids that are {begun.manifest.ids}: give --ids {begun.manifest.ids}.")
    return begun


def _changed(config: Mapping[str, Any], set_values: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of `--config`, without those that `--set` gives: it is the closer word. Raises CheckpointError."""
    fields = config.get("architecture", config)
    if not isinstance(fields, dict):
        raise CheckpointError("The architecture in --config must be a JSON object.")
    decided = set_values.keys() | {name.replace("_rows", "_hashes") for name in TABLES if name in set_values}
    return {name: value for name, value in fields.items() if name not in decided}


def _architecture(chosen: ModelConfig, changed: Mapping[str, Any], preset: Preset | None) -> ModelConfig:
    """The chosen architecture with the fields of `--config`, then with the trunk of a preset."""
    values = chosen.to_dict()
    for field, value in changed.items():
        inner = values.get(field)
        values[field] = inner | value if isinstance(inner, dict) and isinstance(value, dict) else value
    architecture = ModelConfig.from_dict(values)
    return with_preset(architecture, preset) if preset else architecture


def _outputs(architecture: ModelConfig, begun: Checkpoint | None) -> tuple[Sequence[ContinuousOutput], int | None]:
    """The labels of the continuous outputs, and which of them learns the dwell."""
    count = architecture.continuous_actions
    outputs = begun.manifest.continuous if begun else continuous_outputs(count, dwell_index=0)
    return outputs, dwell_output(outputs)


def _checked_score_weights(weights: dict[str, float], actions: Sequence[str]) -> dict[str, float]:
    """These weights. Raises CheckpointError, with one of the `actions` as an example, if all are 0."""
    if not any(weights.values()):
        example = f"{actions[0]}=1"
        raise CheckpointError(
            f"The score would be 0 for every post: choose its weights, for example --score-weights {example}."
        )
    return weights


@contextmanager
def _training_bar() -> Iterator[Callable[[Status], None]]:
    """A progress bar for the time of a run, and the function that moves it."""
    with progress_bar() as bar:
        yield training_report(bar)


def _calibration(run: TrainedRun, log: Log, plan: Plan, share: float) -> dict[str, ActionCalibration]:
    """The calibration of each action for all impressions, where the log kept this share of those without any action."""
    from weights.lab.evaluate.calibration import calibrate
    from weights.lab.training.examples import Examples
    from weights.lab.training.run import validation_requests

    examples = Examples(log, run.ranker.config)
    validation = validation_requests(examples, plan.until_ts, run.settings.validation_share)
    with progress_bar() as bar:
        fits = calibrate(run.ranker, examples, validation, share, partial(bar, "calibration"))
    return {action: fit.calibration for action, fit in fits.items()}


@app.command()
def example(
    checkpoint: Annotated[Path, typer.Argument(help="The checkpoint's directory, which gets the files.")],
    log: LogFile,
    names: Annotated[
        Path | None, typer.Option(help="JSON file: users, authors and posts, each an object of id → name.")
    ] = None,
    user: Annotated[
        str | None, typer.Option(help="Whose request. Default: the one with the longest recent history.")
    ] = None,
    cache: Cache = None,
) -> None:
    """Write the example request and the names that the page of a running server shows, from the log. Then reload the page."""
    with refusals(*REFUSED), naming(log):
        from weights.checkpoint import check_ranks, load_manifest
        from weights.lab.training.page_example import write_example

        manifest = load_manifest(checkpoint)
        check_ranks(checkpoint, manifest)
        impressions = log_for(manifest, log, cache)
        request = write_example(checkpoint, manifest, impressions, read_json(names, dict) if names else {}, user)
    say(f"{checkpoint} holds {EXAMPLE_NAME}, request {request} of the log, and {NAMES_NAME}")


@app.command("train-demo")
def train_demo(
    out: Out,
    seed: Seed = 1,
    work: Annotated[
        Path | None, typer.Option(help="Keep the world and the run's state here. Default: nowhere.")
    ] = None,
    set_: Set = None,
) -> None:
    """Make the demo checkpoint: draw its world, train, evaluate, and write the report, names and example request."""
    with refusals(*REFUSED):
        from weights.lab.training.demo import make_demo
        from weights.lab.training.settings import TrainSettings

        started, cpu = time.perf_counter(), time.process_time()
        with progress_bar() as bar:
            manifest, summary = make_demo(
                out, work, with_settings(TrainSettings(seed=seed), set_), bar, training_report(bar)
            )
    seconds = f"{time.perf_counter() - started:.0f} s, {time.process_time() - cpu:.0f} CPU seconds"
    say(f"{out} holds {manifest.name} {manifest.version}, digest {manifest.digest}; {seconds}")
    say(json.dumps(summary))
