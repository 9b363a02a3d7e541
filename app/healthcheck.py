"""`python -m app.healthcheck`: exits with 0 where the service of this machine is ready. The image's health check."""

from __future__ import annotations

import os
import socket
import sys

SECONDS = 3.0
LOOPBACK = {"*": ("127.0.0.1", "::1"), "0.0.0.0": ("127.0.0.1",), "::": ("::1",)}  # noqa: S104


def main() -> int:
    """Ask `/readyz` where RANKER_HOST and RANKER_PORT say that the service listens, no proxy in between.

    In HTTP/1.0, which needs no `Host`: RANKER_HOSTS may allow names that this does not know.
    """
    hosts = [host.strip("[] ") for host in (os.environ.get("RANKER_HOST") or "127.0.0.1").split(",")]
    port = int(os.environ.get("RANKER_PORT") or "8000")
    for address in (address for host in hosts for address in LOOPBACK.get(host, (host,))):
        try:
            with socket.create_connection((address, port), SECONDS) as connection:
                connection.sendall(b"GET /readyz HTTP/1.0\r\n\r\n")
                return 0 if connection.makefile("rb").readline().split()[1:2] == [b"200"] else 1
        except OSError:  # of several addresses the next one
            continue
    return 1


if __name__ == "__main__":
    sys.exit(main())
