"""Loads a retrieval checkpoint with its corpus, and puts changes of the corpus on the disk."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from app.interface import CorpusState, ServedCorpus
from app.queue.loading import engine_options, freed_on_error, log_refusals
from app.settings import Settings
from model.create import find_device
from model.retrieval.engine import Added, RetrievalEngine, RetrievalOptions
from model.retrieval.inputs import Change, NewPosts, PostChange
from weights.checkpoint import Encoder, load_encoder
from weights.corpus.changes import ChangeLog, load_changed, mark_after, no_posts
from weights.corpus.importer import encode
from weights.corpus.store import StoredCorpus
from weights.errors import NotStored

USER_VECTOR_BYTES = 16 * 2**20  # of the cache of user vectors


@dataclass(frozen=True, slots=True, eq=False)
class LoadedCorpus:
    """A retrieval checkpoint and a corpus with their warm engine, which only one thread uses, and the corpus's changes on the disk."""

    engine: RetrievalEngine
    served: ServedCorpus
    encoder: Encoder
    stored: StoredCorpus
    changes: ChangeLog

    def state(self, deleted: int = 0) -> CorpusState:
        """Return the present state of the corpus. `deleted` is how many posts the last change deleted by name."""
        engine = self.engine
        return CorpusState(self.served.corpus, engine.posts, engine.topics, engine.changes, deleted, engine.mark)

    def changed_file(self) -> str:
        """A sentence if a file that is served from was written to since it was read, else empty."""
        return self.encoder.mapped.changed() or self.stored.mapped.changed()

    def record(self, changes: Sequence[PostChange], position: str) -> tuple[Change, Added]:
        """Encode and index the new posts and write the changes, as one that is then on the disk but not yet served.

        Returns the arguments of `RetrievalEngine.change`, to be called next. Runs in any thread, one call at a time. `position` is that of
        the last change in its feed; if empty, the changes come from elsewhere, and the corpus stays where it was in a feed. Raises
        CheckpointError or EngineError; nothing has changed then.
        """
        has_texts = self.served.corpus.ids == "text"
        if any(bool(one.delete_texts or one.upsert.texts) != has_texts for one in changes):
            raise NotStored("The corpus was replaced meanwhile by one with another kind of ids. Nothing was changed.")
        mark = self.changes.mark
        for one in changes:
            mark = mark_after(mark, one)
        merged = changes[0] if len(changes) == 1 else PostChange.merged(changes)
        change = Change(
            merged.delete, self._encoded(merged), mark._replace(position=position or mark.position), merged.delete_texts
        )
        added = self.engine.prepare(change)
        if self.changed_file():
            raise NotStored(
                "A file of the retrieval checkpoint or of the corpus was written to since it was read; read both again."
            )
        self.changes.record([change])
        return change, added

    def _encoded(self, change: PostChange) -> NewPosts:
        rows = change.upsert
        if not len(rows.post_ids):
            return no_posts(self.served.corpus.width)
        vectors = encode(self.encoder, rows.post_ids, rows.author_ids, rows.codes).numpy()
        columns = rows.post_ids, rows.author_ids, rows.created_at, rows.topics
        return NewPosts(*columns, vectors, rows.texts, rows.codes)


CorpusLoader = Callable[[Path, Path, LoadedCorpus | None], LoadedCorpus]
"""Loads a retrieval checkpoint and a corpus, in an engine thread; the third argument is what serves. Raises CheckpointError or
EngineError, with a sentence for people."""


def corpus_loader(settings: Settings) -> CorpusLoader:
    """Return a loader of what the settings ask for. Only a process that has an admin port or a feed may change a corpus: it must have the
    directory to itself."""
    options = engine_options(settings)
    may_change = settings.admin.port is not None or settings.retrieval.feed is not None

    def load(checkpoint: Path, corpus: Path, before: LoadedCorpus | None) -> LoadedCorpus:
        encoder = load_encoder(checkpoint)
        held = None if before is None else before.changes
        stored, changes, stored_change = load_changed(corpus, encoder.manifest, may_change=may_change, before=held)
        try:
            search = RetrievalOptions(
                backend="torch" if options.backend == "dense" else options.backend,
                cache_bytes=USER_VECTOR_BYTES,
                threads=options.threads,
                vectors=options.vectors,
                device=find_device(settings.device).type,
            )
            engine = RetrievalEngine(encoder.towers, stored.corpus, search)
            with freed_on_error(engine):
                engine.warm_up()
                engine.mark = stored.manifest.first_mark
                engine.change(stored_change)
        except BaseException:
            changes.close()
            raise
        log_refusals(engine.notes)
        hidden, duplicates = int(stored.corpus.hidden.sum()), stored.corpus.duplicates
        served = ServedCorpus(encoder.manifest, stored.manifest, hidden, duplicates, engine.notes)
        return LoadedCorpus(engine, served, encoder, stored, changes)

    return load
