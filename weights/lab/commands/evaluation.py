"""The commands that judge a checkpoint on a log, and calibrate it. Their libraries are imported when they run."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from weights.actions import dwell_output, weight_vector
from weights.commands.console import Seed, app, out_option, progress_bar, refusals, say, show
from weights.errors import CheckpointError
from weights.lab.commands.options import (
    REFUSED,
    Cache,
    Kept,
    LogFile,
    kept_share,
    log_for,
    naming,
    read_with_bar,
    since_of,
    since_of_both,
)


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
    one action stays; version and digest change. A directory NAME@VERSION, as fetch makes it, is refused: calibrate a copy of it."""
    with refusals(*REFUSED), naming(log):
        import msgspec
        import numpy as np

        from weights.checkpoint import check_changeable, load_checkpoint
        from weights.format.writer import refused_writing, replace_manifest
        from weights.lab.evaluate.calibration import calibrate
        from weights.lab.training.examples import Examples
        from weights.lab.training.run import check_split

        share = kept_share(kept)
        loaded = load_checkpoint(checkpoint)
        manifest = loaded.manifest
        check_changeable(checkpoint, manifest, "calibrate")
        impressions = log_for(manifest, log, cache)
        start = since_of(since, manifest, impressions)
        if start > impressions.impression_ts[0]:
            check_split(impressions, start)
        examples = Examples(impressions, manifest.config)
        requests = np.flatnonzero(examples.times >= start)
        with progress_bar() as bar:
            fits = calibrate(
                loaded.ranker, examples, requests, share, partial(bar, "scoring"), present=manifest.calibration
            )
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

        from weights.checkpoint import load_checkpoint
        from weights.lab.evaluate.off_policy import off_policy, rankings_of

        loaded = load_checkpoint(checkpoint)
        manifest = loaded.manifest
        impressions = log_for(manifest, log, cache)
        weights = weight_vector(manifest.score_weights, manifest.action_names)
        since_ts = since_of(since, manifest, impressions)
        rankings = rankings_of(loaded.ranker, impressions, since_ts, weights, manifest.corrections)
        estimates = off_policy(rankings, temperature, places)
        unknown = (weights != 0) & ~impressions.since(since_ts).known_actions
    if unknown.any():
        names = ", ".join(np.array(manifest.action_names)[unknown])
        say(f"not counted in the reward: {names}, since the log knows of no impression whether it was taken")
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
        from weights.checkpoint import load_checkpoint
        from weights.lab.evaluate.evaluation import evaluate
        from weights.lab.evaluate.report import headline_table, write_evaluation
        from weights.lab.training.curve import PICTURE_NAME, draw_curve
        from weights.lab.world.store import LOG_NAME, load_facts

        loaded = load_checkpoint(checkpoint)
        manifest = loaded.manifest
        source = world_directory / LOG_NAME if world_directory else Path(str(log))
        impressions = log_for(manifest, source, cache)
        facts = load_facts(world_directory, impressions.action_names) if world_directory else None
        test_ts = facts.test_ts if facts else since_of(since, manifest, impressions)
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


@app.command()
def compare(
    first: Annotated[Path, typer.Argument(help="A checkpoint directory, for example the one that serves now.")],
    second: Annotated[Path, typer.Argument(help="Another one, for example the one that might serve next.")],
    log: LogFile,
    out: Annotated[Path, out_option("Directory for report.md and figures.json.")],
    since: Annotated[
        str,
        typer.Option(
            help="Only requests from then on: a day or Unix seconds. Default: where the later of their trainings ended."
        ),
    ] = "",
    requests: Annotated[int, typer.Option(min=1, help="At most this many requests, drawn with --seed.")] = 2000,
    seed: Seed = 1,
    explorer: Annotated[str, typer.Option(help="URL of a server's page, for links.")] = "http://127.0.0.1:8000/explore",
    cache: Cache = None,
) -> None:
    """Compare two checkpoints on the requests of a log: scores, order, calibration, and the requests that changed most."""
    with refusals(*REFUSED), naming(log):
        from weights.checkpoint import load_checkpoint
        from weights.lab.evaluate.compare import compare as compared
        from weights.lab.evaluate.compare import write_comparison
        from weights.lab.training.log import aligned

        pair = load_checkpoint(first), load_checkpoint(second)
        if pair[0].manifest.ids != pair[1].manifest.ids:
            raise CheckpointError("The ids of one are integers and those of the other texts: no log has both.")
        surfaces = min(loaded.manifest.config.product_surfaces for loaded in pair)
        impressions = read_with_bar(log, pair[0].manifest.ids, surfaces, cache)
        logs = aligned(impressions, pair[0].manifest.action_names), aligned(impressions, pair[1].manifest.action_names)
        since_ts = since_of_both(since, (pair[0].manifest, pair[1].manifest), impressions)
        with progress_bar() as bar:
            comparison = compared(pair, logs, since_ts, requests, seed, bar)
        figures = write_comparison(out, (pair[0].manifest, pair[1].manifest), comparison, explorer)
    say(json.dumps({name: value for name, value in figures.items() if name not in ("actions", "changed")}))
