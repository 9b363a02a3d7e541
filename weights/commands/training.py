"""The commands that draw a world, sort a log, train, evaluate and compare. Their libraries are imported when they run."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from model.config import ModelConfig
from model.presets import PRESETS, with_preset
from weights.actions import DWELL_TIME, continuous_outputs, dwell_output, score_weights_of
from weights.checkpoint import load_checkpoint, load_encoder, save_checkpoint
from weights.commands.console import (
    Ids,
    Out,
    Replace,
    ScoreWeights,
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
from weights.format.manifest import ContinuousOutput, Manifest
from weights.format.writer import check_target, refused_writing
from weights.text_ids import IdKind

if TYPE_CHECKING:
    from weights.checkpoint import Checkpoint
    from weights.training.log import Log
    from weights.training.trainer import Status

T = TypeVar("T")

REFUSED = (ValueError, OSError)  # LogError, StateError and ConfigError are ValueErrors

Set = Annotated[
    list[str] | None,
    typer.Option("--set", help="NAME=VALUE of a setting; can be given more than once. See docs/training.md."),
]


@app.command()
def world(out: Out, seed: Seed = 1, set_: Set = None) -> None:
    """Draw a synthetic world: a log of impressions, the true probabilities beside it, and names."""
    with refusals(*REFUSED):
        from weights.world.settings import WorldSettings
        from weights.world.simulate import simulate
        from weights.world.store import save_world

        settings = with_settings(WorldSettings(seed=seed), set_)
        with progress_bar() as bar:
            drawn = simulate(settings, lambda done, total: bar("sessions", done, total))
        save_world(out, drawn)
    say(
        f"{out} holds {len(drawn.log)} impressions of {settings.all_users} users; the test period starts at {settings.test_ts}"
    )


@app.command("sort-log")
def sort_log(
    log: Annotated[Path, typer.Option(help="A Parquet log, or a directory of such.")],
    out: Annotated[Path, out_option("Directory to write, for `train --log`.")],
    ids: Ids = "uint64",
) -> None:
    """Sort a log that does not fit into memory. Training then reads it from disk, one request at a time."""
    with refusals(*REFUSED):
        from weights.training.sorted_log import sort_log as sort

        with progress_bar() as bar:
            rows = sort(log, out, bar, ids)
    say(f"{out} holds {rows} impressions")


@app.command()
def train(
    log: Annotated[
        Path, typer.Option(help="Parquet log of impressions, see docs/training.md; or what sort-log wrote.")
    ],
    out: Annotated[Path, out_option("Checkpoint directory to write.")],
    name: Annotated[str, typer.Option(help="Name of the checkpoint.")] = "trained",
    until: Annotated[int | None, typer.Option(help="Unix seconds: train on earlier requests only.")] = None,
    config: Annotated[
        Path | None, typer.Option(help="JSON file with an architecture; the demo's where not given.")
    ] = None,
    preset: Annotated[str, typer.Option(help=f"Another trunk for the architecture: {', '.join(PRESETS)}.")] = "",
    start: Annotated[
        Path | None,
        typer.Option(help="Checkpoint whose architecture and weights to begin with, such as a grafted one."),
    ] = None,
    state: Annotated[Path | None, typer.Option(help="Directory that keeps the state of the run, for --resume.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run in --state.")] = False,
    seed: Seed = 1,
    set_: Set = None,
    score_weights: ScoreWeights = "default",
    ids: Ids = "uint64",
    replace_existing: Replace = False,
) -> None:
    """Train a checkpoint from a log, with the same model code that serves it. Runs on several processes under torchrun."""
    with refusals(*REFUSED):
        from weights.training.processes import joined
        from weights.training.run import train as run
        from weights.training.settings import TrainSettings

        if resume and state is None:
            raise CheckpointError("--resume needs --state, the directory of the run to continue.")
        if out.exists() and not replace_existing:
            raise CheckpointError(f"{out} exists already; choose another place or give --replace.")
        settings = with_settings(TrainSettings(seed=seed), set_)
        impressions, architecture, begun = _what_to_train(log, ids, config, preset, start)
        weights = score_weights_of(score_weights, impressions.action_names)
        outputs, dwell = _outputs(architecture, begun)
        labels: dict[str, Any] = {
            "name": name, "action_names": impressions.action_names, "score_weights": weights, "ids": ids,
            "continuous": outputs,
        }  # fmt: skip
        with refused_writing(f"Checkpoint {out}"):  # refuse now, not after training
            check_target(out, replace=replace_existing)
            Manifest(**labels, version="", config=architecture, files={}, tensors={})
        with joined(settings.device) as processes, progress_bar() as bar:
            ranker = run(
                impressions, architecture, settings, until_ts=until, start=begun.ranker if begun else None, dwell_output=dwell,
                state=state, resume=resume, report=training_report(bar, processes.rank), processes=processes,
            )  # fmt: skip
            if processes.rank:
                return  # the first process writes
        manifest = save_checkpoint(out, ranker, **labels, replace=replace_existing)
    say(f"{out} holds {manifest.name} {manifest.version}, digest {manifest.digest}")


def _what_to_train(
    log: Path, ids: IdKind, config: Path | None, preset: str, start: Path | None
) -> tuple[Log, ModelConfig, Checkpoint | None]:
    """The log, the architecture, and the checkpoint to begin with if `start` is given."""
    from weights.training.log import aligned, read_log
    from weights.training.settings import demo_config
    from weights.training.sorted_log import FACTS_NAME, open_sorted

    if start and (config or preset):
        raise CheckpointError("--start brings its architecture along: give neither --config nor --preset.")
    begun = load_checkpoint(start) if start else None
    if begun and begun.manifest.ids != ids:
        raise CheckpointError(f"{start} has ids that are {begun.manifest.ids}: give --ids {begun.manifest.ids}.")
    impressions = open_sorted(log, ids) if (log / FACTS_NAME).exists() else read_log(log, ids)
    if begun:
        return aligned(impressions, begun.manifest.action_names), begun.manifest.config, begun
    actions = len(impressions.action_names)
    architecture = ModelConfig.from_dict(read_json(config, dict)) if config else demo_config(actions)
    return impressions, with_preset(architecture, preset) if preset else architecture, None


def _outputs(architecture: ModelConfig, begun: Checkpoint | None) -> tuple[Sequence[ContinuousOutput], int]:
    """The labels of the continuous outputs, and which of them learns the dwell: the one that did in `begun`, else the first."""
    labels = begun.manifest.continuous if begun else ()
    dwell = dwell_output(labels)
    if dwell is None:
        return continuous_outputs(architecture.continuous_actions, dwell_index=0), 0
    return [*labels[:dwell], DWELL_TIME, *labels[dwell + 1 :]], dwell


@app.command("eval")
def eval_(
    checkpoint: Annotated[Path, typer.Option(help="Checkpoint directory.")],
    out: Annotated[Path, out_option("Directory for report.md, figures.json and the plots.")],
    world_directory: Annotated[
        Path | None, typer.Option("--world", help="A world: its log, truth and test period.")
    ] = None,
    log: Annotated[Path | None, typer.Option(help="Instead of --world: a log of your own, with --since.")] = None,
    since: Annotated[int | None, typer.Option(help="Unix seconds: the test period starts here.")] = None,
    ablation_requests: Annotated[int, typer.Option(help="Requests that each ablation is measured on.")] = 3000,
) -> None:
    """Evaluate a checkpoint on a test period: figures per action, baselines, the optimum of a world, ablations and plots."""
    with refusals(*REFUSED):
        if (world_directory is None) == (log is None) or (log is not None and since is None):
            raise CheckpointError("Give either --world, or --log with --since.")
        from weights.evaluate.evaluation import evaluate
        from weights.evaluate.report import figures, write_report
        from weights.training.log import aligned, read_log
        from weights.world.store import LOG_NAME, load_facts

        loaded = load_checkpoint(checkpoint)
        impressions = aligned(
            read_log(world_directory / LOG_NAME if world_directory else Path(str(log)), loaded.manifest.ids),
            loaded.manifest.action_names,
        )
        facts = load_facts(world_directory, impressions.action_names) if world_directory else None
        test_ts = facts.test_ts if facts else int(since or 0)
        with progress_bar() as bar:
            evaluation = evaluate(
                loaded.ranker, impressions, test_ts, loaded.manifest.score_weights, facts,
                dwell_output=dwell_output(loaded.manifest.continuous), ablation_requests=ablation_requests, progress=bar,
            )  # fmt: skip
        source = f"--world {world_directory}" if world_directory else f"--log {log} --since {since}"
        command = f"python -m weights eval --checkpoint {checkpoint} {source} --out {out}"
        write_report(evaluation, out, f"Evaluation of {loaded.manifest.name} {loaded.manifest.version}", command)
    say(json.dumps(figures(evaluation)))


@app.command("eval-retrieval")
def eval_retrieval(
    checkpoint: Annotated[Path, typer.Option(help="The ranker that was trained on the world.")],
    towers: Annotated[Path, typer.Option(help="The retrieval checkpoint trained on the same world.")],
    seed: Annotated[int, typer.Option(min=0, help="Seed of the world, as given to `train-demo`.")] = 1,
) -> None:
    """Draw the demo's world again and print how many of the truly best posts retrieval finds for users it was not trained on."""
    with refusals(*REFUSED):
        from weights.training.demo import CORPUS_DAYS
        from weights.evaluate.retrieval import as_table, evaluate_retrieval, newest_posts
        from weights.world.settings import WorldSettings
        from weights.world.simulate import simulate

        ranker, encoder = load_checkpoint(checkpoint), load_encoder(towers)
        with progress_bar() as bar:
            world = simulate(WorldSettings(seed=seed), partial(bar, "sessions"))
        posts = newest_posts(world, CORPUS_DAYS)
        found = evaluate_retrieval(world, encoder.towers, ranker.ranker, posts, ranker.manifest.score_weights)
    show(as_table(found), 120)
    say(json.dumps(found))


@app.command()
def compare(
    first: Annotated[Path, typer.Argument(help="A checkpoint directory: for example the one that serves now.")],
    second: Annotated[Path, typer.Argument(help="Another one: what might serve next.")],
    log: Annotated[Path, typer.Option(help="A log of impressions.")],
    out: Annotated[Path, out_option("Directory for index.html and figures.json.")],
    since: Annotated[int, typer.Option(help="Unix seconds: the requests from then on.")] = 0,
    requests: Annotated[int, typer.Option(min=1, help="Most requests, drawn by --seed.")] = 2000,
    seed: Seed = 1,
    explorer: Annotated[str, typer.Option(help="URL of a server's page, for links.")] = "http://127.0.0.1:8000/explore",
) -> None:
    """Compare two checkpoints on the requests of a log: scores, order, calibration, and the requests that changed most."""
    with refusals(*REFUSED):
        from weights.evaluate.compare import compare as compared
        from weights.evaluate.compare import write_comparison
        from weights.training.log import aligned, read_log

        pair = load_checkpoint(first), load_checkpoint(second)
        if pair[0].manifest.ids != pair[1].manifest.ids:
            raise CheckpointError("The ids of one are integers and those of the other texts: no log has both.")
        impressions = read_log(log, pair[0].manifest.ids)
        logs = aligned(impressions, pair[0].manifest.action_names), aligned(impressions, pair[1].manifest.action_names)
        with progress_bar() as bar:
            found = compared(pair, logs, since, requests, seed, bar)
        figures = write_comparison(out, (pair[0].manifest, pair[1].manifest), found, explorer)
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
        from weights.training.demo import make_demo
        from weights.training.settings import TrainSettings

        started, cpu = time.perf_counter(), time.process_time()
        with progress_bar() as bar:
            manifest, summary = make_demo(
                out, work, with_settings(TrainSettings(seed=seed), set_), bar, training_report(bar)
            )
    seconds = f"{time.perf_counter() - started:.0f} s, {time.process_time() - cpu:.0f} CPU seconds"
    say(f"{out} holds {manifest.name} {manifest.version}, digest {manifest.digest}; {seconds}")
    say(json.dumps(summary))


def with_settings(settings: T, assignments: list[str] | None) -> T:
    """Settings with each `NAME=VALUE` applied, parsed as the field's type. Raises CheckpointError for an unknown name or a bad value."""
    known = {field.name for field in fields(settings)}  # type: ignore[arg-type]
    changes: dict[str, Any] = {}
    for assignment in assignments or ():
        name, _, text = assignment.partition("=")
        if name not in known:
            raise CheckpointError(f"There is no setting {name!r}; there are {', '.join(sorted(known))}.")
        kind = type(getattr(settings, name))
        try:
            changes[name] = kind(text)
        except ValueError as error:
            raise CheckpointError(f"Setting {name} must be of type {kind.__name__}, got {text!r}.") from error
    return replace(settings, **changes)  # type: ignore[type-var]


def training_report(bar: Callable[[str, int, int], None], rank: int = 0) -> Callable[[Status], None]:
    """Return the function called after every step. It moves the bar or, without a terminal, prints each evaluation. Rank 0 only."""
    terminal, began = sys.stderr.isatty(), time.perf_counter()

    def report(status: Status) -> None:
        words = f"loss {status.loss:.4f}, validation {status.validation:.5f}, best {status.best:.5f}"
        words += f", {status.impressions / (time.perf_counter() - began):.0f} impressions/s"
        if terminal:
            bar(words, status.step, status.steps)
        elif status.evaluated:
            print(f"step {status.step} of {status.steps}: {words}", file=sys.stderr, flush=True)

    return (lambda status: None) if rank else report
