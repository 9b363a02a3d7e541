"""`python -m weights corpus` as an operator uses it: exit codes, result lines, refusals."""

from __future__ import annotations

import json
import re
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from model.retrieval.inputs import Change, Mark
from tests import retrieval_goldens as goldens
from tests.goldens import GOLDEN
from tests.weights.call import run
from weights.checkpoint import load_encoder
from weights.corpus.changes import load_changed, mark_after, no_posts, read_changes
from weights.corpus.importer import CHECKED_ROWS, encode
from weights.corpus.store import load_corpus, load_corpus_manifest

SOURCE = GOLDEN / "retrieval-mean-pool"


@pytest.fixture
def towers(tmp_path: Path) -> Path:
    code, said = run("import", SOURCE / "retrieval", "--out", tmp_path / "towers")
    assert code == 0
    assert "two towers, a mean over the candidate's embeddings" in said
    return tmp_path / "towers"


def test_import_verify_and_inspect(towers: Path, tmp_path: Path) -> None:
    out = tmp_path / "sports corpus"
    code, said = run("corpus", "import", SOURCE / "corpus.npz", "--encoder", towers, "--out", out)
    assert code == 0
    assert "holds sports-corpus" in said
    assert "256 posts of width 48 by towers" in said
    code, said = run("corpus", "verify", out, "--encoder", towers)
    assert (code, "is valid" in said) == (0, True)
    assert json.loads(run("corpus", "inspect", out, "--json")[1])["posts"] == 256
    assert "vectors.safetensors" in run("corpus", "inspect", out)[1]
    code, said = run("corpus", "import", SOURCE / "corpus.npz", "--encoder", towers, "--out", out)
    assert (code, "or ask to replace it (--replace)" in said) == (1, True)


def test_build_needs_no_vectors_and_import_does(towers: Path, tmp_path: Path) -> None:
    arrays = goldens.arrays(SOURCE / "corpus.npz")
    ids = {name: arrays[name][arrays["post_ids"] != 0] for name in ("post_ids", "author_ids")}
    np.savez(tmp_path / "posts.npz", **ids, views=ids["post_ids"])
    code, said = run("corpus", "import", tmp_path / "posts.npz", "--encoder", towers, "--out", tmp_path / "x")
    assert (code, "`corpus build` encodes the ids" in said) == (1, True)
    assert "Array views is not read." in said
    built, _ = run("corpus", "build", tmp_path / "posts.npz", "--encoder", towers, "--out", tmp_path / "x")
    assert (built, run("corpus", "verify", tmp_path / "x", "--encoder", towers)[0]) == (0, 0)


def change(corpus: Path, *delete: int) -> Mark:
    """Delete these posts, as a service would."""
    _, kept, _ = load_changed(corpus, load_encoder(corpus.with_name("towers")).manifest)
    asked = Change(np.array(delete, np.uint64), no_posts(48), kept.mark)
    kept.record([replace(asked, mark=mark_after(kept.mark, asked)._replace(position="1764000000000-3"))])
    kept.close()
    return kept.mark


def test_what_was_changed_is_shown_and_verified(towers: Path, tmp_path: Path) -> None:
    corpus = tmp_path / "corpus"
    assert run("corpus", "import", SOURCE / "corpus.npz", "--encoder", towers, "--out", corpus)[0] == 0
    posts = load_corpus(corpus).corpus.post_ids
    change(corpus, *posts[:3].tolist(), 123_456)
    code, said = run("corpus", "verify", corpus, "--encoder", towers)
    assert (code, "since then 0 were added or replaced and 3 deleted" in said) == (0, True), said
    assert "1764000000000-3" in run("corpus", "inspect", corpus)[1]
    (file,) = corpus.glob("changes-*.sqlite")
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    for command in ("verify", "inspect"):
        code, said = run("corpus", command, corpus)
        assert (code, "is damaged" in said) == (1, True), said


def test_a_snapshot_has_the_posts_and_goes_on_behind_the_changes(towers: Path, tmp_path: Path) -> None:
    corpus, copy = tmp_path / "corpus", tmp_path / "copies" / "corpus"
    assert run("corpus", "import", SOURCE / "corpus.npz", "--encoder", towers, "--out", corpus)[0] == 0
    before = load_corpus(corpus).corpus
    gone = before.post_ids[[3, 5]]
    mark = change(corpus, *gone.tolist())
    code, said = run("corpus", "snapshot", corpus, "--out", copy)
    there = "posts, after 1 changes; it continues after 1764000000000-3 in its feed"
    assert (code, there in said) == (0, True), said
    after = load_corpus(copy).corpus
    kept = ~before.hidden & ~np.isin(before.post_ids, gone)
    for name in ("post_ids", "author_ids", "vectors"):
        assert getattr(after, name).tobytes() == getattr(before, name)[kept].tobytes()
    assert read_changes(copy, load_corpus_manifest(copy)).mark == mark
    assert load_corpus_manifest(copy).version.endswith("+1")
    assert run("corpus", "verify", copy, "--encoder", towers)[0] == 0
    code, said = run("corpus", "snapshot", corpus, "--out", copy)
    assert (code, "holds a checkpoint or a corpus already" in said, "--replace" in said) == (1, True, False), said


def test_a_snapshot_may_be_written_while_the_corpus_changes(towers: Path, tmp_path: Path) -> None:
    corpus = tmp_path / "corpus"
    assert run("corpus", "import", SOURCE / "corpus.npz", "--encoder", towers, "--out", corpus)[0] == 0
    stored, kept, _ = load_changed(corpus, load_encoder(towers).manifest)
    posts = stored.corpus.post_ids[~stored.corpus.hidden]
    assert len(posts) > 5 * 50

    def changing() -> None:
        for _ in range(50):
            asked = Change(posts[[kept.mark.sequence]], no_posts(48), kept.mark)
            kept.record([replace(asked, mark=mark_after(kept.mark, asked))])

    for number in range(5):
        thread = threading.Thread(target=changing)
        thread.start()
        code, said = run("corpus", "snapshot", corpus, "--out", tmp_path / f"copy-{number}")
        thread.join()
        assert code == 0, said
    made = [load_corpus_manifest(copy) for copy in sorted(tmp_path.glob("copy-*"))]
    assert all(manifest.posts + manifest.first_mark.sequence == len(posts) for manifest in made)
    sequences = [manifest.first_mark.sequence for manifest in made]
    assert sorted(sequences) == sequences
    assert sequences[0] < sequences[-1] <= kept.mark.sequence
    kept.close()


def test_files_that_hold_what_a_request_may_not_are_refused(towers: Path, tmp_path: Path) -> None:
    post = {"post_ids": 1, "author_ids": 2, "created_at": 1780000000000, "topics": "sport"}
    (tmp_path / "posts.jsonl").write_text(f"{json.dumps(post)}\n")
    args = (tmp_path / "posts.jsonl", "--encoder", towers, "--out", tmp_path / "corpus")
    code, said = run("corpus", "build", *args)
    assert code == 1
    assert re.search(
        r"posts\.jsonl, line 1: created_at must be Unix seconds, .*; this looks like milliseconds", said
    ), said
    assert not (tmp_path / "corpus").exists()


def test_an_import_that_no_service_loads_leaves_the_old_corpus(towers: Path, tmp_path: Path) -> None:
    """A vector outside the sample that is compared with the tower's is of the wrong length."""
    source, out = tmp_path / "posts.npz", tmp_path / "corpus"
    args = ("corpus", "import", source, "--encoder", towers, "--out", out)
    posts = np.arange(1, CHECKED_ROWS + 3, dtype=np.uint64)
    authors = posts % 50 + 1
    vectors = encode(load_encoder(towers), posts, authors).numpy()
    np.savez(source, post_ids=posts, author_ids=authors, candidate_representations=vectors)
    assert run(*args)[0] == 0
    digest = load_corpus_manifest(out).digest
    sampled = np.linspace(0, len(posts) - 1, CHECKED_ROWS).astype(int)
    row = np.setdiff1d(np.arange(len(posts)), sampled)[0]
    vectors[row] *= 3
    np.savez(source, post_ids=posts, author_ids=authors, candidate_representations=vectors)
    code, said = run(*args, "--replace")
    sentence = f"Corpus {out} is not written: vectors.safetensors holds a vector of length 3 in row {row}, not 1.\n"
    assert (code, said.endswith(sentence)) == (1, True), said
    assert (load_corpus_manifest(out).digest, run("corpus", "verify", out)[0]) == (digest, 0)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["corpus", "posts.npz", "towers"]


def test_a_relabelled_encoder_keeps_its_corpora(towers: Path, tmp_path: Path) -> None:
    out = tmp_path / "corpus"
    assert run("corpus", "import", SOURCE / "corpus.npz", "--encoder", towers, "--out", out)[0] == 0
    assert run("relabel", towers, "--name", "renamed", "--version", "2")[0] == 0
    assert run("corpus", "verify", out, "--encoder", towers)[0] == 0
    load_corpus(out, load_encoder(towers).manifest)  # as a service loads it
