"""Runs the plain path beside the engine, for explanations: in its own thread, one at a time, at low priority."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import structlog
from numpy.typing import NDArray

from app.engine.loading import LoadedModel, stand_back
from app.errors import DeadlineExceeded, EngineDown
from model.dense import candidate_attention
from model.inputs import Candidates, Context

PLAIN_THREAD = "plain"

log = structlog.get_logger("app.service.plain_path")


class PlainPath:
    """Computes attention by the plain path. Used by the event loop only."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(1, thread_name_prefix=PLAIN_THREAD, initializer=stand_back)

    async def attention(
        self, model: LoadedModel, context: Context, candidates: Candidates, timeout_seconds: float
    ) -> NDArray[np.float32]:
        """As `model.dense.candidate_attention`, with the engine's positions. Raises DeadlineExceeded or EngineDown."""
        ranker, positions = model.checkpoint.ranker, model.engine.info.candidate_positions
        loop = asyncio.get_running_loop()
        future = loop.run_in_executor(self._executor, candidate_attention, ranker, context, candidates, positions)
        try:
            async with asyncio.timeout(timeout_seconds):
                found = await future
            if changed := model.changed_file():
                raise EngineDown(changed, retry_after_seconds=1.0)
            return found
        except TimeoutError:
            raise DeadlineExceeded from None
        except (MemoryError, RuntimeError) as error:  # torch raises the second
            log.error("attention_failed", error=type(error).__name__)
            raise EngineDown("The plain path failed on this request.", retry_after_seconds=1.0) from error

    def stop(self) -> None:
        """Start no more computations."""
        self._executor.shutdown(wait=False, cancel_futures=True)
