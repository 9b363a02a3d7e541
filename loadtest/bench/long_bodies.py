"""Row of the thin path: clients that write a body of 20 MB before they read, and how many of them read its 413."""

from __future__ import annotations

import http.client
from concurrent.futures import ThreadPoolExecutor

from loadtest.bench.table import Row
from loadtest.servers.launch import Server
from loadtest.timing import Figure

BODY = b" " * 20_000_000
CLIENTS_AT_ONCE = 4
TIMEOUT_SECONDS = 30.0


class LongBodies:
    """Blocking clients, as Python's own library has them."""

    def __init__(self, server: Server, clients: int) -> None:
        """`clients` in each round."""
        self.address = server.target.host, server.target.port
        self.clients = clients
        self.shares: list[float] = []

    def read(self) -> None:
        """One round."""
        with ThreadPoolExecutor(CLIENTS_AT_ONCE) as pool:
            statuses = list(pool.map(self._status, range(self.clients)))
        self.shares.append(statuses.count(413) / self.clients)

    def rows(self) -> list[Row]:
        """All of them must."""
        asked = self.clients * len(self.shares)
        worst = Figure(min(self.shares), min(self.shares), max(self.shares))
        return [
            Row(f"413 of a 20 MB body, share of {asked} blocking clients that read it", worst, "", 1.0, at_least=True)
        ]

    def _status(self, number: int) -> int:
        connection = http.client.HTTPConnection(*self.address, timeout=TIMEOUT_SECONDS)
        try:
            connection.request("POST", "/rank", BODY, {"Content-Type": "application/json"})
            return connection.getresponse().status
        except (OSError, http.client.HTTPException):  # its connection broke before it had read anything
            return 0
        finally:
            connection.close()
