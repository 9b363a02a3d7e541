"""Says where the server listens and what to try: a few lines at a terminal, else fields of a log line."""

from __future__ import annotations

import structlog

from app.settings import ANY_ADDRESS, Settings
from app.telemetry import logs

log = structlog.get_logger("app.server.process")


def show(settings: Settings, host: str, port: int) -> None:
    """Tell of the page, where there is one, and of a request that works, where the checkpoint brings an example."""
    reached = "127.0.0.1" if host in ANY_ADDRESS else host
    url = f"http://{f'[{reached}]' if ':' in reached else reached}:{port}"
    example = settings.checkpoint.absolute() / "example.json"
    curl = f"curl -s {url}/rank -H 'content-type: application/json' -d @'{example}'"
    told = {"try": curl} if example.is_file() else {}
    if not logs.are_for_people(settings.logs):
        if settings.explores:
            log.info("page", url=f"{url}/explore", **told)
        return
    from rich.console import Console
    from rich.text import Text

    lines = [f"Phoenix ranking server: {settings.checkpoint.name} on {url}"]
    if settings.explores:
        lines.append(f"  page  {url}/explore")
    lines += [f"  {name:5} {said}" for name, said in told.items()]
    console = Console(stderr=True, soft_wrap=True, highlight=False)
    text = Text("\n".join([*lines, "  stop  Ctrl-C"]))
    text.highlight_regex(r"^.*|https?://\S+", "bold")
    with console.capture() as captured:
        console.print(text)
    logs.process_sink().write(captured.get())
