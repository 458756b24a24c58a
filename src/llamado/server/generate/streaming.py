"""Events from the engine's thread to HTTP responses, many streams with one wake-up."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol, runtime_checkable

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from llamado.engine.request import Done, Event, Failure, Progress, Request, Result, Timings, Token
from llamado.engine.sampling.params import RANDOM_SEED
from llamado.http.answer import json_response
from llamado.http.bodies import body_of
from llamado.http.connections import ABORT, WRITE
from llamado.http.request_log import current
from llamado.server.errors import ApiError, translate
from llamado.server.generate.threads import LONG_TEXT, off_loop
from llamado.server.model import ServedEngine

log = logging.getLogger("llamado.server")

# What may wait for clients that do not read, in probabilities; an event without any counts as _EVENT of them. It is
# about 50 MB.
MOST_UNREAD = 1 << 21
_EVENT = 4
# Seconds that the engine's thread leaves its core to the event loop after a step's tokens: several times what writing
# those of a dozen streams takes.
_LEFT_TO_LOOP = 0.001


class Mailbox:
    """Carries events from the engine's thread to the event loop.

    The loop is woken once for all events posted until it gets to run, so a step of the engine that makes a token for
    each of 100 streams costs one wake-up. What clients leave unread is bounded for all of them together: then the
    stream of which most waits is given up.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._delivered = threading.Event()
        self._delivered.set()
        self._unread: dict[Generation, int] = {}
        self._total = 0
        self._n_open = 0
        self._events: deque[tuple[Generation, int, Event]] = deque()
        self._woken = False

    def post(self, generation: Generation, index: int, event: Event) -> None:
        """Hand over an event; any thread."""
        self._events.append((generation, index, event))
        if not self._woken:
            self._woken = True
            self._delivered.clear()
            try:
                self._loop.call_soon_threadsafe(self._deliver)
            except RuntimeError:
                pass  # the loop is closed: nobody is left to read

    def _deliver(self) -> None:
        # Cleared before reading: an event posted from here on either is read below or schedules the next delivery.
        self._woken = False
        events = self._events
        reached: dict[Generation, None] = {}
        while events:
            generation, index, event = events.popleft()
            generation.take(index, event)
            reached[generation] = None
        for generation in reached:
            generation.pass_on()
        self._delivered.set()

    def let_deliver(self) -> None:
        """Wait a moment until what was posted is delivered; the engine's thread."""
        self._delivered.wait(_LEFT_TO_LOOP)

    def begin(self) -> None:
        """A generation was given to the engine."""
        self._n_open += 1

    def end(self, generation: Generation) -> None:
        """A response is over."""
        self.forget(generation)
        self._n_open -= 1
        if not self._n_open:
            log.debug("all slots are idle")

    def wait(self, generation: Generation, events: Sequence[tuple[int, Event]]) -> None:
        """Events wait to be read."""
        weight = sum(_EVENT + _probabilities(event) for _, event in events)
        self._unread[generation] = self._unread.get(generation, 0) + weight
        self._total += weight
        if self._total > MOST_UNREAD:
            log.warning("answer aborted: its client reads too slowly, and too many bytes wait for it")
            max(self._unread, key=self._unread.__getitem__).give_up()

    def forget(self, generation: Generation) -> None:
        """Nothing of a generation's waits any more."""
        self._total -= self._unread.pop(generation, 0)


@runtime_checkable
class EndsReasoning(Protocol):
    """What limits an answer, and can end the thoughts in it."""

    def end_reasoning(self) -> bool:
        """End them now; returns whether the model was thinking."""
        ...


class Generation:
    """The engine's answers to one HTTP request: one or several, numbered in the order of its prompts."""

    def __init__(
        self,
        mailbox: Mailbox,
        engine: ServedEngine,
        requests: Sequence[Request],
        *,
        parts: bool = True,
        control: EndsReasoning | None = None,
    ) -> None:
        """`parts`: whether tokens are wanted as they come, or only the results. `control`: what ends the thoughts."""
        self.requests = requests
        self._control = control
        self._parts = parts
        self._mailbox = mailbox
        self._engine = engine
        self.tasks: list[int] = []
        self._events: list[tuple[int, Event]] = []
        self._n_waiting = 0  # of those, the first, which the mailbox knows of
        self._waiter: asyncio.Future[None] | None = None
        self.sink: Callable[[Sequence[tuple[int, Event]]], bool] | None = None
        """Writes tokens as soon as they come while nobody is awake to read them; False where it cannot."""
        self._open = len(requests)
        self._n_tokens = [0] * len(requests)
        self._ended: set[int] = set()
        self.first_token: float | None = None
        """When it came, as `time.perf_counter()`."""
        self.gone = False
        self.close_connection: Callable[[], None] | None = None
        """Closes the client's connection without waiting for what it has not read."""

    def start(self) -> None:
        """Submit everything; an error of the engine leaves nothing running."""
        try:
            for i, request in enumerate(self.requests):
                if not request.prompt:
                    self.deliver(i, Done(_nothing(request)))
                    continue
                emit = partial(self._emit, i)
                self.tasks.append(self._engine.submit(request, emit, taken=self._mailbox.let_deliver))
        except BaseException:
            self.cancel()
            raise
        self._mailbox.begin()
        record = current.get()
        if record is not None:
            record.answering = self

    @property
    def n_prompt(self) -> int:
        """Tokens of all prompts."""
        return sum(len(request.prompt) for request in self.requests)

    @property
    def n_predicted(self) -> int:
        """Tokens of all answers so far."""
        return sum(self._n_tokens)

    def _emit(self, index: int, event: Event) -> None:
        # On the engine's thread. Where compute threads own all cores, every wake-up of the loop costs them time.
        if isinstance(event, Token):
            self._n_tokens[index] += len(event.tokens)
            if self.first_token is None:
                self.first_token = time.perf_counter()
        if self._parts or not isinstance(event, (Token, Progress)):
            self._mailbox.post(self, index, event)

    def cancel(self) -> None:
        """Stop what is still running; harmless when nothing is."""
        if self._open:
            self._open = 0
            for task in self.tasks:
                self._engine.cancel(task)

    def end_reasoning(self) -> str:
        """End the thoughts of what runs; returns why not, "" where it is done."""
        if not self.running:
            return "no active completion for this id"
        if self._control is None:
            return "reasoning control not enabled for this completion"
        return "" if self._control.end_reasoning() else "the model is not thinking"

    def hang_up(self) -> None:
        """The client is gone: cancel, and wake whoever reads."""
        self.gone = True
        self.cancel()
        self._drop()
        self.wake()

    def give_up(self) -> None:
        """The client does not read: close its connection, as if it had."""
        if self.close_connection is not None:
            self.close_connection()
        self.hang_up()

    def close(self) -> None:
        """The response is over: stop what runs, drop what was not read, and note what the answers came to."""
        self.cancel()
        self._events.clear()
        self._mailbox.end(self)
        record = current.get()
        if record is None:
            return
        record.answering = None
        record.first_token = self.first_token
        if self.tasks:
            prompts = {id(request.prompt): len(request.prompt) for request in self.requests}
            record.prompt_tokens += sum(prompts.values())
        for i, request in enumerate(self.requests):
            if i not in self._ended and self.tasks:
                record.cancelled(len(request.prompt), self._n_tokens[i])

    def _drop(self) -> None:
        self._events.clear()
        self._n_waiting = 0
        self._mailbox.forget(self)

    def deliver(self, index: int, event: Event) -> None:
        """Take an event that comes alone; event loop only."""
        self.take(index, event)
        self.pass_on()

    def take(self, index: int, event: Event) -> None:
        """Take one of several events; `pass_on` follows the last."""
        if self._open:
            self._events.append((index, event))

    def pass_on(self) -> None:
        """Have what was taken written or read: by the sink, where all of it are tokens and who reads sleeps."""
        events, waiter = self._events, self._waiter
        if not events:
            return
        if self.sink is not None and waiter is not None and not waiter.done() and self.sink(events):
            self._drop()
            return
        self._mailbox.wait(self, events[self._n_waiting :])
        self._n_waiting = len(self._events)
        self.wake()

    def wake(self) -> None:
        """Let `read` return."""
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    @property
    def running(self) -> bool:
        """Whether an answer is still to come from the engine."""
        return self._open > 0

    @property
    def finished(self) -> bool:
        return self._open == 0 and not self._events

    async def read(self) -> list[tuple[int, Event]]:
        """Events since the last read; waits for one. Empty after `wake` (a ping is due, or the client is gone)."""
        if not self._events and self._open:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        events, self._events, self._n_waiting = self._events, [], 0
        self._mailbox.forget(self)
        record = current.get()
        for index, event in events:
            if isinstance(event, (Done, Failure)):
                self._open = max(0, self._open - 1)
                self._ended.add(index)
                if record is not None and isinstance(event, Done):
                    record.answered(event.result)
        return events

    async def results(self) -> list[Result]:
        """All results in order. Raises ApiError; returns an empty list when the client is gone."""
        results: dict[int, Result] = {}
        while not self.finished:
            for index, event in await self.read():
                if isinstance(event, Done):
                    results[index] = event.result
                elif isinstance(event, Failure):
                    raise translate(event.error)
        return [] if self.gone else [results[i] for i in range(len(self.requests))]


def _nothing(request: Request) -> Result:
    """The answer to a prompt without tokens, as llama-server gives it."""
    return Result(
        content="",
        tokens=[],
        probs=[],
        stop_type="none",
        stopping_word="",
        truncated=False,
        n_prompt=0,
        n_cached=0,
        n_predicted=0,
        n_tokens_cached=0,
        has_new_line=False,
        timings=Timings(),
        id_slot=-1,
        id_task=-1,
        seed=RANDOM_SEED if request.sampling.seed is None else request.sampling.seed,
        request=request,
    )


EVENTS = "text/event-stream"
"""Streams of server-sent events, among which a comment may stand."""


class AnswerFormat(Protocol):
    """How one API writes a stream's parts; each method returns whole messages of `media_type`, b"" for none."""

    @property
    def media_type(self) -> str:
        """Of a stream."""
        ...

    def token(self, index: int, event: Token) -> bytes: ...

    def progress(self, index: int, event: Progress) -> bytes: ...

    def final(self, index: int, result: Result) -> bytes: ...

    def end(self) -> bytes: ...

    def error(self, error: ApiError) -> bytes:
        """An error inside of a stream that has begun."""
        ...

    def failure(self, error: ApiError) -> Response:
        """An error instead of an answer."""
        ...

    def answer(self, results: Sequence[Result]) -> bytes:
        """The body of an answer that is not streamed."""
        ...


async def watch(receive: Receive, hang_up: Callable[[], None]) -> None:
    """Call `hang_up` when the client closes its connection."""
    while (await receive())["type"] != "http.disconnect":
        pass
    hang_up()


class EventStream(Response):
    """A response that writes a generation's events as they come, and cancels it when the client goes away."""

    def __init__(self, generation: Generation, format: AnswerFormat, *, ping_interval: int = 30) -> None:
        super().__init__(media_type=format.media_type, headers={"x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._generation = generation
        self._format = format
        self._ping_interval = ping_interval
        self._more: Callable[[bytes], bool] | None = None
        self._failed: Exception | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        generation = self._generation
        body_of(scope).release()
        generation.close_connection = scope.get("extensions", {}).get(ABORT)
        watcher = asyncio.ensure_future(watch(receive, generation.hang_up))
        interval = self._ping_interval if self._format.media_type == EVENTS else -1
        ping = self._ping = _Ping(interval, generation.wake)
        started = False
        self._more = scope.get("extensions", {}).get(WRITE)
        try:
            while not generation.finished:
                events = await generation.read()
                if self._failed is not None:
                    raise self._failed
                if not started and events and isinstance(events[0][1], Failure):
                    # An answer that never began can still say so by its status.
                    response = self._format.failure(translate(events[0][1].error))
                    await response(scope, receive, send)
                    return
                data = await off_loop(partial(self._write, events), _weight(events))
                if generation.gone:
                    return
                if not data:
                    if not ping.due():
                        continue
                    data = b":\n\n"
                ping.sent()
                if not started:
                    await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                    started = True
                    if self._more is not None:
                        generation.sink = self._write_at_once
                await send({"type": "http.response.body", "body": data, "more_body": True})
            if generation.gone:
                return
            if not started:
                await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            generation.sink = None
            ping.stop()
            watcher.cancel()
            generation.close()

    def _write_at_once(self, events: Sequence[tuple[int, Event]]) -> bool:
        """See Generation.sink: what a task would do that is woken for each token costs several times as much."""
        more = self._more
        if more is None or not all(isinstance(event, Token) for _, event in events) or _weight(events) > LONG_TEXT:
            return False
        if not more(b""):  # asked before, as what is written is not written again
            return False
        try:
            data = self._write(events)
        except Exception as error:
            self._failed = error
            return False
        if data:
            more(data)
            self._ping.sent()
        return True

    def _write(self, events: Sequence[tuple[int, Event]]) -> bytes:
        format = self._format
        parts: list[bytes] = []
        for index, event in events:
            if isinstance(event, Token):
                parts.append(format.token(index, event))
            elif isinstance(event, Done):
                parts.append(format.final(index, event.result))
            elif isinstance(event, Progress):
                parts.append(format.progress(index, event))
            else:
                parts.append(format.error(translate(event.error)))
                self._generation.cancel()
                return b"".join(parts)
        if self._generation.finished:
            parts.append(format.end())
        return b"".join(parts) if len(parts) != 1 else parts[0]


def _weight(events: Sequence[tuple[int, Event]]) -> int:
    """How much there is to write, in probabilities and biases: there may be one for each token of the vocabulary."""
    weight = 0
    for _, event in events:
        weight += _probabilities(event)
        if isinstance(event, Done):
            weight += len(event.result.request.sampling.logit_bias)
    return weight


def _probabilities(event: Event) -> int:
    if isinstance(event, Token):
        return sum(len(p.top) for p in event.probs or ())
    return sum(len(p.top) for p in event.result.probs) if isinstance(event, Done) else 0


def _size(result: Result) -> int:
    return sum(len(p.top) for p in result.probs) + len(result.request.sampling.logit_bias)


class _Ping:
    """Wakes a stream that was silent for `interval` seconds."""

    def __init__(self, interval: int, wake: Callable[[], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._interval = interval
        self._wake = wake
        self._last = self._loop.time()
        self._timer = self._loop.call_later(interval, self._tick) if interval > 0 else None

    def sent(self) -> None:
        self._last = self._loop.time()

    def due(self) -> bool:
        return self._interval > 0 and self._loop.time() - self._last >= self._interval

    def _tick(self) -> None:
        if self.due():
            self._wake()
        wait = max(0.001, self._last + self._interval - self._loop.time()) if not self.due() else self._interval
        self._timer = self._loop.call_later(wait, self._tick)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()


class Answer(Response):
    """A response made of all results at once; the client's going away cancels the generation."""

    def __init__(self, generation: Generation, format: AnswerFormat) -> None:
        super().__init__(media_type="application/json")
        self._generation = generation
        self._format = format

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        generation = self._generation
        body_of(scope).release()
        generation.close_connection = scope.get("extensions", {}).get(ABORT)
        watcher = asyncio.ensure_future(watch(receive, generation.hang_up))
        response: Response
        try:
            results = await generation.results()
            if generation.gone:
                return
            weight = sum(map(_size, results))
            response = json_response(await off_loop(partial(self._format.answer, results), weight))
        except ApiError as error:
            response = self._format.failure(error)
        finally:
            watcher.cancel()
            generation.close()
        for name, value in self.headers.items():
            response.headers.setdefault(name, value)
        await response(scope, receive, send)


def begin(
    mailbox: Mailbox,
    engine: ServedEngine,
    requests: Sequence[Request],
    format: AnswerFormat,
    *,
    stream: bool,
    ping_interval: int,
    control: EndsReasoning | None = None,
) -> tuple[Generation, Response]:
    """Give requests to the engine; returns the response that writes what comes, and the generation behind it."""
    generation = Generation(mailbox, engine, requests, parts=stream, control=control)
    generation.start()
    if stream:
        return generation, EventStream(generation, format, ping_interval=ping_interval)
    return generation, Answer(generation, format)
