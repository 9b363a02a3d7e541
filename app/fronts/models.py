"""In the engine process: the linked fronts, and the models that they may ask for, numbered and kept until none of them asks any more."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from app.engine.worker import Worker
from app.fronts import frames
from app.fronts.link import Link
from app.interface import ServedModel, ServedRetrieval, Ticket
from app.service.service import RankingService


class Front:
    """One linked front and its requests."""

    def __init__(self, link: Link, number: int) -> None:
        self.link = link
        self.number = number
        self.tickets: dict[int, Ticket] = {}
        self.models: set[int] = set()  # it may still ask for these
        self.flushed = 0  # the last question that it has answered


@dataclass(slots=True, eq=False)
class Model:
    """A loaded model, or a retrieval model with its corpus, under the number by which fronts know it. `free`: no front will ask."""

    number: int
    served: ServedModel | ServedRetrieval
    free: Callable[[], None]
    is_second: bool = False

    def frame(self) -> frames.Model | frames.Corpus:
        """What a front is told of it."""
        served = self.served
        if isinstance(served, ServedRetrieval):
            manifests = served.manifest.to_json(), served.corpus.to_json()
            return frames.Corpus(self.number, *manifests, served.hidden, served.duplicates, served.notes)
        info = served.engine
        return frames.Model(
            self.number, served.manifest.to_json(), info.device, info.dtype, info.backend,
            info.candidate_positions, info.notes, self.is_second,
        )  # fmt: skip


class Models:
    """What serves now, of each kind, and what served before and is still asked for. Belongs to the event loop."""

    def __init__(self, service: RankingService, fronts: Collection[Front]) -> None:
        """`fronts` are those that are linked, whenever it is looked."""
        self._service = service
        self._fronts = fronts
        self._numbers = itertools.count(1)
        self._kept: dict[int, Model] = {}
        self._first: Model | None = None
        self._second: Model | None = None
        self._second_state: frames.SecondState | None = None
        self._corpus: Model | None = None

    def ranking(self, number: int) -> ServedModel | None:
        """The model of that number, if it ranks."""
        served = self._served(number)
        return served if isinstance(served, ServedModel) else None

    def retrieving(self, number: int) -> ServedRetrieval | None:
        """The model of that number, if it retrieves."""
        served = self._served(number)
        return served if isinstance(served, ServedRetrieval) else None

    def look(self) -> None:
        """Tell every front which models serve, if that has changed."""
        current, corpus = self._service.versions.current, self._service.retrieval.versions.current
        if current is not None and not _is(self._first, current.model.served):
            self._first = self._adopt(self._first, current)
        self._look_at_second()
        if corpus is not None and not _is(self._corpus, corpus.model.served):
            self._corpus = self._adopt(self._corpus, corpus)

    def welcome(self, front: Front) -> None:
        """Tell a new front."""
        for model in (self._first, self._second, self._corpus):
            if model is not None:
                self._tell(front, model)
        if self._second_state is not None:
            front.link.send(self._second_state)

    def leave(self, front: Front, number: int) -> None:
        """This front will ask for that model no more."""
        front.models.discard(number)
        model = self._kept.get(number)
        if model not in (self._first, self._second, self._corpus):
            self._free_if_left(model)

    def _served(self, number: int) -> ServedModel | ServedRetrieval | None:
        model = self._kept.get(number)
        return None if model is None else model.served

    def _look_at_second(self) -> None:
        found = self._service.second
        if found is None:
            return
        current, old = self._service.second_checkpoint.versions.current, self._second
        if current is None:
            self._second = None
            self._free_if_left(old)
        elif not _is(old, current.model.served):
            self._second = self._adopt(old, current, is_second=True)
        number = 0 if self._second is None else self._second.number
        state = frames.SecondState(number, found.reason, found.answers)
        if state != self._second_state:
            self._second_state = state
            for front in self._fronts:
                front.link.send(state)

    def _adopt(self, old: Model | None, worker: Worker[Any], *, is_second: bool = False) -> Model:
        """New requests are for this one. It and the one before are kept until no front asks for them any more."""
        worker.hold()
        number = next(self._numbers)
        new = self._kept[number] = Model(number, worker.model.served, worker.leave, is_second)
        for front in self._fronts:
            self._tell(front, new)
        self._free_if_left(old)
        return new

    def _tell(self, front: Front, model: Model) -> None:
        front.models.add(model.number)
        front.link.send(model.frame())

    def _free_if_left(self, model: Model | None) -> None:
        if model is not None and not any(model.number in front.models for front in self._fronts):
            del self._kept[model.number]
            model.free()


def _is(model: Model | None, served: ServedModel | ServedRetrieval) -> bool:
    return model is not None and model.served is served
