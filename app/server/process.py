"""The process: listeners, signals, drain, exit code. Not for what a request means, nor for how it is computed.

what comes                    what the process does                                                      exits with
SIGTERM, SIGINT               readiness 503; serves for the drain delay; closes its listeners; answers   0
                              what was begun, for at most the drain timeout                              1 after it
the same a second time        ends at once                                                               128 + signal
SIGHUP                        reads the present checkpoint again                                         –
the first load fails          answers who waits; then as after the drain delay                           1
the engine is lost            the same                                                                   70
no address to listen on       ends                                                                       3
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import resource
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import NamedTuple, Protocol

import structlog
import uvloop

from app.budgets import BACKLOG, CALL_CONNECTIONS, Budget
from app.exits import EXIT_ENGINE_LOST, EXIT_FAILED, EXIT_START
from app.http.asgi import Routes
from app.interface import Reloads, Service
from app.server.connection import Connection
from app.server.listener import Listener
from app.server.observer import Observer
from app.server.reader import Hosts
from app.settings import ANY_ADDRESS, Settings
from app.telemetry import logs

Handler = Callable[[int, FrameType | None], None]
LOOK_SECONDS = 0.1  # between two checks of `should_exit`, which any thread may set, and of connections' deadlines
LOOKS_A_SECOND = 10
OTHER_FILES = 128  # descriptors for what is no caller's connection: those of operators, the files of a reload

log = structlog.get_logger("app.server.process")


class Port(NamedTuple):
    """An address to listen on, and the routes for its requests. `is_counted`: its connections count towards the budget. Those of the
    operators' port do not, so that it answers even when there are too many others."""

    host: str
    port: int
    routes: Routes
    is_counted: bool


def serve(server: RankingServer, sockets: list[socket.socket] | None = None, front: int | None = None) -> int:
    """Run a server until its end; returns the exit code of the process. A front has a number and its sockets from its supervisor."""
    logs.configure(server.settings.logs, front=front)
    server.service.metrics.watch_log(logs.process_sink())
    _raise_file_limit()
    _fit_connections(server.observer.connections, server.settings)
    server.run(sockets)
    if server.service.has_running_threads():
        logs.process_sink().drain()
        os._exit(server.exit_code)  # a thread that loads or hangs in native code would not survive an orderly end
    return server.exit_code


class Other(Protocol):
    """A server of another protocol in the same event loop. `port` is the one it has after `start`."""

    host: str
    port: int

    async def start(self) -> None:
        """Listen. Raises OSError."""
        ...

    async def stop(self, seconds: float) -> None:
        """Accept nothing new, and finish open requests within this time."""
        ...


class RankingServer:
    """Listens, serves and stops. To stop, it loses readiness, waits the delay, closes its listeners and finishes open requests."""

    def __init__(
        self,
        ports: Sequence[Port],
        service: Service,
        reloads: Reloads,
        settings: Settings,
        others: Sequence[Other] = (),
        close: Callable[[], None] = lambda: None,
    ) -> None:
        """The first of `ports` is the service's; `others` are servers that listen by themselves; `close` is called at the end."""
        self.settings = settings
        self.service = service
        self.reloads = reloads
        self.ports = ports
        self.others = others
        self.observer = Observer(service.metrics, settings)
        self.should_exit = self.started = False
        self.tells = True  # logs where it listens; of several fronts only the first does
        self.exit_code = 0
        self.listeners: list[Listener] = []
        self._close = close
        self._signals = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ending: asyncio.Task[None] | None = None
        self.service.on_fatal = self.fatal

    def run(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve until the end. Raises SystemExit if an address is not available."""
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(self.serve(sockets))

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """As `run`, in a running loop."""
        with self.capture_signals():
            await self.startup(sockets)
            looks = 0
            while not self.should_exit:
                await asyncio.sleep(LOOK_SECONDS)
                self.observer.look(asyncio.get_running_loop().time())
                looks += 1
                if looks % LOOKS_A_SECOND == 0:
                    self.observer.tick()
            await self.shutdown()

    def fatal(self, reason: str) -> None:
        """Shut down after an error that only a new process can mend: answer waiting requests, then exit with a code that says so."""
        self.exit_code = EXIT_ENGINE_LOST if self.service.health().started else EXIT_FAILED
        self.should_exit = True
        log.error("fatal", reason=reason)  # logged last: acting comes first

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen; loading goes on in the background. `sockets` listen already, one for each port in the order of `Settings.addresses`."""
        given = iter(sockets or ())
        self._loop = asyncio.get_running_loop()
        self.service.start()
        listening = [self._listen(port, next(given, None)) for port in self.ports]
        if not all(listening) or not await self._start_others():
            await self._stop_service()
            raise SystemExit(EXIT_START)
        for listener in self.listeners:
            listener.start()
            log.info("listening", host=listener.socket.getsockname()[0], port=listener.socket.getsockname()[1])
        if self.tells:
            _tell(self.settings, *self.listeners[0].socket.getsockname()[:2])
        self.started = True
        if self.settings.reload.watch_seconds:
            self.reloads.watch(self.settings.reload.watch_seconds)

    async def shutdown(self) -> None:
        """Stop accepting, answer every open request, stop the service."""
        self.observer.drain()
        self.reloads.stop()
        others = [asyncio.ensure_future(other.stop(self.settings.drain.timeout_seconds)) for other in self.others]
        for listener in self.listeners:
            await listener.close()
        for connection in list(self.observer.open):
            connection.shutdown()
        try:
            async with asyncio.timeout(self.settings.drain.timeout_seconds):
                await self._connections_end()
        except TimeoutError:
            self.exit_code = self.exit_code or EXIT_FAILED
            log.error("drain_timeout", connections=len(self.observer.open))
        await asyncio.gather(*others)
        await self._stop_service()
        log.info("stopped", exit_code=self.exit_code)

    async def _stop_service(self) -> None:
        await self.service.stop(self.settings.drain.timeout_seconds)
        self._close()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handle signals while serving, if this is the main thread."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, handler) for number, handler in self.handlers().items()}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def handlers(self) -> dict[signal.Signals, Handler]:
        """The handler of each signal."""
        return {signal.SIGTERM: self.handle_exit, signal.SIGINT: self.handle_exit, signal.SIGHUP: self.handle_reload}

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """First signal: drain. Second: end at once."""
        self._signals += 1
        if self._signals > 1:
            logs.process_sink().drain()
            os._exit(128 + sig)
        self.soon(self.drain)

    def handle_reload(self, sig: int, frame: FrameType | None) -> None:
        """SIGHUP: read the present checkpoint again."""
        self.soon(self.reloads.reload_soon)

    def soon(self, call: Callable[[], None]) -> None:
        """Call this in the event loop; safe in a signal handler."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(call)
        elif call == self.drain:
            self.should_exit = True  # the loop has not started

    def drain(self) -> None:
        """Lose readiness now, go on serving for the delay, then stop."""
        if self._ending is not None:
            return
        self.service.begin_drain()
        self.observer.drain()
        self._ending = asyncio.get_running_loop().create_task(self._stop_after_delay())
        log.info("draining", delay_seconds=self.settings.drain.delay_seconds)

    async def _stop_after_delay(self) -> None:
        await asyncio.sleep(self.settings.drain.delay_seconds)
        self.should_exit = True

    async def _connections_end(self) -> None:
        while self.observer.open:
            self.observer.look(asyncio.get_running_loop().time())
            await asyncio.sleep(0.01)

    async def _start_others(self) -> bool:
        """Start the other servers; return whether all of them listen."""
        for other in self.others:
            try:
                await other.start()
            except OSError as error:
                log.error("cannot_listen", host=other.host, port=other.port, reason=str(error))
                return False
            log.info("listening", host=other.host, port=other.port)
        return True

    def _listen(self, port: Port, given: socket.socket | None) -> bool:
        """Open a listener; return whether the address was available."""
        protocol = functools.partial(
            Connection,
            asyncio.get_running_loop(),
            self.settings.connections,
            self.observer,
            port.routes,
            hosts=Hosts(self.settings.names_of(port.host, is_main=port.is_counted)),
            is_counted=port.is_counted,
        )
        try:
            listener = Listener(port.host, port.port, backlog=BACKLOG, protocol=protocol, given=given)
        except OSError as error:
            log.error("cannot_listen", host=port.host, port=port.port, reason=error.strerror)
            return False
        self.listeners.append(listener)
        return True


def _tell(settings: Settings, host: str, port: int) -> None:
    """Print or log the page's address if there is a page, and a working request if the checkpoint has an example."""
    reached = "127.0.0.1" if host in ANY_ADDRESS else host
    url = f"http://{f'[{reached}]' if ':' in reached else reached}:{port}"
    example = settings.checkpoint.absolute() / "example.json"
    curl = f"curl -s {url}/rank -H 'content-type: application/json' -d @'{example}'"
    told = {"try": curl} if os.path.isfile(example) else {}
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


def _raise_file_limit() -> None:
    """Raise the limit of open files from the shell's default to the system's maximum: each connection needs one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 1 << 20) if hard > 0 else 1 << 20, hard))


def _fit_connections(connections: Budget, settings: Settings) -> None:
    """Take no more connections than there are descriptors for: callers who hold all of them would keep out operators and reloads too."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    others = OTHER_FILES + (CALL_CONNECTIONS if settings.grpc.port is not None else 0)
    most = max(files - others, files // 2)
    if 0 < most < connections.limit:
        log.warning("connections_limited", connections=most, open_files=files)
        connections.limit = most
