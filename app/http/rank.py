"""What one request and a batch share, from headers and bytes to scores and a reply, in the order in which things may fail."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from app.http.asgi import Headers, check_length, check_media_type, timeout_seconds_of
from app.http.auth import KeyRing
from app.interface import Ranked, ServedModel, Service, Ticket
from app.request import features, reply
from app.request.body import Body, count_items, decode
from app.request.reply import ReplyFormat
from app.request.validate import Request, check
from app.request.vocabulary import Vocabulary
from app.settings import Settings
from app.telemetry.exchange import Exchange
from model.inputs import Candidates, Context
from weights.format.manifest import Manifest

JSON_HEADER = (b"content-type", b"application/json")


@dataclass(slots=True)
class Prepared:
    """A valid request with its place in the queue of one model version, whatever version serves later ones."""

    model: ServedModel
    ticket: Ticket
    request: Request
    context: Context
    candidates: Candidates
    form: ReplyFormat
    check_seconds: float


class Ranking:
    """What one request and a batch share: bytes → prepared request → scores → bytes."""

    def __init__(self, service: Service, settings: Settings) -> None:
        self.service = service
        self.limits = settings.limits
        self.keys = KeyRing(settings.auth)
        self.metrics = service.metrics
        self._words: tuple[Manifest, Vocabulary, ReplyFormat] | None = None

    def open(self, headers: Headers, exchange: Exchange) -> float | None:
        """The deadline in seconds of the service's clock, None where the caller sets none. Refusals that need no body come here."""
        exchange.key = self.keys.caller(headers)
        self.service.check_open(exchange.key)
        check_media_type(headers)
        check_length(headers, self.limits.max_body_bytes)
        timeout_seconds = timeout_seconds_of(headers)
        return None if timeout_seconds is None else self.service.clock() + timeout_seconds

    def decode(self, body: bytes | bytearray, exchange: Exchange) -> Body:
        """One request's JSON with its types checked."""
        started = time.perf_counter()
        vocabulary, _ = self.words_of(self.service.model.manifest)
        typed = decode(body, self.limits, vocabulary)
        exchange.candidates += count_items(typed.candidates)
        exchange.history += count_items(typed.history)
        add_seconds(exchange, "parse", time.perf_counter() - started)
        return typed

    def prepare(self, body: Body, deadline: float | None, exchange: Exchange) -> Prepared:
        """Admit, check, make features: a request that is refused for want of room costs no checks."""
        started = time.perf_counter()
        model = self.service.model
        ticket = self.service.admit(
            model,
            candidates=count_items(body.candidates),
            history=count_items(body.history),
            deadline=deadline,
            key=exchange.key,
        )
        try:
            vocabulary, form = self.words_of(model.manifest)
            request = check(body, vocabulary)
            config = model.manifest.config
            context, candidates = features.context_of(request, config), features.candidates_of(request, config)
        except BaseException:
            ticket.release()
            raise
        if len(context) < len(request.history):
            self.metrics.history_truncated.inc()
        seconds = time.perf_counter() - started
        add_seconds(exchange, "parse", seconds)
        return Prepared(model, ticket, request, context, candidates, form, seconds)

    def render(self, job: Prepared, ranked: Ranked, parse_seconds: float, exchange: Exchange) -> Iterator[bytes]:
        """The reply to one request, in pieces: other requests should be served between those of a long one."""
        stages = {"parse": parse_seconds, "queue": ranked.queue_seconds, "forward": ranked.forward_seconds}
        for stage in ("queue", "forward"):  # requests of a batch run side by side
            exchange.stages[stage] = max(exchange.stages.get(stage, 0.0), stages[stage])
        self.metrics.reply_probabilities.record(job.form.action_names, ranked.scores.probabilities)
        pieces = reply.render(
            job.request,
            ranked.scores,
            job.form,
            history_used=len(job.context),
            timings_ms={stage: round(seconds * 1000, 3) for stage, seconds in stages.items()},
        )
        started = time.perf_counter()
        for piece in pieces:
            add_seconds(exchange, "serialize", time.perf_counter() - started)
            yield piece
            started = time.perf_counter()

    def headers(self, model: ServedModel, results: Sequence[Ranked], exchange: Exchange) -> list[tuple[bytes, bytes]]:
        """Headers of a reply with scores; a context counts as a hit when all of it came from the cache."""
        exchange.version = model.manifest.version
        exchange.cache = "hit" if results and all(ranked.cache == "hit" for ranked in results) else "miss"
        for stage in ("parse", "serialize"):
            self.metrics.stage[stage].observe(exchange.stages.get(stage, 0.0))
        timing = ", ".join(f"{stage};dur={seconds * 1000:.3f}" for stage, seconds in exchange.stages.items())
        return [
            JSON_HEADER,
            (b"x-model-version", exchange.version.encode()),
            (b"x-context-cache", exchange.cache.encode()),
            (b"server-timing", timing.encode()),
        ]

    def words_of(self, manifest: Manifest) -> tuple[Vocabulary, ReplyFormat]:
        """The vocabulary and the reply format of a model, kept for the manifest used last."""
        if self._words is None or self._words[0] is not manifest:
            self._words = (manifest, Vocabulary.of(manifest), ReplyFormat.of(manifest))
        return self._words[1], self._words[2]


def add_seconds(exchange: Exchange, stage: str, seconds: float) -> None:
    """A request may come through a stage several times."""
    exchange.stages[stage] = exchange.stages.get(stage, 0.0) + seconds
