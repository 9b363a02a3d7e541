"""What the C++ kernels do when memory, threads or numbers end.

Each case may hang or abort, so it runs in a process of its own: forks of one, since to import torch takes longer than the cases.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

START = """
import ctypes, os, resource, signal
import torch
from model.engine import EngineError, Item
from model.native.build import build_kernel
from model.native.engine import NativeEngine
from model.native.kernel import Kernel, load_kernel
from model.selftest import same_bits
from tests.model.builders import random_config, random_context, random_ranker, random_request

class Noted(Kernel):
    handle = None

    def create(self, *given, **named):
        self.handle, threads = super().create(*given, **named)
        return self.handle, threads

config = random_config()
ranker = random_ranker(config)
items = [Item(*random_request(config, history, 65, seed=history)) for history in (37, 5)]
kernel = Noted(build_kernel(None, "RANKER_TEST_HOOKS", "RANKER_WORTH_A_THREAD=0").path)

def make(threads):
    return NativeEngine(ranker, torch.bfloat16, threads=threads, kernel=kernel)

def right(engine):
    pairs = zip(engine.forward(items), expected, strict=True)
    return all(same_bits(ours.scores, theirs.scores) for ours, theirs in pairs)

def fails(steps, call, loaded=kernel):
    loaded.library.ranker_fail_after(ctypes.c_int64(steps))
    try:
        return call()
    except EngineError as error:
        assert "not enough memory" in str(error)
        return None
    finally:
        loaded.library.ranker_fail_after(ctypes.c_int64(-1))

expected = make(1).forward(items)
"""

ACROSS_EVERY_EDGE = """
engine = make(3)
for edge in (2**31, 2**32, 2**63, 2**64, 2**16 << 32, 2**31 << 32):
    kernel.library.ranker_preset_tasks(kernel.handle, ctypes.c_uint64(edge - 20))
    assert all(right(engine) for _ in range(30)), edge
"""

CHECKED = """
engine = NativeEngine(ranker, torch.float32, threads=1, kernel=load_kernel(None, "RANKER_CHECKS"))
context, candidates = random_request(config, 7, 5, seed=1)
context.surfaces[-1] = candidates.surfaces[-1] = config.product_surfaces - 1
candidates.age_buckets[-1] = config.post_age_buckets - 1
few = [Item(random_context(config, 0, user_id=user), candidates) for user in (7, 0)]
engine.forward([Item(context, candidates), *few])
for place in ("surfaces", "age_buckets", "history", "first_slot"):
    if not (child := os.fork()):
        if place == "history":
            context.surfaces[0] = -1
        elif place == "first_slot":
            candidates.first_slot = -1
        else:
            getattr(candidates, place)[2] = 2**40
        engine.forward([Item(context, candidates)])
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGABRT, place
"""

EVERYTHING_FAILS_ONCE = """
engines = [fails(steps, lambda: make(3)) for steps in range(120)]
threads = [engine and engine.info.notes["threads"] for engine in engines]
assert set(threads) == {None, 1, 2, 3} and threads[-1] == 3, threads
assert threads.count(None) > 40, "hardly anything failed, so this shows little"
fewer = engines[threads.index(2)]
assert fails(0, lambda: fewer.open()) is None and fewer.open() is not None
assert "3 threads were wanted" in fewer.info.notes["threads_refused"]
assert all(right(engines[threads.index(count)]) for count in (1, 2, 3))

engine = engines[-1]
outcomes = [fails(steps, lambda: engine.forward(items)) for steps in range(60)]
assert outcomes[0] is None and outcomes[-1] is not None
assert outcomes.count(None) > 10, "hardly anything failed, so this shows little"
assert right(engine)
"""

A_SEARCH_FAILS_ONCE = """
import numpy as np
from model.native.search import NativeIndex
from model.retrieval.search import Wish

rng = np.random.default_rng(0)
vectors = rng.standard_normal((20_000, 32)).astype(np.float32)
wishes = [Wish(query, 300) for query in rng.standard_normal((4, 32)).astype(np.float32)]
sound = NativeIndex(vectors, threads=2, defines=["RANKER_TEST_HOOKS"])
rows = lambda found: [each.rows.tolist() for each in found]
expected = rows(sound.search(wishes))
found = [fails(steps, lambda: sound.search(wishes), sound) for steps in range(200)]
assert found.count(None) > 20, "hardly anything failed, so this shows little"
assert all(one is None or rows(one) == expected for one in found)
made = [fails(steps, lambda: NativeIndex(vectors, threads=2, defines=["RANKER_TEST_HOOKS"]), sound) for steps in range(30)]
assert made.count(None) > 2 and made[-1] is not None
assert rows(sound.search(wishes)) == expected
"""

A_RELOAD_WITHOUT_ROOM = """
serving = make(2)
pages = int(open("/proc/self/statm").read().split()[0])
resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + 60 * 2**20,) * 2)
loaded = make(400)  # a thread takes 8 MB of addresses
assert 1 <= loaded.info.notes["threads"] < 400, loaded.info.notes
assert right(loaded)
assert right(serving)
"""


CASES = {
    "no counter of the pool has an edge": ACROSS_EVERY_EDGE,
    "no allocation or thread that fails ends the process": EVERYTHING_FAILS_ONCE,
    "a search without memory says so, and the next one is right": A_SEARCH_FAILS_ONCE,
    "a reload that gets no threads leaves the serving engine alone": A_RELOAD_WITHOUT_ROOM,
    # what nobody hands over: `Context.check` and `Candidates.check` look before
    "a build with checks ends where it is given what no table has": CHECKED,
}
RUN_EACH = """
for name, case in CASES.items():
    if not (child := os.fork()):
        exec(case)
        print(name, flush=True)
        os._exit(0)
    os.waitpid(child, 0)
"""


@pytest.fixture(scope="module")
def ended() -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", f"{START}\nCASES = {CASES!r}\n{RUN_EACH}"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=110)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_scores_stay_right_and_nothing_hangs_or_aborts(ended: subprocess.CompletedProcess[str], case: str) -> None:
    assert case in ended.stdout.splitlines(), ended.stderr[-3000:]


def test_a_build_with_checks_names_what_no_table_has(ended: subprocess.CompletedProcess[str]) -> None:
    assert ended.stderr.count("not kept: ") == 4
