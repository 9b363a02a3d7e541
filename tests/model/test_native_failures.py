"""What the C++ kernel does when memory, threads or numbers end. Each case is a process of its own: it may hang or abort."""

from __future__ import annotations

import re
import signal
import sys
from pathlib import Path

import pytest
import torch  # noqa: F401  # its processes need it: without it these tests are left out

from tests.zygote import zygote

ROOT = Path(__file__).resolve().parents[2]

START = """
import ctypes, itertools, resource
import torch
from model.engine import EngineError, Item
from model.native.engine import NativeEngine
from model.native.kernel import load_kernel
from model.selftest import same_bits
from tests.model.builders import random_config, random_ranker, random_request

config = random_config()
ranker = random_ranker(config)
items = [Item(*random_request(config, history, 65, seed=history)) for history in (37, 5)]
kernel = load_kernel(None, "RANKER_TEST_HOOKS", "RANKER_WORTH_A_THREAD=0")

def make(threads):
    return NativeEngine(ranker, torch.bfloat16, threads=threads, kernel=kernel)

def right(engine):
    pairs = zip(engine.forward(items), expected, strict=True)
    return all(same_bits(ours.scores, theirs.scores) for ours, theirs in pairs)

expected = make(1).forward(items)
"""

ACROSS_EVERY_EDGE = """
engine = make(3)
for edge in (2**31, 2**32, 2**63, 2**64, 2**16 << 32, 2**31 << 32):
    kernel.library.ranker_preset_tasks(engine._handle, ctypes.c_uint64(edge - 20))
    assert all(right(engine) for _ in range(30)), edge
"""

CHECKED = """
import sys
import numpy as np
import torch
from model.engine import Item
from model.native import build
build.FLAGS = (*build.FLAGS, "-DRANKER_CHECKS", "-O1")  # compiled in half of the time
from model.native.engine import NativeEngine
from model.native.search import CWish, NativeIndex
from model.retrieval.search import Wish
from tests.model.builders import random_config, random_context, random_ranker, random_request

config = random_config()
engine, index = NativeEngine(random_ranker(config), torch.float32, threads=1), NativeIndex(np.ones((5, 3), np.float32), threads=1)
context, candidates = random_request(config, 7, 5, seed=1)
context.surfaces[-1] = candidates.surfaces[-1] = config.product_surfaces - 1
candidates.age_buckets[-1] = config.post_age_buckets - 1
few = [Item(random_context(config, 0, user_id=user), candidates) for user in (7, 0)]
engine.forward([Item(context, candidates), *few])
index.search([Wish(np.ones(3, np.float32), k) for k in (1, 5)])
print("the last rows are taken", flush=True)
if sys.argv[1] == "a wish":
    one = (CWish * 1)(CWish(np.ones(3, np.float32).ctypes.data, None, 6, 0.0, 0, 0, 0, None, None))
    index.library.search_run(index._handle, one, 1)
elif sys.argv[1] == "history":
    context.surfaces[0] = -1
elif sys.argv[1] == "first_slot":
    candidates.first_slot = -1
else:
    getattr(candidates, sys.argv[1])[2] = 2**40
engine.forward([Item(context, candidates)])
"""

EVERYTHING_FAILS_ONCE = """
def fails(steps, call):
    kernel.library.ranker_fail_after(ctypes.c_int64(steps))
    try:
        return call()
    except EngineError as error:
        assert "not enough memory" in str(error)
        return None
    finally:
        kernel.library.ranker_fail_after(ctypes.c_int64(-1))

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

A_RELOAD_WITHOUT_ROOM = """
serving = make(2)
pages = int(open("/proc/self/statm").read().split()[0])
resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + 60 * 2**20,) * 2)
loaded = make(400)  # a thread takes 8 MB of addresses
assert 1 <= loaded.info.notes["threads"] < 400, loaded.info.notes
assert right(loaded)
assert right(serving)
"""


def run(script: str) -> None:
    finished = zygote.run([sys.executable, "-c", START + script + "\nprint('right')"], timeout=110)
    assert finished.returncode == 0, finished.stderr[-3000:]
    assert finished.stdout == "right\n"


def test_no_counter_of_the_pool_has_an_edge() -> None:
    run(ACROSS_EVERY_EDGE)


INTEGER = r"std::atomic<(?!bool|float)[\w:]+>"


def counters(source: str) -> set[str]:
    """The atomic integers that a C++ source declares, and the loop counters of its waits."""
    found = re.findall(INTEGER + r"(?:\[\]>)? (\w+)(?:\{|\[|;| =)", source)
    return set(found) | set(re.findall(r"for \(long (spins) = 0;", source))


def test_every_counter_of_the_kernel_has_a_row_that_says_how_long_it_lasts() -> None:
    sources = [path.read_text() for path in (ROOT / "model/native").iterdir() if path.suffix in {".h", ".cpp"}]
    found = set().union(*map(counters, sources))
    assert found >= {"end_", "claimed_", "done_", "layers_written", "spins"}
    assert (
        sum(len(re.findall(INTEGER, source)) for source in sources) == len(found - {"spins"}) + 1
    )  # `new` has no name
    table = (ROOT / "docs/reliability.md").read_text().partition("## Counters")[2].partition("\n## ")[0]
    assert {name for name in found if f"`{name}`" not in table} == set()


def test_a_planted_counter_is_found() -> None:
    assert counters("std::atomic<std::uint32_t> round_{0};") == {"round_"}


@pytest.mark.parametrize("column", ["surfaces", "age_buckets", "history", "first_slot", "a wish"])
def test_a_build_with_checks_ends_where_it_is_given_what_no_table_has(column: str) -> None:
    """What nobody hands over: model/inputs.py and app/fronts/answers.py look before. A fuzzer finds who does not."""
    done = zygote.run([sys.executable, "-c", CHECKED, column], timeout=110)
    assert "the last rows are taken" in done.stdout, done.stderr
    assert (done.returncode, "not kept: " in done.stderr) == (-signal.SIGABRT, True), done.stderr


def test_no_allocation_or_thread_that_fails_ends_the_process() -> None:
    run(EVERYTHING_FAILS_ONCE)


def test_a_reload_that_gets_no_threads_leaves_the_serving_engine_alone() -> None:
    run(A_RELOAD_WITHOUT_ROOM)
