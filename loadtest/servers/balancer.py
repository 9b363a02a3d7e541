"""Runs Debian's HAProxy or nginx with the shipped configuration, in front of processes on this machine."""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from loadtest.machine import ROOT
from loadtest.servers.launch import HOST, free_port, start_process
from loadtest.servers.target import Target

PLACES = "/usr/sbin:/usr/local/sbin:/usr/bin:/usr/local/bin:" + str(ROOT / ".cache/haproxy/usr/sbin")
SERVED_BY = "x-served-by"

Change = tuple[str, str]
"""A pattern for a configuration line, and its replacement."""


@dataclass(frozen=True, slots=True)
class Balancer:
    """A program and its configuration. `here`: changes for this machine, in which `{port}` is the listening port.

    `settled_seconds`: time to notice a change. `at_random`, `sent_once`, `waits`: changes for the controls.
    """

    name: str
    config: Path
    flags: tuple[str, ...]
    here: tuple[Change, ...]
    settled_seconds: float
    at_random: Change
    sent_once: Change  # do not resend a request that may have been read
    waits: Change  # wait for a silent process as long as for any reply

    @property
    def program(self) -> str | None:
        """Path of the program, None if it is not installed."""
        return shutil.which(self.name, path=PLACES)

    def configuration(self, ports: Sequence[int], port: int, changes: Sequence[Change]) -> str:
        """The shipped configuration with these process ports; unused servers are commented out."""
        text = self.config.read_text()
        for number in range(1, len(re.findall(r"(?m)^ +server ranker-", text)) + 1):
            at = ports[number - 1] if number <= len(ports) else None
            place = rf"(?m)^( +server )((?:ranker-{number} )?)ranker-{number}:8000"
            text = re.sub(place, rf"\1\g<2>{HOST}:{at}" if at else r"    # \g<0>", text)
        for pattern, instead in (*self.here, *changes):
            text, found = re.subn(rf"(?m)^ *{pattern}$", instead.replace("{port}", str(port)), text)
            assert found, f"no line of the configuration is {pattern}"
        return text


HAPROXY = Balancer(
    "haproxy",
    ROOT / "docker" / "haproxy" / "haproxy.cfg",
    ("-db", "-f"),
    (
        ("bind :8000", f"    bind {HOST}:{{port}}"),
        ("bind :8404", "    bind unix@metrics.sock"),
        ("stats socket /tmp/(.*)", r"    stats socket unix@\1"),
        ("backend rankers", f"backend rankers\n    http-response set-header {SERVED_BY} %s"),
        ("(default-server .*) slowstart 10s (.*)", r"    \1 slowstart 1s \2"),
    ),
    2.5,  # the health checks and the slow start
    (r"balance hdr\(x-routing-key\)", "    balance random"),
    ("retry-on .*", "    retry-on conn-failure"),
    ("http-request set-timeout .*", ""),
)
NGINX = Balancer(
    "nginx",
    ROOT / "docker" / "nginx" / "nginx.conf",
    ("-p", "./", "-e", "stderr", "-g", "daemon off;", "-c"),
    (
        ("error_log stderr warn;", "error_log stderr crit;\npid nginx.pid;"),
        ("listen 8000;", f"listen {HOST}:{{port}};\n add_header {SERVED_BY} $upstream_addr always;"),
        (
            "access_log off;",
            "access_log off;\n"
            + "".join(f"{of}_temp_path .;\n" for of in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")),
        ),
    ),
    2.2,  # it avoids a failed server for one second, rounded up to two at most
    ("hash .* consistent;", "random;"),
    ("proxy_next_upstream .*", "proxy_next_upstream error timeout;"),
    ("proxy_read_timeout 1500ms;", ""),
)


@contextmanager
def balancer(ports: Sequence[int], *changes: Change, kind: Balancer = HAPROXY) -> Iterator[Target]:
    """Run a balancer in front of processes on these ports, started or not. `x-served-by` of a reply ends with the process."""
    port = free_port()
    assert kind.program is not None, f"{kind.name} is not installed"
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / kind.config.name
        path.write_text(kind.configuration(ports, port, changes))
        process = start_process(
            [kind.program, *kind.flags, str(path)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=directory
        )
        try:
            target = Target(HOST, port)
            while not target.answers():
                assert process.poll() is None, f"{kind.name} ended"
                time.sleep(0.05)
            yield target
        finally:
            process.terminate()
            process.wait(10)
