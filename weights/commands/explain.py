"""The command `explain`. Its pictures need the `explain` extra, imported when it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from weights.checkpoint import load_checkpoint, load_encoder
from weights.commands.console import Directory, app, out_option, read_json, refusals, say
from weights.corpus.store import load_corpus
from weights.errors import CheckpointError


@app.command()
def explain(
    directory: Directory,
    out: Annotated[Path, out_option("Directory to write; files of an earlier run are replaced.")],
    request: Annotated[
        Path | None, typer.Option(help="A request of /rank as JSON. Default: the checkpoint's own example.json.")
    ] = None,
    candidate: Annotated[int, typer.Option(min=0, help="The candidate to look at closely, counted from 0.")] = 0,
    retrieval: Annotated[
        Path | None, typer.Option(help="A retrieval checkpoint, with --corpus: one more picture.")
    ] = None,
    corpus: Annotated[Path | None, typer.Option(help="A corpus of that checkpoint.")] = None,
) -> None:
    """Draw why a checkpoint ranks a request as it does: PNG files, one HTML page, every number as JSON."""
    with refusals(extra="explain"):
        from weights.explain.figures import figures_of
        from weights.explain.page import write
        from weights.explain.panels import Labels, draw
        from weights.explain.panels import retrieval as draw_retrieval
        from weights.explain.request import read_request
        from weights.explain.retrieval import retrieval_of

        if (retrieval is None) != (corpus is None):
            raise CheckpointError("--retrieval and --corpus belong together: give both or neither.")
        loaded = load_checkpoint(directory)
        asked = request or directory / "example.json"
        if request is None and not asked.exists():
            raise CheckpointError(f"{directory} has no example.json: give --request.")
        names = asked.with_name("names.json")
        read = read_request(read_json(asked, dict), loaded.manifest, read_json(names, dict) if names.exists() else {})
        if candidate >= len(read.candidates):
            raise CheckpointError(
                f"There are {len(read.candidates)} candidates: choose 0 to {len(read.candidates) - 1}."
            )
        figures = figures_of(loaded.ranker, read, candidate)
        labels = Labels(read.tokens, loaded.manifest.action_names)
        panels, found = draw(figures, labels), None
        if retrieval is not None and corpus is not None:
            encoder = load_encoder(retrieval)
            posts = load_corpus(corpus, encoder.manifest).corpus
            found = retrieval_of(encoder.towers, posts, loaded.ranker, read)
            panels.append(draw_retrieval(found))
        write(out, loaded.manifest, labels, figures, panels, found)
    say(f"{out} holds {len(panels)} pictures, index.html and figures.json")
