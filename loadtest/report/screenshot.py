"""Pictures of web pages for the documentation, by a headless Chromium. Not for reports: those carry their plots with them."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from pathlib import Path

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
QUIET = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--hide-scrollbars",
)  # fmt: skip
TIMEOUT_SECONDS = 90


class NoBrowser(RuntimeError):
    """No Chromium is installed, or it drew nothing."""


def screenshot(url: str, out: Path, width: int, height: int, settle_ms: int = 8_000) -> Path:
    """Write a PNG of `url` after `settle_ms` of the page's own time. Raises NoBrowser."""
    browser = next((found for name in BROWSERS if (found := shutil.which(name))), None)
    if browser is None:
        raise NoBrowser("no Chromium is installed; Debian and Ubuntu: apt-get install chromium")
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as profile:
        command = [browser, *QUIET, f"--user-data-dir={profile}", f"--virtual-time-budget={settle_ms}"]
        command += [f"--window-size={width},{height}", f"--screenshot={out.resolve()}", url]
        try:
            finished = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_SECONDS)
        except subprocess.TimeoutExpired as error:
            raise NoBrowser(f"{browser} did not finish within {TIMEOUT_SECONDS} s") from error
    if finished.returncode or not out.exists():
        raise NoBrowser(f"{browser} drew nothing: {finished.stderr.strip()[-500:]}")
    return out
