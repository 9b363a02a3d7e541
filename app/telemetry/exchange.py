"""What is noted about one HTTP request on its way: the source of its log line, its metrics and its span."""

from __future__ import annotations

import msgspec


class Exchange(msgspec.Struct):
    """Nothing here comes from a history; ids have been checked.

    `stages` are seconds; `status` 499 means that the client disconnected; `code` is a problem's. A request that was not named
    by its caller's header takes the name in its body, if there is one.
    """

    request_id: str
    started: float
    method: str
    route: str
    status: int = 0
    code: str = ""
    key: str | None = None
    version: str = ""
    candidates: int = 0
    history: int = 0
    requests: int = 0
    cache: str = ""
    stages: dict[str, float] = msgspec.field(default_factory=dict)
    is_named_by_caller: bool = False

    def name(self, request_id: str | None) -> None:
        """Take the name in the body, unless a header had one."""
        if request_id is not None and not self.is_named_by_caller:
            self.request_id = request_id


def milliseconds(seconds: float) -> float:
    """With three decimals."""
    return round(seconds * 1e6) / 1e3
