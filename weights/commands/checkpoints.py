"""The commands on checkpoints: import, verify, inspect and others. Exit codes: 0 done, 1 refused, 2 usage.

What needs torch is imported when they run."""

from __future__ import annotations

import json
import sys
import time
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from model.config import ContextAttention, RetrievalConfig
from weights.actions import (
    default_score_weights,
    left_out_terms,
    released_action_names,
    score_weights_of,
    score_weights_text,
)
from weights.commands import corpus, served
from weights.commands.console import (
    AsJson,
    Directory,
    Ids,
    Name,
    Out,
    Replace,
    ScoreWeights,
    Seed,
    Version,
    app,
    label_of,
    out_option,
    progress_bar,
    read_json,
    refusals,
    say,
    show_manifest,
)
from weights.errors import CheckpointError
from weights.format.manifest import Manifest, TableDtype

app.add_typer(corpus.app, name="corpus")
app.add_typer(served.app, name="served")


@app.command("import")
def import_(
    source: Annotated[
        Path,
        typer.Argument(help="The ranker or retrieval directory of a download, with config.json and two npz files."),
    ],
    out: Annotated[Path, out_option("Checkpoint directory to write.")],
    name: Name = "",
    version: Version = "",
    tables: Annotated[
        TableDtype, typer.Option(help="How to store embeddings; bfloat16 halves their size.")
    ] = "float32",
    actions: Annotated[
        Path | None,
        typer.Option(help="JSON file with a list of action names, in output order. Default: the names of the release."),
    ] = None,
    score_weights: ScoreWeights = "default",
    ids: Ids = "uint64",
    context_attention: Annotated[
        ContextAttention | None,
        typer.Option(help="Overrides config.json. Default: what config.json says, otherwise causal."),
    ] = None,
    ignore: Annotated[
        list[str] | None, typer.Option(help="A config key or an array to ignore; can be given more than once.")
    ] = None,
    replace: Replace = False,
) -> None:
    """Convert a published checkpoint. Unpickles nothing, and refuses unknown keys and arrays."""
    started = time.perf_counter()
    with refusals():
        from weights.format.writer import write_checkpoint
        from weights.published.importer import PublishedModel, labels_for

        with (
            PublishedModel(source, ignore or (), context_attention) as model,
            progress_bar(in_bytes=True) as bar,
        ):
            config = model.config
            names = read_names(actions) if actions else released_action_names(config.actions)
            weights = score_weights_of(score_weights, names)
            labels = labels_for(config, name or label_of(out), version, names, weights, ids)
            manifest = write_checkpoint(
                out,
                config,
                model.pieces,
                labels,
                table_dtype=tables,
                replace=replace,
                progress=partial(bar, "Importing"),
            )
    if isinstance(config, RetrievalConfig):
        outputs = (
            f"two towers, {'a projection' if config.linear_projection else 'a mean'} over the candidate's embeddings"
        )
    else:
        features = [word for word, has in (("dwell", config.has_dwell), ("post age", config.has_post_age)) if has]
        outputs = f"{config.continuous_actions} continuous, {' and '.join(features) or 'neither dwell nor post age'}"
    say(
        f"{out} holds {manifest.name} {manifest.version}, digest {manifest.digest}: {config.layers} layers of width "
        f"{config.width}, {config.actions} actions, {outputs}; {time.perf_counter() - started:.1f} s"
    )
    if manifest.score_weights:
        say(
            f"Score: {score_weights_text(manifest.score_weights)} (change it with --score-weights, or later with `relabel`)"
        )
        for line in left_out_terms(score_weights, manifest.continuous):
            say(line)
    warn_of_zero_scores(manifest)


@app.command()
def verify(directory: Directory) -> None:
    """Read every byte and check the manifest, digests and tensors, and that all numbers are finite. Exits with 1 if anything is wrong."""
    started = time.perf_counter()
    with refusals(), progress_bar(in_bytes=True) as bar:
        from weights.checkpoint import check_any

        manifest = check_any(directory, partial(bar, "Verifying"))
    size = sum(entry.bytes for entry in manifest.files.values())
    say(
        f"{directory} is valid: {manifest.name} {manifest.version}, digest {manifest.digest}, {len(manifest.tensors)} tensors, "
        f"{size / 2**20:.1f} MiB in {time.perf_counter() - started:.2f} s"
    )
    warn_of_zero_scores(manifest)


@app.command()
def fetch(
    url: Annotated[str, typer.Argument(help="A checkpoint or corpus: a path, or https://, s3://, gs://, hf://.")],
    out: Annotated[Path, out_option("Directory that keeps checkpoints, each named NAME@VERSION, such as /weights.")],
    link: Annotated[str, typer.Option(help="Name of the link in --out that will point to it.")] = "current",
    digest: Annotated[str, typer.Option(help="Refuse any other digest.")] = "",
) -> None:
    """Copy a checkpoint or a corpus, check every byte, and point a link to it in one step."""
    started = time.perf_counter()
    with refusals(extra="fetch"), progress_bar(in_bytes=True) as bar:
        from weights.fetch import fetch as fetched

        path, manifest = fetched(url, out, link, digest, bar)
    say(f"{out / link} is {path.name}, digest {manifest.digest}; {time.perf_counter() - started:.2f} s")


@app.command()
def inspect(directory: Directory, as_json: AsJson = False) -> None:
    """Show the manifest of a checkpoint. `verify` also reads the weights."""
    with refusals():
        from weights.checkpoint import load_manifest

        manifest = load_manifest(directory)
    rows = {
        "digest": manifest.digest,
        "ids": manifest.ids,
        **{key: json.dumps(value) for key, value in manifest.config.to_dict().items()},
        "action names": ", ".join(manifest.action_names),
        "continuous": json.dumps(msgspec.to_builtins(manifest.continuous)),
        "score weights": json.dumps(manifest.score_weights),
        "calibration": json.dumps(msgspec.to_builtins(manifest.calibration)),
        **{f"training: {key}": json.dumps(value) for key, value in manifest.training.items()},
    }
    show_manifest(manifest, rows, as_json=as_json)
    warn_of_zero_scores(manifest)


@app.command()
def relabel(
    directory: Directory,
    name: Annotated[str, typer.Option(help="New name.")] = "",
    version: Version = "",
    actions: Annotated[
        Path | None, typer.Option(help="JSON file with a list of action names, in output order.")
    ] = None,
    score_weights: ScoreWeights = "",
) -> None:
    """Change the names or the score weights of a checkpoint in place. The model's weights stay; version and digest change. The corpora
    of a retrieval checkpoint still fit it, unless an older version built them: those name the digest. A directory NAME@VERSION, as fetch
    makes it, is refused: relabel a copy of it."""
    with refusals():
        from weights.checkpoint import check_changeable, load_manifest
        from weights.format.writer import refused_writing, replace_manifest

        changes: dict[str, Any] = {"version": version}
        if name:
            changes["name"] = name
        if actions:
            changes["action_names"] = read_names(actions)
            changes["score_weights"] = default_score_weights(changes["action_names"])
        before = load_manifest(directory)
        check_changeable(directory, before, "relabel")
        if actions and before.calibration:  # it belongs to the outputs
            renamed = dict(zip(before.action_names, changes["action_names"], strict=False))
            changes["calibration"] = {
                renamed[old]: correction for old, correction in before.calibration.items() if old in renamed
            }
        if score_weights:
            changes["score_weights"] = score_weights_of(score_weights, changes.get("action_names", before.action_names))
        with refused_writing(f"Checkpoint {directory}"):
            manifest = msgspec.structs.replace(before, **changes).versioned()
        replace_manifest(directory, manifest)
    say(f"{directory} holds {manifest.name} {manifest.version}, digest {manifest.digest}")
    for line in left_out_terms(score_weights, manifest.continuous):
        say(line)


@app.command("random")
def random_(out: Out, seed: Seed = 0, ids: Ids = "uint64", replace: Replace = False) -> None:
    """Write a small random checkpoint with an example request."""
    with refusals():
        from weights.synthetic.small_checkpoint import write_small_checkpoint

        manifest = write_small_checkpoint(out, seed, ids=ids, replace=replace)
    say(f"{out} holds {manifest.name} {manifest.version}, digest {manifest.digest}")


def warn_of_zero_scores(manifest: Manifest) -> None:
    """Say so on standard error if no action of a ranker has a weight: its ranking would be the order in which posts are sent."""
    if any(manifest.score_weights.values()) or isinstance(manifest.config, RetrievalConfig):
        return
    print(
        f"Warning: every score of {manifest.name} is 0, because none of its actions has a weight. Give some, here or with `relabel`: "
        f"--score-weights ACTION=NUMBER,… (the actions are {', '.join(manifest.action_names)}).",
        file=sys.stderr,
        flush=True,
    )


def read_names(path: Path) -> tuple[str, ...]:
    """Action names from a JSON list of strings. Raises CheckpointError."""
    names = read_json(path, list)
    if any(type(name) is not str for name in names):
        raise CheckpointError(f"{path} must hold a JSON list of strings.")
    return tuple(names)
