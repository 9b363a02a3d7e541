"""In the engine process: calls the methods of the interface that fronts ask for, and sends back what they return."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import structlog

from app.engine.worker import Worker
from app.errors import InternalError, Overloaded, ServiceError
from app.fronts import wire
from app.fronts.link import Link
from app.interface import Reloads, Retrieval, ServedModel, ServedRetrieval, Service, Ticket
from app.service.reload import Reloader
from app.service.service import RankingService
from app.telemetry.exposition import Scrapes

log = structlog.get_logger("app.fronts.answers")


@dataclass(slots=True, eq=False)
class Front:
    """One linked front. `tickets`: those of its questions, by number; `served`: numbers of the models it may still ask for;
    `flushed`: the last flush that it has answered."""

    link: Link
    number: int
    tickets: dict[int, Ticket] = field(default_factory=dict)
    served: set[int] = field(default_factory=set)
    flushed: int = 0

    def release(self, number: int) -> None:
        """Release a question: its answer is no longer wanted."""
        if (ticket := self.tickets.pop(number, None)) is not None:
            ticket.release()

    def fail(self, number: int, error: Exception) -> None:
        """Answer a question with an error."""
        self.link.send(wire.Failed.of(number, error))


class Answering:
    """The `interface.Ticket` of a question that a task answers."""

    def __init__(self, task: asyncio.Task[None]) -> None:
        self._task = task

    def release(self) -> None:
        """Cancel the task: its answer is no longer wanted."""
        self._task.cancel()


class Answers:
    """Each handler in `by_question` raises ValueError for a question that no front of ours sends. Used by the event loop only."""

    def __init__(
        self,
        service: RankingService,
        reloads: Reloader,
        kept: Mapping[int, Worker[Any]],
        scrapes: Scrapes,
        look: Callable[[], object],
        flush: Callable[[], Awaitable[None]],
    ) -> None:
        """`kept`: workers that fronts may ask for, by number; `scrapes`: the metrics of all processes; `look` tells fronts what has
        changed; `flush` returns when they have read it."""
        self.tasks: set[asyncio.Task[None]] = set()
        ways = {name: self._rank if name == "rank" else self._ask for name in wire.METHODS}
        self.by_question: dict[type, Callable[[Front, Any], None]] = {
            method.question: functools.partial(ways[name], method) for name, method in wire.METHODS.items()
        }
        self._service = service
        self._reloads = reloads
        self._owners: dict[type, Any] = {Service: service, Retrieval: service.retrieval, Reloads: reloads}
        self._kept = kept
        self._scrapes = scrapes
        self._look = look
        self._flush = flush

    def _served(self, front: Front, question: Any, number: int, kind: type[Any]) -> Any:
        """Return the model that a question names. Raises ValueError for a wrong one: nothing later checks it, and native code trusts it."""
        if question.id in front.tickets:
            raise ValueError("a question with a number already in use")
        found = self._kept[number].model.served if number in front.served else None
        if not isinstance(found, kind):
            raise ValueError("a question about a model that is not served")
        return found

    def _rank(self, method: wire.Method, front: Front, asked: Any) -> None:
        """Admit and rank a request, or answer with the error."""
        model, service = self._served(front, asked, asked.model, ServedModel), self._service
        context, candidates = asked.context, asked.candidates
        if isinstance(context, str) and not len(candidates):
            raise ValueError("a request without candidates")
        try:
            if not asked.waits:
                service.check_open(asked.key)
            ticket = service.admit(
                model,
                candidates=len(candidates),
                history=0 if isinstance(context, str) else len(context),
                deadline=asked.deadline,
                key=asked.key,
                again=asked.again,
                waits=asked.waits,
            )
            front.tickets[asked.id] = ticket
            candidates.check(model.manifest.config)
            if not isinstance(context, str):
                context.check(model.manifest.config)
            service.rank(ticket, context, candidates, functools.partial(self._answer, front, method, asked.id))
        except ServiceError as error:
            front.release(asked.id)
            front.fail(asked.id, error)
            if isinstance(error, Overloaded):
                self._look()

    def _ask(self, method: wire.Method, front: Front, question: Any) -> None:
        """Call a method of the interface with the arguments of a question, and answer with what it calls back or returns."""
        arguments = {name: getattr(question, name) for name in method.arguments}
        config = None
        if method.served:
            kind = ServedRetrieval if method.owner is Retrieval else ServedModel
            served = arguments[method.served] = self._served(front, question, arguments[method.served], kind)
            config = served.manifest.config
        for argument in arguments.values():
            if hasattr(argument, "check"):
                argument.check(config)
        if not method.has_done:
            task = keep(self.tasks, self._await(method, front, question.id, arguments))
            if "deadline" in arguments:  # others run to their end, even if the front is gone
                front.tickets[question.id] = Answering(task)
            return
        try:
            self._service.check_open(arguments["key"])
            done = functools.partial(self._answer, front, method, question.id)
            front.tickets[question.id] = getattr(self._owners[method.owner], method.name)(**arguments, done=done)
        except ServiceError as error:
            front.fail(question.id, error)

    async def _await(self, method: wire.Method, front: Front, number: int, arguments: dict[str, Any]) -> None:
        """Call the method and answer the question, once every front has heard of any change it made."""
        work = self._scrapes.get if method.name == "exposition" else getattr(self._owners[method.owner], method.name)
        try:
            for name, argument in arguments.items():
                if isinstance(argument, Path):
                    arguments[name] = self._reloads.resolve(str(argument))
            result = await work(**arguments)
            if method.changes:
                self._look()
                await self._flush()
            front.link.send(method.answer(number, result if method.has_result else None))
        except Exception as error:
            if not isinstance(error, (ServiceError, *wire.FAILURES.values())):
                log.error("fault", exc_info=error)
                error = InternalError()
            front.fail(number, error)
        finally:
            front.tickets.pop(number, None)

    def _answer(self, front: Front, method: wire.Method, number: int, result: Any) -> None:
        if front.tickets.pop(number, None) is None:
            return
        if not isinstance(result, ServiceError):
            try:
                front.link.send(method.answer(number, result))
                return
            except ValueError as error:
                log.error("answer_too_long", reason=str(error))
                result = InternalError()
        front.fail(number, result)


def keep(tasks: set[asyncio.Task[None]], work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
    """Run `work` in a task that `tasks` holds until it ends."""
    task = asyncio.get_running_loop().create_task(work)
    tasks.add(task)
    task.add_done_callback(tasks.discard)
    return task
