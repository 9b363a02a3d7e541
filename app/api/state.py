"""What the endpoints of a port share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from starlette.requests import Request

if TYPE_CHECKING:  # the endpoints' modules import this one
    from app.api.admin import Operator
    from app.api.caller import Bodies, KeyRing
    from app.api.explain import Explanations
    from app.api.operations import Scrapes
    from app.api.patience import Leavers
    from app.api.read_queue import ReadQueue
    from app.interface import RankingService
    from app.served.log import ServedLog
    from app.settings import Settings
    from app.shares import Shares


@dataclass(slots=True)
class AppState:
    """The `app.state` of our applications.

    `bodies`: bytes of the bodies that are being read. `batches`: candidates of the batches that are being ranked. `about`: what of /info
    does not change. `served_log`: the log of what was served, None where it is off. `operator`: None on all ports but the admin's.
    `leavers`: when callers leave. `read_queue`: bodies that have come and are not read yet.
    """

    ranker: RankingService
    settings: Settings
    keys: KeyRing
    bodies: Bodies
    batches: Shares
    explanations: Explanations
    about: dict[str, Any]
    scrapes: Scrapes
    leavers: Leavers
    read_queue: ReadQueue
    served_log: ServedLog | None = None
    operator: Operator | None = None


def state_of(request: Request) -> AppState:
    """Return what the endpoints of the port share that got this request."""
    state: AppState = request.app.state
    return state
