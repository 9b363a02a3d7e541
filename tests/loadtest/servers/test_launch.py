"""Servers are started, waited for, quoted where they fail, and leave nothing behind."""

import os
import signal
import subprocess
import sys
import time

import pytest

from loadtest.machine import ROOT, commit
from loadtest.measure.compare import worktree
from loadtest.servers.launch import WITH_US, free_port, process, start_process
from loadtest.servers.target import TargetError
from tests.reliability.live import wait_until

SERVER = """
import subprocess, sys, http.server
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers(); self.wfile.write(str(child.pid).encode())
    def log_message(self, *_): pass
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


LOGGING = """
import json, time
print(json.dumps({"event": "settings"}), "for people", sep="\\n", flush=True)
time.sleep(600)
"""


def is_alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[0] != "Z"


@pytest.mark.skipif(not os.path.isdir("/proc"), reason="reads /proc")
def test_a_server_and_its_children_end_with_the_block():
    import httpx

    port = free_port()
    with process([sys.executable, "-c", SERVER, str(port)], {}, port=port, ready_path="/") as server:
        child = int(httpx.get(f"http://127.0.0.1:{port}/").text)
        assert is_alive(server.process.pid)
        assert is_alive(child)
        server.pause()
        with pytest.raises(httpx.TimeoutException):
            httpx.get(f"http://127.0.0.1:{port}/", timeout=0.2)
        server.resume()
        assert httpx.get(f"http://127.0.0.1:{port}/", timeout=5).status_code == 200
        server.pause()  # and a paused one ends as well
    deadline = time.monotonic() + 5
    while is_alive(child) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not is_alive(child)
    assert not is_alive(server.process.pid)


def test_a_server_that_does_not_start_is_quoted():
    command = [sys.executable, "-c", "import sys; sys.exit('no weights today')"]
    with pytest.raises(TargetError, match="no weights today"), process(command, {}, port=free_port(), ready_path="/"):
        pass


def test_a_log_is_read_while_the_server_runs():
    with process([sys.executable, "-c", LOGGING], {}, port=free_port(), ready_path=None) as server:
        deadline = time.monotonic() + 20
        while not server.lines and time.monotonic() < deadline:
            time.sleep(0.02)
        assert server.lines == [{"event": "settings"}]
        assert "for people" in server.raw
        assert not server.answers()
        assert server.stop() == -signal.SIGTERM


def test_a_commit_is_checked_out_beside_this_tree():
    if commit() == "unknown":
        pytest.skip("not a git checkout")
    with worktree("HEAD") as root:
        assert (root / "pyproject.toml").exists()
        assert commit(root) == commit().rstrip("+")
    assert not root.exists()
    with pytest.raises(TargetError, match="worktree"), worktree("no-such-commit"):
        pass


STARTING = """
import sys, threading, time
from loadtest.servers import launch
if "bare" in sys.argv:
    launch.WITH_US = ()
def start():
    started = launch.start_process([sys.executable, "-c", "import time; print('up', flush=True); time.sleep(600)"], stdout=-1)
    started.stdout.readline()
    print(started.pid, flush=True)
thread = threading.Thread(target=start)  # which ends before the rest
thread.start()
time.sleep(600)
"""


@pytest.mark.skipif(not WITH_US, reason="setpriv of util-linux is not here")
@pytest.mark.parametrize("how", ["with us", "bare"])
def test_a_server_ends_with_a_killed_starter_and_not_with_the_thread_that_asked(how):
    with start_process([sys.executable, "-c", STARTING, how], cwd=ROOT, stdout=subprocess.PIPE) as starter:
        started = int(starter.stdout.readline())
        time.sleep(0.2)  # the thread that asked has ended
        assert is_alive(started)
        starter.kill()
    if how == "bare":  # the control
        assert is_alive(started)
        os.kill(started, signal.SIGKILL)
    wait_until(lambda: not is_alive(started))
