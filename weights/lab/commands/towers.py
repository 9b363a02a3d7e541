"""The commands that train and judge retrieval towers on a log. Their libraries are imported when they run."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import numpy as np
import typer

from weights.commands.console import (
    Ids,
    Replace,
    Seed,
    app,
    out_file_option,
    out_option,
    progress_bar,
    refusals,
    say,
    show,
)
from weights.errors import CheckpointError
from weights.lab.commands.options import (
    REFUSED,
    Cache,
    LogFile,
    Until,
    WorldSet,
    assigned_values,
    log_for,
    naming,
    read_with_bar,
    since_of,
    time_of,
    with_settings,
)

if TYPE_CHECKING:
    from weights.checkpoint import Encoder
    from weights.format.manifest import Manifest
    from weights.lab.training.log import Log

TowerSet = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        help="NAME=VALUE of a setting, or product_surfaces=N as for `train`; can be given more than once. The settings are printed before "
        "training.",
    ),
]


@app.command("train-towers")
def train_towers(
    log: LogFile,
    out: Annotated[Path, out_option("Retrieval checkpoint to write.")],
    name: Annotated[str, typer.Option(help="Name of the checkpoint.")] = "towers",
    until: Until = "",
    seed: Seed = 1,
    set_: TowerSet = None,
    score_weights: Annotated[
        str,
        typer.Option(
            help="Which posts were liked: those whose weighted actions are above 0. As for `train`; default: proposed from the log."
        ),
    ] = "",
    ids: Ids = "uint64",
    cache: Cache = None,
    replace_existing: Replace = False,
) -> None:
    """Train the two towers of retrieval from a log: a user's liked posts against those that others liked or passed over."""
    with refusals(*REFUSED), naming(log):
        from weights.actions import score_weights_of
        from weights.checkpoint import save_checkpoint
        from weights.format.writer import check_target, refused_writing
        from weights.lab.training.choices import plan as plan_of
        from weights.lab.training.settings import demo_config, replaced
        from weights.lab.training.towers import TowerSettings, tower_settings, towers_config
        from weights.lab.training.towers import train_towers as run

        with refused_writing(f"Checkpoint {out}"):  # refuse now, not after training
            check_target(out, replace=replace_existing)
        of_places = [one for one in set_ or () if one.partition("=")[0] == "product_surfaces"]
        set_ = [one for one in set_ or () if one not in of_places]
        architecture = assigned_values(of_places)
        with_settings(TowerSettings(seed=seed), set_)
        hold_out = until != "all"
        impressions = read_with_bar(log, ids, replaced(demo_config(1), architecture).product_surfaces, cache)
        plan = plan_of(impressions, seed, time_of(until) if until and hold_out else None, hold_out, architecture)
        if score_weights:
            weights = score_weights_of(score_weights, impressions.action_names)
            plan = plan.scored_by(weights, "--score-weights")
        _check_some_liked(plan.score_weights, impressions.action_names)
        settings = with_settings(tower_settings(impressions, plan), set_)
        for line in plan.lines():
            say(line)
        say(f"towers: {', '.join(f'{field}={value}' for field, value in asdict(settings).items())}")
        losses: list[float] = []

        def report(step: int, steps: int, loss: float) -> None:
            losses.append(loss)
            bar(f"training, loss {loss:.3f}", step, steps)

        with progress_bar() as bar:
            towers = run(
                impressions, towers_config(plan.config), settings,
                until_ts=plan.until_ts, weights=plan.score_weights, report=report,
            )  # fmt: skip
        tenth = max(1, len(losses) // 10)
        curve = [round(float(np.mean(part)), 4) for part in np.array_split(losses, -(-len(losses) // tenth))]
        record = plan.record() | {
            "settings": asdict(settings), "losses": curve, "score_weights": plan.score_weights,
        }  # fmt: skip
        manifest = save_checkpoint(
            out, towers, name=name, action_names=impressions.action_names, ids=ids, training=record,
            replace=replace_existing,
        )  # fmt: skip
    say(f"loss of each tenth of the steps: {', '.join(f'{loss:.3f}' for loss in curve)}")
    say(f"{out} holds {manifest.name} {manifest.version}, digest {manifest.digest}")
    if plan.until_ts is not None:
        say(f"To evaluate it: phoenix-ranker eval-retrieval {out} --log {log}")
    if ids == "text" and impressions.texts is None:
        say(
            "To serve it: phoenix-ranker corpus build, from a table of posts with their texts; this log has the hashes alone"
        )
        return
    of_kind = " --ids text" if ids == "text" else ""
    say(f"To serve it: phoenix-ranker posts {log}{of_kind} --out {out}-posts.parquet, then")
    say(f"phoenix-ranker corpus build {out}-posts.parquet --encoder {out} --out {out}-corpus")


@app.command()
def posts(
    log: Annotated[Path, typer.Argument(help="Log of impressions, as `train` takes it.")],
    out: Annotated[Path, out_file_option("Parquet file to write.")],
    since: Annotated[
        str, typer.Option(help="Only posts shown from then on: a day or Unix seconds. Default: all.")
    ] = "",
    ids: Ids = "uint64",
    cache: Cache = None,
) -> None:
    """Write the posts of a log as `corpus build` takes them: ids, authors and times, one row for each post."""
    with refusals(*REFUSED), naming(log):
        from weights.lab.training.log import HashesError
        from weights.lab.training.posts import write_posts
        from weights.tables import TableError

        need = "the log holds the hashes of texts, as `join` writes them: a corpus needs the texts themselves"
        try:
            impressions = read_with_bar(log, ids, cache=cache)
        except HashesError as error:
            raise TableError(need) from error
        if ids == "text" and impressions.texts is None:
            raise TableError(need)
        if since:
            is_newer = impressions.impression_ts >= time_of(since)
            if not is_newer.any():
                raise TableError(f"the log shows no posts from {since} on; it covers {impressions.span}")
            impressions = impressions.take(is_newer)
        count = write_posts(out, impressions)
    say(f"{out} holds {count:,} posts")


@app.command("eval-retrieval")
def eval_retrieval(
    towers: Annotated[Path, typer.Argument(help="The retrieval checkpoint.")],
    log: Annotated[Path | None, typer.Option(help="The log that it was trained on, or a later one.")] = None,
    since: Annotated[
        str, typer.Option(help="The test period starts here: a day or Unix seconds. Default: where training ended.")
    ] = "",
    out: Annotated[Path | None, out_file_option("JSON file for all figures. Default: none.")] = None,
    queries: Annotated[int, typer.Option(min=1, help="At most this many held-out requests, drawn with a seed.")] = 5000,
    score_weights: Annotated[
        str,
        typer.Option(
            help="Which posts were liked, as for `train-towers`. Default: as the towers were trained, else proposed from the log."
        ),
    ] = "",
    ranker: Annotated[
        Path | None, typer.Option(help="In place of --log: a ranker of the demo's world, which is drawn again.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the world, as given to `train-demo`.")] = 1,
    set_: WorldSet = None,
    cache: Cache = None,
) -> None:
    """Print how many of the posts that users came to like are among the first 10, 100 and 500, beside popularity and a factorisation."""
    with refusals(*REFUSED), naming(log):
        if (log is None) == (ranker is None):
            raise CheckpointError("Give either --log or --ranker.")
        from weights.checkpoint import load_encoder

        encoder = load_encoder(towers)
        if log is None:
            _eval_in_world(encoder, Path(str(ranker)), seed, set_)
            return
        from weights.actions import score_weights_text, weight_vector
        from weights.lab.evaluate.recall import evaluate_recall
        from weights.lab.training.examples import Examples
        from weights.lab.training.run import check_split

        manifest = encoder.manifest
        impressions = log_for(manifest, log, cache)
        until = since_of(since, manifest, impressions)
        check_split(impressions, until)
        weights, source = _score_weights(score_weights, manifest, impressions.before(until))
        _check_some_liked(weights, impressions.action_names)
        worth = impressions.actions @ weight_vector(weights, impressions.action_names)
        examples = Examples(impressions, manifest.config)
        with progress_bar() as bar:
            recalls = evaluate_recall(
                examples, int(np.searchsorted(examples.times, until)), worth, encoder.towers,
                most_queries=queries, progress=partial(bar, "queries"),
            )  # fmt: skip
        if out is not None:
            from weights.format.writer import write_whole

            figures = json.dumps(recalls.record(), indent=1) + "\n"
            write_whole(out, lambda new: new.write_text(figures))
    say(recalls.verdict())
    say(
        f"{recalls.queries:,} requests of {recalls.users:,} users with {recalls.liked:,} liked posts, among {recalls.posts:,} posts"
    )
    say(f"liked by the score weights {score_weights_text(weights)}, {source}")
    for table in recalls.tables():
        show(table, 120)


def _score_weights(option: str, manifest: Manifest, past: Log) -> tuple[Mapping[str, float], str]:
    """The score weights that say which posts were liked, and where they are from, in words. `past`: what they may be proposed from."""
    from weights.actions import score_weights_of
    from weights.lab.training.choices import propose_score_weights

    if option:
        return score_weights_of(option, manifest.action_names), "given with --score-weights"
    if isinstance(kept := manifest.training.get("score_weights"), dict):
        return kept, "with which the towers were trained"
    return propose_score_weights(past)[0], "proposed from the log"


def _check_some_liked(weights: Mapping[str, float], action_names: Sequence[str]) -> None:
    """Raises CheckpointError if no score weight is above 0."""
    from weights.actions import weight_vector

    if not (weight_vector(weights, action_names) > 0).any():
        raise CheckpointError(
            "The names of the actions do not say which posts were liked: choose with --score-weights, "
            f"for example {action_names[0]}=1."
        )


def _eval_in_world(encoder: Encoder, ranker: Path, seed: int, set_: list[str] | None) -> None:
    """The figures of the demo's towers in the world whose truth is known."""
    from weights.checkpoint import load_checkpoint
    from weights.lab.evaluate.retrieval import as_table, evaluate_retrieval, newest_posts
    from weights.lab.training.demo import CORPUS_DAYS
    from weights.lab.world.settings import WorldSettings
    from weights.lab.world.simulate import simulate

    checkpoint = load_checkpoint(ranker)
    with progress_bar() as bar:
        world = simulate(with_settings(WorldSettings(seed=seed), set_), partial(bar, "sessions"))
    newest = newest_posts(world, CORPUS_DAYS)
    figures = evaluate_retrieval(world, encoder.towers, checkpoint.ranker, newest, checkpoint.manifest.score_weights)
    show(as_table(figures), 120)
    say(json.dumps(figures))
