"""The process: uvicorn's server with our listeners, signals, drain and exit codes. Knows nothing of what a request means.

what comes                    what the process does                                                      exits with
SIGTERM, SIGINT               readiness 503; serves for the drain delay; closes its listeners; answers   0
                              what was begun, for at most the drain timeout                              1 after it
the same again, later         ends at once, if a second has passed since the first                       128 + signal
SIGHUP                        reads the file of keys, the checkpoints and the corpus again               –
the first load fails          answers who waits; then as after the drain delay                           1
the engine is lost            the same                                                                   70
no address to listen on       ends                                                                       3
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import resource
import signal
import socket
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any

import structlog
import uvicorn
import uvloop
from fastapi import FastAPI
from prometheus_client import Counter

from app.api.acceptor import Acceptor
from app.api.caller import CUT_OFF, KeyRing
from app.api.connection import Connection, PortState, sweep
from app.api.operations import Scrapes
from app.exits import EXIT_ENGINE_LOST, EXIT_FAILED, EXIT_START, SAME_SIGNAL_SECONDS
from app.interface import RankingService, ReloadableService
from app.main import create_admin_app, create_app, create_probe_app
from app.settings import ADMIN_HOST, ANY_ADDRESS, Settings, listen_hosts
from app.telemetry import logs

if TYPE_CHECKING:
    from app.processes.engine_process import EngineProcess
    from app.telemetry.metrics import Metrics

BACKLOG = 2048  # connections that may wait to be accepted
GRACE_SECONDS = 1.0  # at the end, for the next request of a client that has just had its reply
SIDE_SECONDS = 1.0  # at most this long the ports at the side outlive the service's: no answer of theirs matters then
NO_FAMILY = (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL)  # a machine without IPv6, say

log = structlog.get_logger("app.server")


class Port(uvicorn.Server):
    """uvicorn's server on the sockets of one port. It leaves signals alone."""

    def __init__(
        self, app: FastAPI, sockets: Sequence[socket.socket], settings: Settings, *, lifespan: bool = False
    ) -> None:
        config = uvicorn.Config(
            app,
            http=Connection,
            ws="none",
            lifespan="on" if lifespan else "off",
            interface="asgi3",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            backlog=BACKLOG,
            timeout_keep_alive=settings.keep_alive_seconds,
            callback_notify=self.sweep,
            timeout_notify=0,
        )
        super().__init__(config)
        self.server_state: PortState = PortState()
        self.sockets = list(sockets)
        self.shortages: Counter = app.state.ranker.metrics.connections_not_taken

    async def sweep(self) -> None:
        """End connections that are too slow; called every second."""
        sweep(self.server_state.connections, asyncio.get_running_loop().time())

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave the signals alone. uvicorn would set a handler for each of our ports; the process sets one, for its main port."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, and say where."""
        await super().startup([])
        for listener in self.sockets:
            self.servers.append(Acceptor(listener, self._connection, self.shortages))  # type: ignore[arg-type]
            host, port = listener.getsockname()[:2]
            log.info("listening", host=host, port=port)

    def _connection(self) -> Connection:
        return Connection(config=self.config, server_state=self.server_state, app_state=self.lifespan.state)

    def _end_connections(self) -> None:
        """From now on each reply ends its connection."""
        self.server_state.is_draining = True
        for connection in list(self.server_state.connections):
            if connection.cycle is not None and not connection.cycle.response_complete:
                connection.shutdown()

    async def _connections_end(self) -> None:
        while self.server_state.connections or self.server_state.tasks:
            await self.sweep()
            await asyncio.sleep(0.02)

    def _cut_off(self) -> None:
        """Answer what is open with 503 now, and wait for nobody."""
        self.config.timeout_graceful_shutdown = 0
        for task in list(self.server_state.tasks):
            task.cancel(CUT_OFF)


class SidePort(Port):
    """A port for probes or the admin interface. It stops after the service's port, and is soon done with it."""

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop accepting, and answer open requests for at most `SIDE_SECONDS`. A client that is slower does not change the exit code."""
        self._end_connections()
        for server in self.servers:
            server.close()
        for connection in list(self.server_state.connections):
            connection.shutdown()
        try:
            async with asyncio.timeout(SIDE_SECONDS):
                await self._connections_end()
        except TimeoutError:
            log.warning("side_port_cut_off", connections=len(self.server_state.connections))
            self._cut_off()
        await super().shutdown(sockets)


class Server(Port):
    """The service's port. To stop, it loses readiness, waits the delay, closes its listeners and finishes open requests."""

    def __init__(
        self, app: FastAPI, sockets: Sequence[socket.socket], ranker: RankingService, settings: Settings
    ) -> None:
        super().__init__(app, sockets, settings, lifespan=True)
        self.ranker = ranker
        self.settings = settings
        self.keys: KeyRing = app.state.keys
        self.exit_code = 0
        self.announces = True  # whether it says where the page is; of several workers one does
        self.on_listening: Callable[[], object] = lambda: None
        self.ends_at_once = True  # at a later second signal; a worker leaves that to its parent
        self.reload: Callable[[], None] | None = None
        """What SIGHUP does besides reading the keys. A worker has none: the parent tells the engine process."""
        self.stopped: list[bool] = []  # by `create_app`: whether the ranker finished all that it had begun
        self.is_last = False
        """Whether the process ends with it: then a signal that comes later must not change the exit code."""
        self._draining: asyncio.Task[None] | None = None
        self._signalled_at = 0.0  # monotonic seconds of the first signal
        self._loop: asyncio.AbstractEventLoop | None = None
        ranker.on_fatal = self.fatal

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, and tell people what to try."""
        self.keys.catch_up()
        await super().startup(sockets)
        self.on_listening()
        if self.announces:
            announce(self.settings, *self.sockets[0].getsockname()[:2])

    def fatal(self, reason: str) -> None:
        """Shut down after an error that only a new process can mend: waiting requests have their answers."""
        self.exit_code = EXIT_ENGINE_LOST if self.ranker.health().started else EXIT_FAILED
        self.should_exit = True
        log.error("fatal", reason=reason)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handle signals while serving, if this is the main thread."""
        self._loop = asyncio.get_running_loop()
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        handlers = {
            signal.SIGTERM: self.handle_exit,
            signal.SIGINT: self.handle_exit,
            signal.SIGHUP: self.handle_reload,
        }
        before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, signal.SIG_IGN if self.is_last else handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """First signal: drain. Another one, a second or more later: end at once. One that comes sooner was sent with the first: to the
        process by itself, and to its process group."""
        now = time.monotonic()
        if self._captured_signals:
            if self.ends_at_once and now >= self._signalled_at + SAME_SIGNAL_SECONDS:
                logs.drain()
                os._exit(128 + sig)
            return
        self._signalled_at = now
        self._captured_signals.append(sig)
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self.drain)

    def handle_reload(self, sig: int, frame: FrameType | None) -> None:
        """SIGHUP: read the keys again, then the checkpoints and the corpus."""
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self.keys.read_again)
        if self.reload is not None:
            self._loop.call_soon_threadsafe(self.reload)

    def drain(self) -> None:
        """Lose readiness now, go on serving for the delay, then stop."""
        if self._draining is None:
            self.ranker.begin_drain()
            self._draining = asyncio.get_running_loop().create_task(self._stop_after_delay())
            log.info("draining", delay_seconds=self.settings.drain.delay_seconds)

    async def _stop_after_delay(self) -> None:
        self._end_connections()
        await asyncio.sleep(self.settings.drain.delay_seconds)
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop accepting, answer every open request, stop the ranker."""
        self._end_connections()
        for server in self.servers:
            server.close()
        await asyncio.sleep(0.01)  # for the connections that were taken last to be made
        try:
            async with asyncio.timeout(GRACE_SECONDS):
                await self._connections_end()
        except TimeoutError:
            for connection in list(self.server_state.connections):
                connection.shutdown()
        try:
            async with asyncio.timeout(self.settings.drain.timeout_seconds):
                await self._connections_end()
        except TimeoutError:
            self.exit_code = self.exit_code or EXIT_FAILED
            log.error("drain_timeout", connections=len(self.server_state.connections))
            self._cut_off()
        await super().shutdown(sockets)
        if False in self.stopped:
            self.exit_code = self.exit_code or EXIT_FAILED
        log.info("stopped", exit_code=self.exit_code)


def run(
    settings: Settings,
    ranker: RankingService | None = None,
    sockets: Sequence[socket.socket] | None = None,
    *,
    announces: bool = True,
    on_listening: Callable[[], object] = lambda: None,
) -> int:
    """Serve until the end; the exit code of the process.

    A worker of several is given its ranker and its sockets, which it shares with the others; one of them `announces` what people can try.
    `on_listening` is called once requests are accepted.
    """
    local: ReloadableService | None = None
    if ranker is None:
        from app.service.local import create_ranker
        from app.telemetry.metrics import Metrics

        ranker = local = create_ranker(settings, Metrics())
        local.watchdog.watch_loop(hung)
    count_lost_lines(ranker.metrics)
    raise_file_limit()
    try:
        bound = bind_logged(settings.host, settings.port) if sockets is None else sockets
        sides = [] if local is None else side_ports(settings, local)
    except OSError:
        return EXIT_START
    stopped: list[bool] = []
    server = Server(create_app(settings, ranker, stopped.append), bound, ranker, settings)
    server.stopped, server.is_last = stopped, True
    server.announces, server.on_listening, server.ends_at_once = announces, on_listening, local is not None
    server.reload = None if local is None else local.reloads.reload_soon
    return run_to_end(server, server.serve(server.sockets), sides)


def run_engine(settings: Settings, engine: EngineProcess, path: str) -> int:
    """Rank for the workers that connect at `path`, until the end; the exit code of the process."""
    ranker = engine.ranker
    count_lost_lines(ranker.metrics)
    try:
        sides = side_ports(settings, ranker, engine.exposition)
    except OSError:
        return EXIT_START
    return run_to_end(engine, engine.serve(path), sides)


def count_lost_lines(metrics: Metrics) -> None:
    """From now on, count the log lines of this process that are not written."""
    logs.lines.on_drop = metrics.log_lines_dropped.labels("reader_slow").inc
    logs.writer.on_loss = metrics.log_lines_dropped.labels("not_written").inc


def run_to_end(process: Server | EngineProcess, serving: Awaitable[object], sides: Sequence[Port]) -> int:
    """Run what this process serves, and the ports at its side, in an event loop; the exit code of the process."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(serving, sides))
        end_if_failed(process.exit_code)
    if process.ranker.has_running_threads():
        logs.drain()
        os._exit(process.exit_code)  # a thread that loads or hangs in native code would not survive an orderly end
    return process.exit_code


async def serve(serving: Awaitable[object], sides: Sequence[Port]) -> None:
    """Await what is served; the ports at the side answer until that has ended."""
    others = [asyncio.ensure_future(side.serve(side.sockets)) for side in sides]
    await serving
    for side in sides:
        side.should_exit = True
    await asyncio.gather(*others)


def side_ports(
    settings: Settings, ranker: ReloadableService, exposition: Callable[[], Awaitable[bytes]] | None = None
) -> Sequence[Port]:
    """The ports for probes and for the admin interface, where they are set. Raises OSError, which is logged, where one is taken.
    `exposition`: the metrics of all processes."""
    ports = []
    if settings.probes.port is not None:
        app = create_probe_app(settings, ranker)
        if exposition is not None:
            app.state.scrapes = Scrapes(exposition)
        ports.append(SidePort(app, bind_logged(settings.probes.host, settings.probes.port), settings))
    if settings.admin.port is not None:
        sockets = bind_logged(ADMIN_HOST, settings.admin.port)
        ports.append(SidePort(create_admin_app(settings, ranker), sockets, settings))
    return ports


def bind_logged(host: str, port: int) -> list[socket.socket]:
    """What `bind` gives. Logs and raises OSError where it cannot listen."""
    try:
        return bind(host, port)
    except OSError as error:
        log.error("cannot_listen", host=host, port=port, reason=error.strerror)
        raise


def end_if_failed(code: int) -> None:
    """End at once with this exit code unless it is 0: the event loop would wait for threads that may hang, such as in a disk."""
    if code:
        logs.drain()
        os._exit(code)


def hung(reason: str) -> None:
    """End at once: the event loop itself is stuck, so nobody else can."""
    log.error("fatal", reason=reason)
    logs.drain()
    os._exit(EXIT_ENGINE_LOST)


def bind(host: str, port: int) -> list[socket.socket]:
    """A socket that listens for each address that `host` names, all on one port. Raises OSError unless every family that the machine has
    is bound."""
    listeners: list[socket.socket] = []
    failed: OSError | None = None
    try:
        for address_name in listen_hosts(host):
            for family, _, _, _, address in socket.getaddrinfo(
                address_name, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            ):
                try:
                    listeners.append(_listening(family, (address[0], port, *address[2:])))
                except OSError as error:
                    if error.errno not in NO_FAMILY:
                        raise
                    failed = error
                else:
                    port = listeners[-1].getsockname()[1]  # the same for all where it was 0
        if failed is not None and not listeners:
            raise failed
    except OSError:
        for opened in listeners:
            opened.close()
        raise
    return listeners


def _listening(family: int, address: tuple[Any, ...]) -> socket.socket:
    opened = socket.socket(family, socket.SOCK_STREAM)
    try:
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            opened.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        opened.bind(address)
        opened.listen(BACKLOG)  # now, not in uvicorn: two may bind one address, and only one may listen there
    except OSError:
        opened.close()
        raise
    return opened


def announce(settings: Settings, host: str, port: int) -> None:
    """Print or log the page's address if there is a page, and a working request if the checkpoint has an example."""
    reached = "127.0.0.1" if host in ANY_ADDRESS else host
    url = f"http://{f'[{reached}]' if ':' in reached else reached}:{port}"
    example = settings.checkpoint.absolute() / "example.json"
    curl = f"curl -s {url}/rank -H 'content-type: application/json' -d @'{example}'"
    example_line = {"try": curl} if os.path.isfile(example) else {}
    if not logs.are_for_people(settings.logs):
        if settings.explores:
            log.info("page", url=f"{url}/explore", **example_line)
        return
    page = {"page": f"{url}/explore"} if settings.explores else {}
    print(f"Phoenix ranking server: {settings.checkpoint.name} on {url}", file=sys.stderr)
    for name, value in (page | example_line | {"stop": "Ctrl-C"}).items():
        print(f"  {name:5} {value}", file=sys.stderr)


def raise_file_limit() -> None:
    """Raise the limit of open files from the shell's default to the system's maximum: each connection needs one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 1 << 20) if hard > 0 else 1 << 20, hard))
