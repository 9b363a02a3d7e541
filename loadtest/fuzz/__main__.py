"""`python -m loadtest.fuzz`: fuzz the application around a checkpoint, one JSON line a row of the reliability matrix."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from app.assembly import build_app, create_grpc_server
from app.settings import Grpc, Logs, Settings
from app.telemetry import logs
from loadtest.fuzz.run import Tally, fuzz, series_by_route, sources
from loadtest.fuzz.wires import GrpcBridge

PROGRESS_SECONDS = 10.0


def main(
    requests: Annotated[int, typer.Option(help="Stop after this many.")] = 1_000_000,
    seconds: Annotated[float, typer.Option(help="Stop after this time, whatever was sent.")] = 3600.0,
    checkpoint: Annotated[Path, typer.Option(help="What to serve.")] = Path("weights/demo"),
    seed: Annotated[int, typer.Option(help="Another seed, other requests.")] = 0,
    only_paths: Annotated[
        bool, typer.Option("--only-paths", help="Paths that nobody serves, and nothing else.")
    ] = False,
) -> None:
    """Exit code 1 when a promise was broken; the calls that broke it go to standard error."""
    with open(os.devnull, "w") as nowhere:
        logs.configure(Logs(), nowhere)
        tally = asyncio.run(_run(requests, seconds, checkpoint, seed, only_paths))
    rows = [row for row in tally.rows() if not only_paths or row.row == "B9"]
    for row in rows:
        print(row.to_json(), flush=True)
    raise typer.Exit(0 if all(row.ok for row in rows) else 1)


async def _run(requests: int, seconds: float, checkpoint: Path, seed: int, only_paths: bool) -> Tally:
    settings = Settings(checkpoint=checkpoint, logs=Logs(success_sample=0), grpc=Grpc(port=0))
    app = build_app(settings)
    async with app.router.lifespan_context(app):
        await app.state.service.wait_ready()
        server = create_grpc_server(app, settings)
        await server.start()
        bridge = GrpcBridge(app, f"127.0.0.1:{server.port}")
        started = shown = time.monotonic()
        told = 0

        def progress(tally: Tally) -> None:
            nonlocal shown, told
            for reason, call in tally.failures[told:]:
                print(f"{reason}: {call!r}"[:4000], file=sys.stderr)
            told = len(tally.failures)
            if time.monotonic() - shown > PROGRESS_SECONDS:
                shown = time.monotonic()
                rate = tally.sent.total() / (shown - started)
                statuses = dict(sorted(tally.statuses.items()))
                print(
                    f"{tally.sent.total()} sent, {rate:.0f} /s, {statuses}, failed {dict(tally.failed)}",
                    file=sys.stderr,
                )

        calls = sources(app.openapi(), seed, app.state.service.model.manifest)
        calls = {"paths": calls["paths"]} if only_paths else calls
        metrics = app.state.metrics
        series = lambda: series_by_route(metrics.render())  # noqa: E731
        tally = await fuzz(bridge, calls, series, requests=requests, seconds=seconds, on_progress=progress)
        await bridge.close()
        await server.stop(1.0)
        return tally


if __name__ == "__main__":
    typer.run(main)
