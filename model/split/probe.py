"""Tries a way of computing in a child process with a time limit, so that a kernel that hangs or kills its process ends no server.

`python -m model.split.probe` is the child: it reads a `Trial` from its input, writes the line `compiled` when that is done, and last a JSON
object with the reason why this way must not be taken, empty if it may.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import IO, Any, Literal

import torch

from model.config import CandidatePositions, HashSpec, ModelConfig
from model.memory import require_room
from model.ranker import Ranker
from model.selftest import Definition
from model.split.engine import SplitEngine
from model.split.ladder import sentence
from model.synthetic import random_ranker

COMPILE_SECONDS = 240.0  # to start Python and torch and to compile all kernels
CHECK_SECONDS = 60.0
EXIT_SECONDS = 5.0  # of a process that has closed its output
COMMAND = (sys.executable, "-P", "-m", "model.split.probe")  # -P: not what the working directory calls `model`
LAYERS, TABLE_ROWS = 2, 4096  # of the model that is tried: the kernels are those of more layers and larger tables
PR_SET_PDEATHSIG = 1
COMPILED = b"compiled\n"


@dataclass(frozen=True, slots=True)
class Trial:
    """What to try: kernels for a model of this architecture, with random weights. `tables` is the dtype of the embedding tables, whose
    kernels differ; `needed_bytes` are those that the engine of the checkpoint needs on the device."""

    config: ModelConfig
    device: str
    dtype: str
    candidate_positions: CandidatePositions
    kernels: Literal["triton", "torch"]
    tables: str = "float32"
    needed_bytes: int = 0

    def to_json(self) -> str:
        """The inverse of `from_json`."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return json.dumps(values | {"config": self.config.to_dict()})

    @classmethod
    def from_json(cls, text: str) -> Trial:
        """A trial from what `to_json` made of it."""
        values = json.loads(text)
        return cls(**{**values, "config": ModelConfig.from_dict(values["config"])})

    def ranker(self) -> Ranker:
        """A model with few layers and small tables, its weights drawn on the device."""

        def small(hashes: HashSpec) -> HashSpec:
            return replace(hashes, vocab_size=min(hashes.vocab_size, TABLE_ROWS))

        config = replace(
            self.config,
            layers=min(self.config.layers, LAYERS),
            user_hashes=small(self.config.user_hashes),
            post_hashes=small(self.config.post_hashes),
            author_hashes=small(self.config.author_hashes),
        )
        ranker = random_ranker(config, device=self.device)
        ranker.tables.to(getattr(torch, self.tables))
        return ranker

    def engine(self, ranker: Ranker) -> SplitEngine:
        """The engine to try."""
        dtype: torch.dtype = getattr(torch, self.dtype)
        return SplitEngine(ranker, self.device, dtype, self.candidate_positions, kernels=self.kernels)


_passed: set[str] = set()  # trials that need no other in this process: a reload asks for the same


def try_in_child(
    trial: Trial,
    command: Sequence[str] = COMMAND,
    compile_seconds: float = COMPILE_SECONDS,
    check_seconds: float = CHECK_SECONDS,
) -> str:
    """Why this must not be taken; empty if it passed its checks in a child process. Compiled kernels stay in Triton's cache."""
    trial_json = trial.to_json()
    if trial_json in _passed:
        return ""
    use_private_cache_if_needed()
    path = os.pathsep.join(filter(None, (str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH"))))
    with tempfile.TemporaryFile() as stderr:
        child = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr, start_new_session=True,
            env=os.environ | {"PYTHONPATH": path},
        )  # fmt: skip
        try:
            reason = _reason(child, trial_json, stderr, compile_seconds, check_seconds)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)  # and its compilers
            assert child.stdout is not None
            child.stdout.close()
            with suppress(subprocess.TimeoutExpired):  # one that hangs in a driver may not even end then
                child.wait(EXIT_SECONDS)
    if not reason:
        _passed.add(trial_json)
    return reason


def _reason(
    child: subprocess.Popen[bytes], trial_json: str, stderr: IO[bytes], compile_seconds: float, check_seconds: float
) -> str:
    assert child.stdin is not None
    assert child.stdout is not None
    with suppress(BrokenPipeError):
        child.stdin.write(trial_json.encode())
        child.stdin.close()
    received, has_compiled, deadline = b"", False, time.monotonic() + compile_seconds
    while True:
        if not select.select([child.stdout], [], [], max(0.0, deadline - time.monotonic()))[0]:
            stage = (
                f"{check_seconds:g} s after it had compiled" if has_compiled else f"{compile_seconds:g} s, compiling"
            )
            return f"the trial was not done after {stage}"
        piece = os.read(child.stdout.fileno(), 65536)
        if not piece:
            break
        received += piece
        if not has_compiled and COMPILED in received.splitlines(keepends=True):
            has_compiled, deadline = True, time.monotonic() + check_seconds
    with suppress(ValueError, KeyError, TypeError, IndexError):
        return str(json.loads(received.splitlines()[-1])["reason"])  # libraries may have printed before
    try:
        code = child.wait(EXIT_SECONDS)
    except subprocess.TimeoutExpired:
        code = 0
    stderr.seek(0)
    lines = stderr.read().decode(errors="replace").strip().splitlines()
    how = f"by signal {-code}" if code < 0 else "without a result"
    return f"the trial's process ended {how}: {lines[-1][:300] if lines else 'it said nothing'}"


def examine(trial: Trial, compiled: Callable[[], object]) -> None:
    """Compile, warm up, and compare with the definition. Calls `compiled` in between. Raises what goes wrong, EngineError first if the
    device lacks memory for the engine of the checkpoint."""
    device = torch.device(trial.device)
    require_room(trial.needed_bytes, device)
    ranker = trial.ranker()
    engine = trial.engine(ranker)
    engine.compile()
    compiled()
    engine.warm_up()
    Definition(ranker, device).check(engine)


def use_private_cache_if_needed() -> None:
    """Where Triton's folder for compiled kernels cannot be written, use a temporary one for as long as this process lives."""
    folder = Path(os.environ.get("TRITON_CACHE_DIR") or Path(os.path.expanduser("~"), ".triton", "cache"))
    try:
        if not folder.is_absolute():
            raise OSError("there is no home directory")
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return
    except OSError:
        directory = tempfile.TemporaryDirectory(prefix="triton-cache-")
        _private_caches.append(directory)
        os.environ["TRITON_CACHE_DIR"] = directory.name


_private_caches: list[Any] = []


def main(kind: type[Trial] = Trial) -> None:
    """Be the child, which reads a trial of this kind."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # a server that is killed leaves none behind
    signal.alarm(int(COMPILE_SECONDS + CHECK_SECONDS))
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries may print
    reason = ""
    try:
        examine(kind.from_json(sys.stdin.read()), lambda: print(COMPILED.decode(), end="", file=answer, flush=True))
    except Exception as error:
        reason = sentence(error)
    print(json.dumps({"reason": reason}), file=answer, flush=True)
    answer.close()
    os._exit(0)  # a device that is lost may hang at the end


if __name__ == "__main__":
    main()
