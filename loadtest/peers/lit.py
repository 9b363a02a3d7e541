"""The model behind LitServe, with its dynamic batching. For the peer table only; runs in the peers' environment."""

import os
import sys
from typing import Any

import litserve
from fastapi import Response
from fastapi.responses import JSONResponse

from loadtest.peers.common import PeerModel, RankBody
from model.inputs import Candidates, Context, Scores

Features = tuple[Context, Candidates]


class RankApi(litserve.LitAPI):  # type: ignore[misc]
    """One worker process with one model, as in LitServe's guide."""

    def setup(self, device: str) -> None:
        self.model = PeerModel()

    def decode_request(self, request: RankBody) -> Features:  # LitServe reads this annotation at run time
        return self.model.features(request)

    def batch(self, inputs: list[Features]) -> list[Features]:
        return inputs

    def predict(self, inputs: Any) -> Any:
        if isinstance(inputs, list):
            return list(zip(inputs, self.model.score(inputs), strict=True))
        return inputs, self.model.score([inputs])[0]

    def unbatch(self, output: list[tuple[Features, Scores]]) -> list[tuple[Features, Scores]]:
        return output

    def encode_response(self, output: tuple[Features, Scores]) -> Response:
        (_, candidates), scores = output
        return JSONResponse(self.model.reply(candidates.post_ids.tolist(), scores))


if __name__ == "__main__":
    batch = int(os.environ["PEER_BATCH"])
    api = RankApi(max_batch_size=batch, batch_timeout=0.002 if batch > 1 else 0.0, api_path="/rank")
    server = litserve.LitServer(api, accelerator="cpu", workers_per_device=1, timeout=30)
    server.run(
        host="127.0.0.1", port=int(sys.argv[1]), num_api_servers=1, log_level="warning", generate_client_file=False
    )
