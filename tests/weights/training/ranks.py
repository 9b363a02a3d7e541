"""Runs a function in several processes that are joined by Gloo, as torchrun would join them. Not a test itself."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.zygote import forked
from weights.training import run
from weights.training.processes import joined

PATIENCE_SECONDS = 100


def on_ranks(
    size: int, work: Callable[..., None], place: Path, *arguments: Any, anew: bool = False
) -> list[int | None]:
    """Exit codes of `work(Processes, *arguments)` by rank: 0 done, 1 raised, −9 killed.

    `place` is a new directory to meet in; what a rank raised is written to `error-RANK` there, and to
    `threads-RANK` the names of those that run when it has left the others. `anew`: an optimizer imports what it needs.
    """
    place.mkdir()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = forked(__name__, work.__module__, *(() if anew else ("torch._dynamo",)))
    started = [
        context.Process(target=_rank, args=(rank, size, store.port, place, work, arguments)) for rank in range(size)
    ]
    for process in started:
        process.start()
    for process in started:
        process.join(PATIENCE_SECONDS)
        process.kill()
        process.join()
    return [process.exitcode for process in started]


def _rank(rank: int, size: int, port: int, place: Path, work: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "GLOO_SOCKET_IFNAME": "lo"}
    torch.set_num_threads(1)
    run.draw_curve = lambda curve, path: None  # a picture takes longer than the steps that it shows
    try:
        with joined("cpu") as processes:
            work(processes, *arguments)
    except Exception as error:
        names = [name.read_text() for name in Path("/proc/self/task").glob("*/comm")]
        (place / f"threads-{rank}").write_text("".join(names))
        (place / f"error-{rank}").write_text(str(error))
        sys.exit(1)
