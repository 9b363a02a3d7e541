"""From settings to a service: which checkpoint, which engine, which policies. Not for what happens to a request."""

from __future__ import annotations

import time
from pathlib import Path

from app.admission import AdmissionPolicy, Clock
from app.batching import BatchPolicy
from app.fleet import LoadedModel, Loader, Say
from app.metrics import Metrics
from app.service import Policies, RankingService
from app.settings import Settings
from model.create import EngineOptions, create_engine
from weights.checkpoint import load_checkpoint


def build_service(settings: Settings, metrics: Metrics, *, clock: Clock = time.monotonic) -> RankingService:
    """A service that has not begun to load; call its `start` in a running loop."""
    return RankingService(checkpoint_loader(settings.checkpoint, settings), policies(settings), metrics, clock=clock)


def checkpoint_loader(path: Path, settings: Settings) -> Loader:
    """What an engine thread runs: verify and load the checkpoint, build its engine, warm it up.

    Raises CheckpointError or EngineError, with a sentence for people.
    """

    def load(say: Say) -> LoadedModel:
        checkpoint = load_checkpoint(path)
        say("warming")
        engine = create_engine(checkpoint.ranker, engine_options(settings))
        engine.warm_up()
        return LoadedModel(checkpoint, engine)

    return load


def engine_options(settings: Settings) -> EngineOptions:
    """The part of the settings that the engine understands."""
    return EngineOptions(
        device=settings.device,
        dtype=settings.dtype,
        backend=settings.backend,
        candidate_positions=settings.candidate_positions,
        cache_bytes=settings.cache.bytes,
        threads=settings.threads,
    )


def policies(settings: Settings) -> Policies:
    """The part of the settings that admission and batching understand."""
    queue, batching = settings.queue, settings.batching
    admission = AdmissionPolicy(
        queue_requests=queue.max_requests,
        queue_seconds=queue.max_wait_seconds,
        key_candidates_per_second=queue.key_candidates_per_second,
        queue_candidates=queue.max_candidates,
        queue_context_tokens=queue.max_context_tokens,
        key_share=queue.max_share_per_key,
    )
    batch = BatchPolicy(
        requests=BatchPolicy().requests if batching.enabled else 1,
        candidates=batching.max_candidates,
        context_tokens=batching.max_context_tokens,
        part_candidates=min(batching.part_candidates, batching.max_candidates),
        window_seconds=batching.window_seconds,
    )
    return Policies(
        admission,
        batch,
        default_deadline_seconds=settings.deadline.default_seconds,
        max_deadline_seconds=settings.deadline.max_seconds,
        stall_seconds=queue.stall_seconds,
        exit_seconds=queue.stall_exit_seconds,
    )
