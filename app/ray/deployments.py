"""The application for Ray Serve, by the import path `app.ray.deployments:build`. Needs the `ray` extra."""

from __future__ import annotations

from typing import Any

from ray import serve
from ray.exceptions import ObjectLostError, RayActorError
from ray.serve import Application
from ray.serve.config import RequestRouterConfig
from ray.serve.exceptions import RayServeException

from app.environment import load_settings
from app.ray.ingress import Ingress
from app.ray.replica import Replica
from app.settings import Settings

ROUTER = "ray.serve.experimental.consistent_hash_router.ConsistentHashRouter"
VIRTUAL_NODES = 1000  # of a replica on the ring: with the usual 100, one of two replicas may have 60 % of the users
MOST_IN_FLIGHT = 100_000  # requests of one ingress; replicas refuse any excess
QUIET = {"enable_access_log": False}  # our own lines say more
LOST = (RayActorError, ObjectLostError, RayServeException)


def build(args: dict[str, Any]) -> Application:
    """`args`: settings of the service by the names of their flags, such as `queue.max-requests`; how many replicas there are, and which
    checkpoint they serve, are options of the deployment `Ranker`. Raises SettingsProblem."""
    return deployed(load_settings([f"--{name}={value}" for name, value in args.items()]))


def deployed(settings: Settings, *, replica: type[Replica] = Replica, attempts: int = 2, **options: Any) -> Application:
    """The ingress, bound to the replicas. `attempts` of one request; `options` of the deployment `Ranker` over those here."""
    ours = {
        "name": "Ranker",
        "user_config": {"checkpoint": str(settings.checkpoint)},
        "max_ongoing_requests": 2 * settings.queue.max_requests,  # our own refusals come first, and say when to retry
        "request_router_config": RequestRouterConfig(
            request_router_class=ROUTER, request_router_kwargs={"num_virtual_nodes": VIRTUAL_NODES}
        ),
        "health_check_period_s": 2,
        "health_check_timeout_s": 10,
        "graceful_shutdown_wait_loop_s": 0.5,
        "graceful_shutdown_timeout_s": settings.drain.timeout_seconds,
        "logging_config": QUIET,
    }
    ranker = serve.deployment(**ours | options)(replica)
    ingress = serve.deployment(
        name="Ingress",
        max_ongoing_requests=MOST_IN_FLIGHT,
        max_surge_percent=100,  # a new one before the old one ends: there may be only one
        logging_config=QUIET,
    )(Ingress)
    return ingress.bind(ranker.bind(settings), settings, LOST, attempts)
