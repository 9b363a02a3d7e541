"""Changes one decision, or drops one piece of wiring, and runs the tests that reach it: what survives, no test looks at.

Draws a seeded sample in app/, model/ and weights/, Python and C++, and tries it in a copy of the tree. Which test runs which line is
recorded once, by coverage.py, for the files of tests that the sample needs. Records and results are kept in .cache/mutants, so that
a run that was cut short goes on. tests/equivalents.toml holds the changes that change nothing.
"""

from __future__ import annotations

import argparse
import compileall
import json
import py_compile
import random
import shutil
import subprocess
import sys
import time
import tomllib
from collections import Counter
from pathlib import Path

from decisions import DROPS, ROOT, WORD, Mutant, changed_lines, decisions, digest
from records import WHOLE, WORK, Tests, caller, concerns

GOAL = 0.95
COMPILERS = (  # for the processors that tests run on: this one, its narrower vectors, and those that are emulated
    ("g++", "-march=native"), ("g++", "-march=x86-64-v3"),
    ("g++", "-march=native", "-DRANKER_EMULATE_AMX", "-DRANKER_TEST_HOOKS", "-DRANKER_CHECKS", "-DRANKER_STAGES"),
    ("aarch64-linux-gnu-g++", "-march=armv8-a"), ("aarch64-linux-gnu-g++", "-march=armv8.2-a+bf16"),
)  # fmt: skip
MUTANT_SECONDS = 60.0  # a mutant is tried by no more tests than took so long together, those of WHOLE aside, and by no more files than:


def copy_tree() -> Path:
    """The files that git knows, in a tree of their own; modules that are not changed are compiled once."""
    tree = WORK / "tree"
    shutil.rmtree(tree, ignore_errors=True)
    (WORK / "home").mkdir(parents=True, exist_ok=True)
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True)
    for path in filter(lambda path: (ROOT / path).is_file(), listed.stdout.splitlines()):
        (tree / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / path, tree / path)
    build = tree / "model/native/build.py"
    build.write_text(build.read_text().replace('"-O3"', '"-O1"'))  # the same bits, built in half the time
    compileall.compile_dir(tree, quiet=2, invalidation_mode=py_compile.PycInvalidationMode.CHECKED_HASH)
    return tree


def compiled(folder: Path) -> list[bytes]:
    """What the compilers that there are see of a folder's C++."""
    found = [(*each, source) for each in COMPILERS if shutil.which(each[0]) for source in sorted(folder.glob("*.cpp"))]
    return [subprocess.run([*each, "-std=c++17", "-E", "-P"], capture_output=True).stdout for each in found]


def verdict(tests: Tests, tree: Path, mutant: Mutant) -> str:
    """`killed` by a test that passes without the change, `survived`, `unreached` where no test runs the line, or `elsewhere` where it is
    compiled for other processors alone."""
    path = tree / mutant.file
    raw = path.read_bytes()
    changed = raw[: mutant.start] + mutant.after.encode() + raw[mutant.start + len(mutant.before.encode()) :]
    if path.suffix == ".py":
        compile(changed, path, "exec")  # or each test would fail
    else:
        before = compiled(path.parent)
        path.write_bytes(changed)
        after = compiled(path.parent)
        path.write_bytes(raw)
        if before == after:
            return "elsewhere"
    found, left = "unreached", MUTANT_SECONDS
    for file in concerns(tree, mutant.file):
        record, chosen = tests.record(tree, file, {mutant.file, caller(mutant.file)}), []
        reaching = record.reaching(tree, mutant.file, mutant.reach or mutant.number)
        for test in sorted(record.seconds) if file in WHOLE else reaching:
            if (left > 0 or file in WHOLE) and test not in tests.unsound:
                chosen.append(test)
                left -= record.seconds[test]
        while chosen:
            found = "survived"
            path.write_bytes(changed)
            try:
                failing = tests.first_failing(tree, file, chosen)
            finally:
                path.write_bytes(raw)
            if failing is None:
                break
            if tests.are_sound(tree, file, chosen[: chosen.index(failing) + 1]):
                return "killed"
            print(f"fails without a change, too: {failing}", flush=True)
            tests.unsound.add(failing)
            chosen.remove(failing)
    return found


def draw(every: list[Mutant], count: int, seed: int) -> list[Mutant]:
    """A sample that stays the same when other decisions come and go."""
    seen = Counter[tuple[str, str, str]]()

    def lot(mutant: Mutant) -> float:
        seen[mutant.key] += 1  # of two alike in a file, one may be drawn
        return random.Random(f"{seed} {mutant.key} {seen[mutant.key]}").random()

    return sorted(every, key=lot)[:count]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sample", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--changed", metavar="COMMIT", help="only lines that are new since this commit")
    parser.add_argument("--only", default="", help="only files whose path holds this")
    parser.add_argument(
        "--seconds", type=float, default=float("inf"), help="stop after this time; the next call goes on"
    )
    parser.add_argument("--kinds", default=",".join((WORD, *DROPS)), help="some of %(default)s")
    options = parser.parse_args()
    every = decisions(ROOT, changed_lines(options.changed) if options.changed else None)
    every = [mutant for mutant in every if options.only in mutant.file and mutant.kind in options.kinds.split(",")]
    drawn = draw(every, options.sample, options.seed)
    print(f"{len(drawn)} of {len(every)} decisions, seed {options.seed}", flush=True)
    kept = tomllib.loads((ROOT / "tests/equivalents.toml").read_text())["equivalent"]
    equivalents = {(entry["file"], entry["line"], entry["change"]) for entry in kept}

    tree, tests, until = copy_tree(), Tests(), time.monotonic() + options.seconds
    results = WORK / "results.json"
    known: dict[str, list[str]] = json.loads(results.read_text()) if results.exists() else {}
    for mutant in drawn:
        concerned = "".join(digest(tree / test) for test in concerns(tree, mutant.file))  # a survivor meets new tests
        if (
            known.get(mutant.place, [""])[0] in ("killed", "elsewhere")
            or concerned in known.get(mutant.place, [])
            or mutant.key in equivalents
        ):
            continue
        if time.monotonic() > until:
            break
        began = time.monotonic()
        found = verdict(tests, tree, mutant)
        known[mutant.place] = [found, concerned]
        results.write_text(json.dumps(known, ensure_ascii=False, indent=1))
        print(f"{found:9} {time.monotonic() - began:5.0f} s  {mutant}", flush=True)

    tests.close()
    counted = Counter[str]()
    for mutant in drawn:
        found = "equivalent" if mutant.key in equivalents else known.get(mutant.place, ["not tried"])[0]
        counted[found] += 1
        if found in ("survived", "unreached"):
            print(f"{found}: {mutant}")
    tried = counted["killed"] + counted["survived"] + counted["unreached"]
    share = counted["killed"] / tried if tried else 0.0
    print(
        f"killed {counted['killed']} of {tried} ({share:.1%}), {counted['unreached']} reached by no test, "
        f"{counted['equivalent']} equivalent, {counted['elsewhere']} compiled for other processors alone, {counted['not tried']} not tried"
    )
    return int(share < GOAL)


if __name__ == "__main__":
    sys.exit(main())
