"""The service on Ray Serve: `serve run app.ray:service`. The FastAPI application is the deployment's ingress; Ray routes and scales.

Settings come from the environment as for `python -m app`, except those of ports and addresses, which are Ray's. Any name in `Host` is
accepted unless `RANKER_HOSTS` says which. Each replica has a ranker and a context cache of its own. Ray's router does not
know which replica has a user's context, so callers that ask for several pages keep their connection or use one replica a user.
"""

from __future__ import annotations

from typing import Any

from ray import serve

from app.main import create_app
from app.service.local import create_ranker
from app.settings import Settings, load_settings
from app.telemetry import logs
from app.telemetry.metrics import Metrics

HEALTH_CHECK_SECONDS = 2.0


def build(settings: Settings | None = None, **options: Any) -> serve.Application:
    """An application for `serve.run`. `options` are those of `serve.deployment`: num_replicas, autoscaling_config, ray_actor_options."""
    chosen = settings or load_settings()

    @serve.deployment(
        name="ranker",
        max_ongoing_requests=chosen.queue.max_requests,
        health_check_period_s=HEALTH_CHECK_SECONDS,
        graceful_shutdown_timeout_s=chosen.drain.timeout_seconds,
        **options,
    )
    @serve.ingress(lambda: _application(chosen))
    class Replica:
        """One replica."""

        async def check_health(self) -> None:
            """The first call ends when the replica is ready, and Ray sends it no request before. Later ones have a replica replaced whose
            engine has failed."""
            await check_engine()

    bound: serve.Application = Replica.bind()  # type: ignore[attr-defined]  # serve.deployment made it one
    return bound


_rankers: list[Any] = []  # of this replica's process


async def check_engine() -> None:
    """Wait until the engine of this process has been loaded. Raises RuntimeError if it has failed, and what made loading fail.

    Ray copies the globals of a class, so the class only calls this.
    """
    await _rankers[-1].wait_ready()
    health = _rankers[-1].health()
    if health.failed:
        raise RuntimeError(health.reason)


def _application(settings: Settings) -> Any:
    logs.configure(settings.logs)
    if not settings.hosts:  # Ray's proxy listens, not HOST: whoever reaches it may use any of its names
        settings = settings.model_copy(update={"hosts": "*"})
    ranker = create_ranker(settings, Metrics())
    _rankers.append(ranker)
    app = create_app(settings, ranker)
    app.exception_handlers = {}  # Ray adds handlers of what its handles to other deployments raise, which this application has none of
    return app


def service(arguments: dict[str, str]) -> serve.Application:
    """What `serve run app.ray:service num_replicas=2` builds."""
    return build(num_replicas=int(arguments.get("num_replicas", "1")))
