"""Computes attention beside the engine, to explain a ranking: in a thread of its own, one at a time, at low priority."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import structlog
from numpy.typing import NDArray

from app.errors import DeadlineExceeded, EngineDown
from app.queue.loading import LoadedModel
from model.inputs import Candidates, Context

ATTENTION_THREAD = "attention"
NICE = 10  # gets about a tenth of the time of a serving thread on the same core

log = structlog.get_logger("app.service.attention")


class AttentionThread:
    """Used by the event loop only."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(1, thread_name_prefix=ATTENTION_THREAD, initializer=_yield_to_others)

    async def compute(
        self, model: LoadedModel, context: Context, candidates: Candidates, timeout_seconds: float
    ) -> NDArray[np.float32]:
        """Return `LoadedModel.attention`. Raises DeadlineExceeded or EngineDown."""
        future = asyncio.get_running_loop().run_in_executor(self._executor, model.attention, context, candidates)
        try:
            async with asyncio.timeout(timeout_seconds):
                attention = await future
        except TimeoutError:
            raise DeadlineExceeded from None
        except (MemoryError, RuntimeError) as error:  # torch raises the second
            log.error("attention_failed", error=type(error).__name__)
            raise EngineDown("Attention could not be computed for this request.", retry_after_seconds=1.0) from error
        if changed := model.changed_file():
            raise EngineDown(changed, retry_after_seconds=1.0)
        return attention

    def stop(self) -> None:
        """Start no more computations."""
        self._executor.shutdown(wait=False, cancel_futures=True)


def _yield_to_others() -> None:
    """From now on run this thread, and all that it starts, at low priority."""
    with contextlib.suppress(OSError, AttributeError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
