"""The commands `corpus import | build | verify | snapshot | inspect`. What needs torch is imported when they run."""

from __future__ import annotations

import time
import zipfile
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from weights.commands.console import (
    AsJson,
    Name,
    Out,
    Replace,
    Version,
    label_of,
    progress_bar,
    refusals,
    say,
    show_manifest,
)
from weights.errors import CheckpointError
from weights.text_ids import IdKind

if TYPE_CHECKING:
    from weights.corpus.importer import Posts

app = typer.Typer(
    help="Corpora, the posts that retrieval searches: make, check and describe them.", no_args_is_help=True
)

Encoder = Annotated[Path, typer.Option(help="The retrieval checkpoint.")]
Topics = Annotated[
    Path | None, typer.Option(help="Text file with the topic of each row, one per line; an empty line for none.")
]
Position = Annotated[
    str,
    typer.Option(
        help="Position of the last change in the feed that these posts include, such as 1764000000000-0 in a Redis stream."
    ),
]
Directory = Annotated[Path, typer.Argument(help="A corpus directory.")]


@app.command("import")
def import_(
    source: Annotated[Path, typer.Argument(help="The npz file of a download: ids, candidate_representations, topics.")],
    encoder: Encoder,
    out: Out,
    topics: Topics = None,
    name: Name = "",
    version: Version = "",
    feed_position: Position = "",
    replace: Replace = False,
) -> None:
    """Convert a published corpus with its vectors. Some are encoded again to check that --encoder is the model that made them."""
    labels = name or label_of(out), version, feed_position
    _make(source, encoder, out, topics, labels, by_towers=False, replace=replace)


@app.command()
def build(
    posts: Annotated[
        Path,
        typer.Argument(
            help="Posts with post_ids, author_ids, perhaps created_at and topics: npz, or Parquet, JSON lines (.jsonl) or CSV, a file, "
            "directory or address. Not npz if ids are texts."
        ),
    ],
    encoder: Encoder,
    out: Out,
    topics: Topics = None,
    name: Name = "",
    version: Version = "",
    feed_position: Position = "",
    replace: Replace = False,
) -> None:
    """Make a corpus from ids: the candidate tower encodes every post."""
    labels = name or label_of(out), version, feed_position
    _make(posts, encoder, out, topics, labels, by_towers=True, replace=replace)


def _make(
    source: Path,
    encoder: Path,
    out: Path,
    topics: Path | None,
    labels: tuple[str, str, str],
    *,
    by_towers: bool,
    replace: bool,
) -> None:
    """`labels`: name, version and the position in the feed."""
    started = time.perf_counter()
    with refusals(ValueError, OSError), progress_bar(in_bytes=True) as bar:  # TableError is a ValueError
        from weights.checkpoint import load_encoder
        from weights.corpus.importer import make_corpus
        from weights.corpus.store import CorpusLabels

        towers = load_encoder(encoder)
        with _opened(source, towers.manifest.ids, topics) as posts:
            for note in posts.notes:
                say(note)
            if not by_towers and not posts.has_vectors:
                raise CheckpointError(f"{source} holds no candidate_representations; `corpus build` encodes the ids.")
            manifest = make_corpus(
                posts,
                towers,
                out,
                CorpusLabels(*labels),
                by_towers=by_towers,
                replace=replace,
                progress=partial(bar, "Writing"),
            )
    say(
        f"{out} holds {manifest.name} {manifest.version}, digest {manifest.digest}: {manifest.posts} posts of width "
        f"{manifest.width} by {manifest.encoder_name}, {len(manifest.topics)} topics; {time.perf_counter() - started:.1f} s"
    )


def _opened(source: Path, ids: IdKind, topics: Path | None) -> Posts:
    """Open posts from an npz file or from tables; tables need the `train` extra."""
    if zipfile.is_zipfile(source) or source.suffix == ".npz":
        from weights.corpus.importer import PostsFile

        return PostsFile(source, topics)
    from weights.corpus.table import PostsTable

    return PostsTable(source, ids, topics)


@app.command()
def verify(
    directory: Directory,
    encoder: Annotated[
        Path | None, typer.Option(help="A retrieval checkpoint: encode every post again and compare.")
    ] = None,
) -> None:
    """Read every byte and check the manifest, digests, vector lengths and changes. Exits with 1 if anything is wrong."""
    started = time.perf_counter()
    with refusals(), progress_bar() as bar:
        from weights.checkpoint import load_encoder
        from weights.corpus.changes import read_changes
        from weights.corpus.importer import check_corpus, check_texts
        from weights.corpus.store import load_corpus

        towers = load_encoder(encoder) if encoder else None
        stored = load_corpus(directory, towers.manifest if towers else None)
        check_texts(stored)
        change = read_changes(directory, stored.manifest)
        if towers:
            check_corpus(stored, towers, partial(bar, "Encoding"))
    corpus, manifest = stored.corpus, stored.manifest
    say(
        f"{directory} is valid: {manifest.name} {manifest.version}, digest {manifest.digest}, {len(corpus)} posts, of which "
        f"{int(corpus.hidden.sum())} are hidden ({corpus.duplicates} duplicates); since then {len(change.posts)} were added or replaced "
        f"and {len(change.delete)} deleted; {time.perf_counter() - started:.2f} s"
    )


@app.command()
def snapshot(
    directory: Directory,
    out: Annotated[Path, typer.Option(help="Directory to write; it must not exist yet.")],
) -> None:
    """Write a corpus with its changes as a new one, for a new replica to start from. A service may change the corpus meanwhile."""
    with refusals():
        from weights.corpus.snapshot import write_snapshot

        manifest = write_snapshot(directory, out)
    mark = manifest.first_mark
    position = f"; it continues after {mark.position} in its feed" if mark.position else ""
    say(
        f"{out} holds {manifest.name} {manifest.version}, {manifest.posts} posts, after {mark.sequence} changes{position}"
    )


@app.command()
def inspect(directory: Directory, as_json: AsJson = False) -> None:
    """Show the manifest of a corpus, and its changes since. `verify` also reads the vectors."""
    with refusals():
        from weights.corpus.changes import read_changes
        from weights.corpus.store import load_corpus_manifest

        manifest = load_corpus_manifest(directory)
        change = read_changes(directory, manifest)
    rows = {key: str(getattr(manifest, key)) for key in ("digest", "ids", "encoder_name", "encoder", "posts", "width")}
    rows |= {
        "topics": ", ".join(manifest.topics),
        "changes": str(change.mark.sequence),
        "feed position": change.mark.position,
    }
    show_manifest(manifest, rows, as_json=as_json)
