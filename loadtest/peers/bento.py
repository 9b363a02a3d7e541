"""The model behind BentoML. For the peer table only; runs in the peers' environment."""

from __future__ import annotations

from typing import Any

import bentoml

from loadtest.peers.common import PeerModel, RankBody


@bentoml.service(workers=1, traffic={"timeout": 30}, logging={"access": {"enabled": False}})
class Ranker:
    """One worker process with one model, as in BentoML's guide."""

    def __init__(self) -> None:
        self.model = PeerModel()

    @bentoml.api(route="/rank")  # type: ignore[untyped-decorator]
    def rank(self, body: RankBody, /) -> dict[str, Any]:
        return self.model.rank(body)
