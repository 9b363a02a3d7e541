"""The commands that look at a log, train, evaluate, compare and draw worlds. Their libraries are imported when they run."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, fields, replace
from datetime import UTC, datetime
from difflib import get_close_matches
from functools import partial
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from model.config import ModelConfig
from model.presets import Preset, with_preset
from weights.actions import continuous_outputs, dwell_output, score_weights_of
from weights.checkpoint import load_checkpoint, save_checkpoint
from weights.commands.console import (
    Ids,
    Out,
    Replace,
    Seed,
    Update,
    app,
    out_option,
    progress_bar,
    read_json,
    refusals,
    say,
    show,
    writable,
)
from weights.errors import CheckpointError
from weights.format.manifest import ContinuousOutput, Manifest
from weights.format.writer import check_target, refused_writing
from weights.text_ids import IdKind
from weights.values import time_problem

if TYPE_CHECKING:
    from weights.checkpoint import Checkpoint
    from weights.lab.evaluate.evaluation import OwnValidation
    from weights.lab.training.choices import Plan
    from weights.lab.training.curve import TrainedRun
    from weights.lab.training.log import Log
    from weights.lab.training.settings import TrainSettings
    from weights.lab.training.trainer import Status

T = TypeVar("T")

REFUSED = (ValueError, OSError)  # LogError, StateError and ConfigError are ValueErrors
TABLES = ("user_rows", "post_rows", "author_rows")
SECOND = "second-run"
"""The directory of a second run, in `--state` and `--tensorboard`."""
PLAIN = {"int": int, "float": float, "bool": bool}

Set = Annotated[
    list[str] | None,
    typer.Option("--set", help="NAME=VALUE of a setting; can be given more than once. `train --settings` lists them."),
]
WorldSet = Annotated[
    list[str] | None,
    typer.Option("--set", help="NAME=VALUE of a setting of the world; can be given more than once."),
]
LogFile = Annotated[
    Path,
    typer.Option(
        "--log",
        help="Log of impressions: Parquet, JSON lines or CSV, a file, directory or address; see docs/training.md.",
    ),
]
Cache = Annotated[
    Path | None,
    typer.Option(
        help="Directory that keeps the log, sorted, for the next time. Default: memory for at most five million impressions, "
        "else phoenix-ranking-server/logs in ~/.cache.",
        callback=writable,
    ),
]
Kept = Annotated[
    float | None,
    typer.Option(
        help="The share of the impressions without any action that was kept in the log, such as 0.2. Probabilities are then calibrated for "
        "all impressions."
    ),
]
Until = Annotated[
    str,
    typer.Option(
        help="Train only on requests before this: a day (1998-03-05), Unix seconds, or all. Default: hold out the newest fifth."
    ),
]


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
        impressions = _read(log, ids, _base(chosen[2]).product_surfaces, cache)
        plan = _plan(impressions, 1, chosen)
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
            help="Weights of the score: favorite=1,report=-20, a JSON file, or the name of a set. Default: proposed from the log."
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
        from weights.lab.evaluate.calibration import calibrate
        from weights.lab.evaluate.evaluation import on_own_validation
        from weights.lab.second_run import kept_run
        from weights.lab.training.choices import COUNTED_IMPRESSIONS
        from weights.lab.training.curve import CURVE_NAME, Followed, TrainedRun, curve_lines
        from weights.lab.training.examples import Examples
        from weights.lab.training.log import aligned
        from weights.lab.training.run import train as run
        from weights.lab.training.run import validation_requests
        from weights.lab.training.search import difference
        from weights.lab.training.state import STATE_NAME

        if seeds > 1 and search > 1:
            raise CheckpointError("--seeds and --search both train several times: give one of them.")
        if resume and state is None:
            raise CheckpointError("--resume needs --state, the directory of the run to continue.")
        if out.exists() and not replace_existing:
            raise CheckpointError(f"{out} exists already; choose another place or give --replace.")
        if start and (config or preset):
            raise CheckpointError("--start comes with its own architecture: give neither --config nor --preset.")
        chosen = _plan_arguments(until, set_)
        changed = _changed(read_json(config, dict) if config else {}, chosen[2])
        if start and (shape := chosen[2].keys() & {*_names(ModelConfig), *TABLES}):
            raise CheckpointError(
                f"--start comes with its own architecture: leave {', '.join(sorted(shape))} out of --set."
            )
        begun = _begun(start, ids) if start else None
        base = begun.manifest.config if begun else _architecture(_base(chosen[2]), changed, preset)
        impressions = _read(log, ids, base.product_surfaces, cache)
        impressions = aligned(impressions, begun.manifest.action_names) if begun else impressions
        plan = _plan(impressions, seed, chosen)
        architecture = begun.manifest.config if begun else _architecture(plan.config, changed, preset)
        outputs, dwell = _outputs(architecture, begun)
        _say_plan(plan, impressions, architecture)
        weights = score_weights_of(score_weights, impressions.action_names) if score_weights else plan.score_weights
        if not any(weights.values()):
            example = f"{impressions.action_names[0]}=1"
            raise CheckpointError(
                f"The score would be 0 for every post: choose its weights, for example --score-weights {example}."
            )
        labels: dict[str, Any] = {
            "name": name, "action_names": impressions.action_names, "score_weights": weights, "ids": ids,
            "continuous": outputs, "training": plan.record(),
        }  # fmt: skip
        with refused_writing(f"Checkpoint {out}"):  # refuse now, not after training
            check_target(out, replace=replace_existing)
            Manifest(**labels, version="", config=architecture, files={}, tensors={})
        share = _kept_share(kept)
        runs = list[TrainedRun]()
        candidates = _settings_of_runs(plan, seeds, search)

        def train_one(settings_of_run: TrainSettings, place: str, *, goes_on: bool) -> TrainedRun:
            """`place`: the run's directory in `--state` and `--tensorboard`, empty where the run has them for itself."""
            directories = [parent / place if parent and place else parent for parent in (state, tensorboard)]
            with progress_bar() as bar, closing(Followed(training_report(bar), *directories)) as followed:
                ranker = run(
                    impressions, architecture, settings_of_run, until_ts=plan.until_ts, start=begun.ranker if begun else None,
                    dwell_output=dwell, state=directories[0], resume=goes_on, report=followed,
                )  # fmt: skip
            return TrainedRun(ranker, settings_of_run, followed.status)

        for place, settings_of_run in candidates.items():
            runs.append(train_one(settings_of_run, place if len(candidates) > 1 else "", goes_on=resume))
            changed_settings = difference(settings_of_run, plan.settings) if search > 1 else {}
            with_these = ", ".join(f"{name}={value:.3g}" for name, value in changed_settings.items())
            say(f"With {with_these}. {runs[-1].line()}" if with_these else runs[-1].line())
        best = min(runs, key=lambda trained: trained.status.best)
        if len(candidates) > 1:
            say(_kept_of_several(runs, best, is_search=search > 1))
        if search > 1:
            labels["training"] |= {
                "search": [difference(trained.settings, plan.settings) | trained.record() for trained in runs]
            }

        def judge(trained: TrainedRun) -> OwnValidation:
            return on_own_validation(trained.ranker, impressions, trained.settings, plan.until_ts, weights)

        def train_again(settings_of_run: TrainSettings) -> TrainedRun:
            say(
                f"Counts are ahead on its own validation: once more, with {settings_of_run.counts_share:.0%} of each label from counts."
            )
            has_begun = resume and state is not None and (state / SECOND / STATE_NAME).exists()
            runs.append(train_one(settings_of_run, SECOND, goes_on=has_begun))
            say(runs[-1].line())
            return runs[-1]

        is_decided = "counts_share" in chosen[2] or search > 1
        if begun or is_decided or len(impressions) > COUNTED_IMPRESSIONS:
            judged = judge(best)
        else:
            first, (best, judged) = best, kept_run(best, judge, train_again)
            if runs[-1].settings.counts_share != first.settings.counts_share:
                labels["training"] |= {"first_run": first.record(), "second_run": runs[-1].record()}
                say(f"The {'first' if best is first else 'second'} run has the better validation loss and is kept.")
        for line in judged.lines():
            say(line)
        labels["training"] |= {
            "settings": asdict(best.settings), "run": best.record(), "own_validation": judged.lines(),
        }  # fmt: skip
        fits = {}
        if share < 1:
            examples = Examples(impressions, architecture)
            validation = validation_requests(examples, plan.until_ts, best.settings.validation_share)
            with progress_bar() as bar:
                fits = calibrate(best.ranker, examples, validation, share, partial(bar, "calibration"))
        manifest = save_checkpoint(
            out,
            best.ranker,
            **labels,
            calibration={action: fit.calibration for action, fit in fits.items()},
            extras={CURVE_NAME: curve_lines(best.status.curve)},
            replace=replace_existing,
        )
    say(f"{out} holds {manifest.name} {manifest.version}, digest {manifest.digest}")
    if plan.until_ts is not None:
        say(f"To evaluate it: phoenix-ranker eval --checkpoint {out} --log {log} --out {out}-report")


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


def _read(log: Path, ids: IdKind, surfaces: int, cache: Path | None = None) -> Log:
    """Read a log, showing how far that is. Raises LogError."""
    from weights.lab.training.log import read_log

    with progress_bar() as bar:
        return read_log(log, ids, surfaces, cache, bar)


@contextmanager
def naming(log: Path | str | None) -> Iterator[None]:
    """Put the name of the log that a command reads in front of a LogError that does not hold it."""
    from weights.tables import LogError

    try:
        yield
    except LogError as error:
        if log is None or str(log) in str(error):
            raise
        raise LogError(f"{log}: {error}") from error


def _say_plan(plan: Plan, log: Log, config: ModelConfig) -> None:
    """Print the log in a line, what it holds in counts, then what is decided from it."""
    from weights.lab.training.facts import facts

    summary, *decided = plan.lines()
    for line in (summary, *facts(log, config.history_length), *decided):
        say(line)


def _plan(log: Log, seed: int, chosen: PlanArguments) -> Plan:
    from weights.lab.training.choices import plan

    return plan(log, seed, *chosen)


def time_of(text: str) -> int:
    """A time given as Unix seconds or as a day in UTC. Raises CheckpointError."""
    if text.isdecimal() and len(text) > 8:
        if problem := time_problem(seconds := int(text)):
            raise CheckpointError(f"The time {text[:32]} {problem}.")
        return seconds
    try:
        return int(datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp())
    except ValueError as error:
        raise CheckpointError(f"{text!r} is neither a day such as 1998-03-05 nor Unix seconds.") from error


def _begun(start: Path, ids: IdKind) -> Checkpoint:
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


def _settings_of_runs(plan: Plan, seeds: int, search: int) -> dict[str, TrainSettings]:
    """The settings of each run of `--seeds` or `--search`, or of the only one, by the name of its directory."""
    from weights.lab.training.search import trials

    if search > 1:
        tried = trials(plan.settings, search, plan.overrides.keys())
        return {f"trial-{number}": settings for number, settings in enumerate(tried, start=1)}
    numbers = range(plan.settings.seed, plan.settings.seed + seeds)
    return {f"seed-{seed}": replace(plan.settings, seed=seed) for seed in numbers}


def _kept_of_several(runs: Sequence[TrainedRun], best: TrainedRun, *, is_search: bool) -> str:
    """Which of several runs is kept, in a sentence or two."""
    if is_search:
        return (
            f"Trial {runs.index(best) + 1} of {len(runs)} has the best validation loss and is kept. That loss is a little too good, "
            "because it was chosen; eval tells how good the ranker is."
        )
    return (
        f"Seed {best.settings.seed} has the best validation loss and is kept. An average is not: that of the weights is no model, "
        f"and that of the scores would cost {len(runs)} forward passes for each request."
    )


def _kept_share(kept: float | None) -> float:
    """Raises CheckpointError for what is no share."""
    if kept is None:
        return 1.0
    if not 0 < kept <= 1:
        raise CheckpointError(f"--kept must be a share above 0 and at most 1, got {kept:g}.")
    return kept


@app.command("calibrate")
def calibrate_(
    checkpoint: Annotated[
        Path, typer.Argument(help="The checkpoint's directory, whose manifest gets the calibration.")
    ],
    log: LogFile,
    since: Annotated[
        str,
        typer.Option(help="Only requests from here on: a day or Unix seconds. Default: where training ended."),
    ] = "",
    kept: Kept = None,
    cache: Cache = None,
) -> None:
    """Fit an offset and a slope for each action on requests that training has not seen, so that probabilities are frequencies. The order by
    one action stays; version and digest change."""
    with refusals(*REFUSED), naming(log):
        import msgspec
        import numpy as np

        from weights.format.writer import replace_manifest
        from weights.lab.evaluate.calibration import calibrate
        from weights.lab.training.examples import Examples
        from weights.lab.training.log import aligned
        from weights.lab.training.run import check_split

        share = _kept_share(kept)
        loaded = load_checkpoint(checkpoint)
        manifest = loaded.manifest
        start = _since(since, manifest)
        impressions = aligned(_read(log, manifest.ids, manifest.config.product_surfaces, cache), manifest.action_names)
        if start > impressions.impression_ts[0]:
            check_split(impressions, start)
        examples = Examples(impressions, manifest.config)
        requests = np.flatnonzero(examples.times >= start)
        with progress_bar() as bar:
            fits = calibrate(loaded.ranker, examples, requests, share, partial(bar, "scoring"))
        calibration = {action: fit.calibration for action, fit in fits.items()}
        with refused_writing(f"Checkpoint {checkpoint}"):
            manifest = msgspec.structs.replace(manifest, calibration=calibration, version="").versioned()
        replace_manifest(checkpoint, manifest)
    from rich.table import Table

    table = Table("action", "positives", "offset", "slope", "predicted ÷ observed before", "after")
    for action, fit in fits.items():
        figures = (fit.calibration.offset, fit.calibration.slope, fit.before, fit.after)
        table.add_row(action, f"{fit.positives:,}", *(f"{figure:.3f}" for figure in figures))
    show(table)
    say(f"{checkpoint} holds {manifest.name} {manifest.version}, digest {manifest.digest}")


@app.command("off-policy")
def off_policy_(
    checkpoint: Annotated[Path, typer.Option(help="The checkpoint whose order is to be judged.")],
    log: LogFile,
    temperature: Annotated[
        float,
        typer.Option(min=1e-9, max=1e9, help="Temperature with which it would explore, as in a request's `explore`."),
    ],
    places: Annotated[int, typer.Option(min=1, max=100, help="Count the rewards of this many first places.")] = 1,
    since: Annotated[
        str, typer.Option(help="Only rankings from then on: a day or Unix seconds. Default: where training ended.")
    ] = "",
    cache: Cache = None,
) -> None:
    """Estimate what a checkpoint would have earned, had it chosen the order of a log that was served with exploration."""
    with refusals(*REFUSED), naming(log):
        import numpy as np

        from weights.lab.evaluate.off_policy import off_policy, rankings_of
        from weights.lab.training.log import aligned

        loaded = load_checkpoint(checkpoint)
        manifest = loaded.manifest
        impressions = aligned(_read(log, manifest.ids, manifest.config.product_surfaces, cache), manifest.action_names)
        weights = np.array([manifest.score_weights.get(name, 0.0) for name in manifest.action_names])
        rankings = rankings_of(loaded.ranker, impressions, _since(since, manifest), weights, manifest.corrections)
        estimates = off_policy(rankings, temperature, places)
    for line in estimates.lines():
        say(line)


@app.command("eval")
def eval_(
    checkpoint: Annotated[Path, typer.Option(help="Checkpoint directory.")],
    out: Annotated[Path, out_option("Directory for report.md and figures.json.")],
    log: Annotated[Path | None, typer.Option(help="The log that it was trained on, or a later one.")] = None,
    since: Annotated[
        str, typer.Option(help="The test period starts here: a day or Unix seconds. Default: where training ended.")
    ] = "",
    world_directory: Annotated[
        Path | None, typer.Option("--world", help="Instead of --log, a world: its log, truth and test period.")
    ] = None,
    ablation_requests: Annotated[int, typer.Option(min=1, help="Requests that each ablation is measured on.")] = 2000,
    cache: Cache = None,
) -> None:
    """Evaluate a checkpoint on a period that it was not trained on, next to simple baselines that read the same history."""
    with refusals(*REFUSED), naming(log or world_directory):
        if (world_directory is None) == (log is None):
            raise CheckpointError("Give either --log or --world.")
        from weights.lab.evaluate.evaluation import evaluate
        from weights.lab.evaluate.report import headline_table, write_evaluation
        from weights.lab.training.curve import PICTURE_NAME, draw_curve
        from weights.lab.training.log import aligned
        from weights.lab.world.store import LOG_NAME, load_facts

        loaded = load_checkpoint(checkpoint)
        manifest = loaded.manifest
        source = world_directory / LOG_NAME if world_directory else Path(str(log))
        impressions = aligned(
            _read(source, manifest.ids, manifest.config.product_surfaces, cache), manifest.action_names
        )
        facts = load_facts(world_directory, impressions.action_names) if world_directory else None
        test_ts = facts.test_ts if facts else _since(since, manifest)
        with progress_bar() as bar:
            evaluation = evaluate(
                loaded.ranker, impressions, test_ts, manifest.score_weights, facts,
                dwell_output=dwell_output(manifest.continuous), corrections=manifest.corrections,
                ablation_requests=ablation_requests, progress=bar,
            )  # fmt: skip
        source_option = f"--world {world_directory}" if world_directory else f"--log {log} --since {test_ts}"
        command = f"phoenix-ranker eval --checkpoint {checkpoint} {source_option} --out {out}"
        picture = PICTURE_NAME if draw_curve(checkpoint, out) else ""
        title = f"{manifest.name} {manifest.version} on later requests"
        write_evaluation(evaluation, out, title, command, manifest.training.get("run"), picture)
    for line in (evaluation.verdict(), *evaluation.remarks()):
        say(line)
    for table in headline_table(evaluation):
        say("")
        say(table)
    say(f"{out / 'report.md'} holds the rest, {out / 'figures.json'} all figures.")


def _since(since: str, manifest: Manifest) -> int:
    if since:
        return time_of(since)
    until = manifest.training.get("until_ts")
    if type(until) is not int:
        raise CheckpointError(
            "The checkpoint does not say where its training ended: give --since, a time after which it saw nothing."
        )
    return until


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
        from weights.lab.training.example import EXAMPLE_NAME, NAMES_NAME, write_example
        from weights.lab.training.log import aligned

        manifest = load_checkpoint(checkpoint).manifest
        impressions = aligned(_read(log, manifest.ids, manifest.config.product_surfaces, cache), manifest.action_names)
        request = write_example(checkpoint, manifest, impressions, read_json(names, dict) if names else {}, user)
    say(f"{checkpoint} holds {EXAMPLE_NAME}, request {request} of the log, and {NAMES_NAME}")


@app.command()
def compare(
    first: Annotated[Path, typer.Argument(help="A checkpoint directory, for example the one that serves now.")],
    second: Annotated[Path, typer.Argument(help="Another one, for example the one that might serve next.")],
    log: LogFile,
    out: Annotated[Path, out_option("Directory for report.md and figures.json.")],
    since: Annotated[str, typer.Option(help="Only requests from then on: a day or Unix seconds.")] = "",
    requests: Annotated[int, typer.Option(min=1, help="At most this many requests, drawn with --seed.")] = 2000,
    seed: Seed = 1,
    explorer: Annotated[str, typer.Option(help="URL of a server's page, for links.")] = "http://127.0.0.1:8000/explore",
    cache: Cache = None,
) -> None:
    """Compare two checkpoints on the requests of a log: scores, order, calibration, and the requests that changed most."""
    with refusals(*REFUSED), naming(log):
        from weights.lab.evaluate.compare import compare as compared
        from weights.lab.evaluate.compare import write_comparison
        from weights.lab.training.log import aligned

        pair = load_checkpoint(first), load_checkpoint(second)
        if pair[0].manifest.ids != pair[1].manifest.ids:
            raise CheckpointError("The ids of one are integers and those of the other texts: no log has both.")
        surfaces = min(loaded.manifest.config.product_surfaces for loaded in pair)
        impressions = _read(log, pair[0].manifest.ids, surfaces, cache)
        logs = aligned(impressions, pair[0].manifest.action_names), aligned(impressions, pair[1].manifest.action_names)
        with progress_bar() as bar:
            comparison = compared(pair, logs, time_of(since) if since else 0, requests, seed, bar)
        figures = write_comparison(out, (pair[0].manifest, pair[1].manifest), comparison, explorer)
    say(json.dumps({name: value for name, value in figures.items() if name not in ("actions", "changed")}))


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


def assigned_values(assignments: list[str] | None) -> dict[str, Any]:
    """`NAME=VALUE` of settings of a run and of the architecture, parsed. Raises CheckpointError for an unknown name or a value of another
    type, ValueError for a value that a setting of a run or a number of rows may not have."""
    from weights.lab.training.settings import ROWS, TrainSettings, check, replaced

    kinds: dict[str, type] = {name: type(getattr(TrainSettings(), name)) for name in _names(TrainSettings)}
    kinds |= {
        field.name: PLAIN[str(field.type)]
        for field in fields(ModelConfig)
        if str(field.type) in PLAIN and field.name != "actions"
    }
    values = _parsed(assignments, kinds | dict.fromkeys(TABLES, int))
    replaced(TrainSettings(), values)
    for name in set(TABLES) & set(values):
        check(name, values[name], ROWS)
    return values


def with_settings(settings: T, assignments: list[str] | None) -> T:
    """Settings with each `NAME=VALUE` applied, parsed as the field's type. Raises CheckpointError for an unknown name or a bad value."""
    kinds = {name: type(getattr(settings, name)) for name in _names(type(settings))}
    return replace(settings, **_parsed(assignments, kinds))  # type: ignore[type-var]


def _names(settings: type) -> list[str]:
    return [field.name for field in fields(settings)]


def _parsed(assignments: list[str] | None, kinds: Mapping[str, type]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for assignment in assignments or ():
        name, _, text = assignment.partition("=")
        if name not in kinds:
            near = get_close_matches(name, kinds, 1)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(sorted(kinds))}."
            raise CheckpointError(f"There is no setting {name!r}; {hint}")
        try:
            values[name] = {"true": True, "false": False}[text.lower()] if kinds[name] is bool else kinds[name](text)
        except (ValueError, KeyError) as error:
            raise CheckpointError(f"Setting {name} must be of type {kinds[name].__name__}, got {text!r}.") from error
    return values


def training_report(update: Update) -> Callable[[Status], None]:
    """The function that training calls after every step: it says how far it is and what validation gave."""

    def report(status: Status) -> None:
        is_validated = isfinite(status.validation)
        words = (
            f"training, validation loss {status.validation:.4f}, best {status.best:.4f}" if is_validated else "training"
        )
        update(words, status.step, status.steps)

    return report
