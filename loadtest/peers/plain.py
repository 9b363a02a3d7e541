"""A plain FastAPI handler around the model, without queue or batching. For the peer table only."""

from __future__ import annotations

import sys

import uvicorn
from fastapi import FastAPI
from fastapi.responses import JSONResponse

from loadtest.peers.common import PeerModel, RankBody


def create_app() -> FastAPI:
    """The service, with its model loaded."""
    app = FastAPI()
    model = PeerModel()

    @app.post("/rank")
    def rank(body: RankBody) -> JSONResponse:  # not async: FastAPI runs it in its thread pool, the loop stays free
        return JSONResponse(model.rank(body))

    @app.get("/ready")
    def ready() -> dict[str, str]:
        return {"status": "ready"}

    return app


if __name__ == "__main__":
    uvicorn.run(create_app(), host="127.0.0.1", port=int(sys.argv[1]), log_level="warning", access_log=False)
