"""Responses from engine events: one wake-up of the event loop delivers the events of all streams."""

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
from llamado.http.errors import shutting_down
from llamado.http.monitoring.request_log import current
from llamado.http.resumable.recorder import recorder_of
from llamado.http.streams import disconnected
from llamado.server.errors import ApiError, translate
from llamado.server.generate.threads import LONG_TEXT, off_loop
from llamado.server.model import ServedEngine

log = logging.getLogger("llamado.server")

# Most unread events of all clients together, in probabilities (about 50 MB). An event without any counts as _EVENT.
MOST_UNREAD = 1 << 21
_EVENT = 4
# Seconds that the engine's thread waits at most for the delivery of a step's tokens: several times what writing those
# of a dozen streams takes.
_DELIVERY_SECONDS = 0.001
# Requests of one body that are submitted without a pause of the event loop: some milliseconds.
_AT_ONCE = 32
# What writing a result takes besides its text, in characters (see LONG_TEXT).
_RESULT = 64


class Mailbox:
    """The queue of events from the engine's thread to the event loop.

    One wake-up of the loop delivers all events posted until it runs, so a step with a token for each of 100 streams
    costs one wake-up. Unread events are limited over all clients: above MOST_UNREAD the stream with most of them is
    aborted.
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
        """Add an event; any thread."""
        self._events.append((generation, index, event))
        if not self._woken:
            self._woken = True
            self._delivered.clear()
            try:
                self._loop.call_soon_threadsafe(self._deliver)
            except RuntimeError:
                pass  # the loop is closed, and with it all connections

    def _deliver(self) -> None:
        # Cleared before reading: an event posted from here on is either read below or schedules the next delivery.
        self._woken = False
        by_generation: dict[Generation, list[tuple[int, Event]]] = {}
        while self._events:
            generation, index, event = self._events.popleft()
            by_generation.setdefault(generation, []).append((index, event))
        for generation, events in by_generation.items():
            generation.receive(events)
        self._delivered.set()

    def flush(self) -> None:
        """Wait until posted events are delivered, for a millisecond at most; the engine's thread."""
        self._delivered.wait(_DELIVERY_SECONDS)

    def begin(self) -> None:
        """Count a generation that was submitted."""
        self._n_open += 1

    def end(self, generation: Generation) -> None:
        """Count a response that ended, and forget its unread events."""
        self.forget(generation)
        self._n_open -= 1
        if not self._n_open:
            log.debug("all slots are idle")

    def count_unread(self, generation: Generation, events: Sequence[tuple[int, Event]]) -> None:
        """Count unread events of a generation; abort the generation with most of them if there are too many."""
        weight = sum(_EVENT + _probabilities(event) for _, event in events)
        self._unread[generation] = self._unread.get(generation, 0) + weight
        self._total += weight
        if self._total > MOST_UNREAD:
            log.warning("answer aborted: its client reads too slowly, and clients have too much unread data")
            max(self._unread, key=self._unread.__getitem__).abort()

    def forget(self, generation: Generation) -> None:
        """Forget the unread events of a generation: they were read or dropped."""
        self._total -= self._unread.pop(generation, 0)


@runtime_checkable
class ReasoningControl(Protocol):
    """A constraint that can end the reasoning in an answer."""

    def end_reasoning(self) -> bool:
        """End the reasoning now; return False if the model is not reasoning."""
        ...


class Generation:
    """The engine's answers to one HTTP request, numbered in the order of its prompts."""

    def __init__(
        self,
        mailbox: Mailbox,
        engine: ServedEngine,
        requests: Sequence[Request],
        *,
        stream: bool = True,
        control: ReasoningControl | None = None,
    ) -> None:
        """`stream`: deliver tokens, too, not only results. `control`: ends the reasoning."""
        self.requests = requests
        self._control = control
        self._stream = stream
        self._mailbox = mailbox
        self._engine = engine
        self.tasks: list[int] = []
        self._events: list[tuple[int, Event]] = []
        self._waiter: asyncio.Future[None] | None = None
        self.sink: Callable[[Sequence[tuple[int, Event]]], bool] | None = None
        """Writes events at once while the task that reads them sleeps; returns False if it cannot."""
        self._open = len(requests)
        self._n_tokens = [0] * len(requests)
        self._ended: set[int] = set()
        self.first_token: float | None = None
        """Time of the first token, by `time.perf_counter()`."""
        self.gone = False
        self.close_connection: Callable[[], None] | None = None
        """Closes the client's connection without sending the rest."""
        self.on_close: Callable[[], None] | None = None
        """Called when the response ends."""

    async def start(self) -> None:
        """Submit all requests; other work of the event loop runs in between. If the engine rejects one, cancel the
        others and raise its error.
        """
        try:
            for i, request in enumerate(self.requests):
                if i % _AT_ONCE == _AT_ONCE - 1:
                    await asyncio.sleep(0)
                if not request.prompt:
                    self.receive([(i, Done(_empty_result(request)))])
                    continue
                emit = partial(self._emit, i)
                self.tasks.append(self._engine.submit(request, emit, flush=self._mailbox.flush))
        except BaseException:
            self.cancel()
            self._mailbox.forget(self)
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
        # On the engine's thread. If compute threads use all cores, every wake-up of the event loop costs them time.
        if isinstance(event, Token):
            self._n_tokens[index] += len(event.tokens)
            if self.first_token is None:
                self.first_token = time.perf_counter()
        if self._stream or not isinstance(event, (Token, Progress)):
            self._mailbox.post(self, index, event)

    def cancel(self) -> None:
        """Cancel the answers that still run."""
        if self._open:
            self._open = 0
            for task in self.tasks:
                self._engine.cancel(task)

    def end_reasoning(self) -> str:
        """End the reasoning of running answers; return "", or the reason if it cannot be ended."""
        if not self.running:
            return "no active completion for this id"
        if self._control is None:
            return "reasoning control not enabled for this completion"
        return "" if self._control.end_reasoning() else "the model is not thinking"

    def disconnect(self) -> None:
        """Cancel everything because the client is gone, and wake the task that reads."""
        self.gone = True
        self.cancel()
        self._events.clear()
        self._mailbox.forget(self)
        self.wake()

    def abort(self) -> None:
        """Close the connection of a client that does not read, and cancel everything."""
        if self.close_connection is not None:
            self.close_connection()
        self.disconnect()

    def close(self) -> None:
        """End the response: cancel running answers, drop unread events, and complete the request's log record."""
        self.cancel()
        self._events.clear()
        self._mailbox.end(self)
        if self.on_close is not None:
            self.on_close()
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
                record.cut_short(len(request.prompt), self._n_tokens[i], by_client=self.gone)

    def receive(self, events: Sequence[tuple[int, Event]]) -> None:
        """Write events with the sink if it can, else wake the task that reads them; event loop only."""
        if not self._open:
            return
        waiter = self._waiter
        if self.sink is not None and waiter is not None and not waiter.done() and self.sink(events):
            return
        self._events += events
        self._mailbox.count_unread(self, events)
        self.wake()

    def wake(self) -> None:
        """Let `read` return."""
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    @property
    def running(self) -> bool:
        """True while the engine generates an answer."""
        return self._open > 0

    @property
    def finished(self) -> bool:
        return self._open == 0 and not self._events

    async def read(self) -> list[tuple[int, Event]]:
        """Wait for events and return all since the last read; [] after `wake` (ping due, or client gone)."""
        if not self._events and self._open:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        events, self._events = self._events, []
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
        """Wait for all results and return them in order, or [] if the client is gone. Raises ApiError."""
        results: dict[int, Result] = {}
        while not self.finished:
            for index, event in await self.read():
                if isinstance(event, Done):
                    results[index] = event.result
                elif isinstance(event, Failure):
                    raise translate(event.error)
        return [] if self.gone else [results[i] for i in range(len(self.requests))]


def _empty_result(request: Request) -> Result:
    """Return llama-server's answer to a prompt without tokens."""
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
        seed=RANDOM_SEED if request.params.sampling.seed is None else request.params.sampling.seed,
        request=request,
    )


EVENTS = "text/event-stream"
"""The media type of streams that may have comments between the events, which serve as pings."""


class AnswerFormat(Protocol):
    """The answer format of one API. The methods for streams return whole messages of `media_type`, or b""."""

    @property
    def media_type(self) -> str:
        """The media type of a stream."""
        ...

    def token(self, index: int, event: Token) -> bytes: ...

    def progress(self, index: int, event: Progress) -> bytes: ...

    def final(self, index: int, result: Result) -> bytes: ...

    def end(self) -> bytes: ...

    def error(self, error: ApiError) -> bytes:
        """Return an error as the last message of a stream."""
        ...

    def failure(self, error: ApiError) -> Response:
        """Return the response for an error before the answer has begun."""
        ...

    def answer(self, results: Sequence[Result]) -> bytes:
        """Return the body of an answer that is not streamed."""
        ...


class EventStream(Response):
    """A streamed response: writes the events of a generation, and cancels it if the client disconnects.

    If the request is recorded, it writes to the recorder, and only a stop cancels the generation.
    """

    def __init__(self, generation: Generation, format: AnswerFormat, *, ping_interval: int = 30) -> None:
        super().__init__(media_type=format.media_type, headers={"x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._generation = generation
        self._format = format
        self._ping_interval = ping_interval
        self._write_now: Callable[[bytes], bool] | None = None
        self._error: Exception | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        generation = self._generation
        body_of(scope).release()
        generation.close_connection = scope.get("extensions", {}).get(ABORT)
        self._write_now = scope.get("extensions", {}).get(WRITE)
        recorder = recorder_of(scope)
        if recorder is not None:
            receive, send, self._write_now = recorder.receive, recorder.send, recorder.write
        with disconnected(receive, generation.disconnect):
            await self._stream(scope, receive, send)

    async def _stream(self, scope: Scope, receive: Receive, send: Send) -> None:
        generation = self._generation
        interval = self._ping_interval if self._format.media_type == EVENTS else -1
        ping = self._ping = _Ping(interval, generation.wake)
        started = False
        try:
            while not generation.finished:
                events = await generation.read()
                if self._error is not None:
                    raise self._error
                if not started and events and isinstance(events[0][1], Failure):
                    # Nothing is sent yet, so the response can have the error's status.
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
                    if self._write_now is not None:
                        generation.sink = self._write_at_once
                await send({"type": "http.response.body", "body": data, "more_body": True})
            if generation.gone:
                return
            if not started:
                await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        except asyncio.CancelledError:
            if started and not generation.gone:
                await send({"type": "http.response.body", "body": self._interrupted(), "more_body": False})
            raise
        finally:
            generation.sink = None
            ping.stop()
            generation.close()

    def _interrupted(self) -> bytes:
        """Return the last message of a stream whose task was cancelled, which happens at shutdown only."""
        error = shutting_down()
        record = current.get()
        if record is not None:
            record.reason = error.message
        return self._format.error(error)

    def _write_at_once(self, events: Sequence[tuple[int, Event]]) -> bool:
        """Write tokens without waking this response's task, which would cost several times as much for each token.

        Returns False, and writes nothing, for other events, many probabilities, or a connection with unsent data.
        """
        write = self._write_now
        if write is None or not all(isinstance(event, Token) for _, event in events) or _weight(events) > LONG_TEXT:
            return False
        if not write(b""):  # checked first, because `_write` advances the format's state
            return False
        try:
            data = self._write(events)
        except Exception as error:
            self._error = error
            return False
        if data:
            write(data)
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
    """Return the size of what is to be written, mostly probabilities and biases: up to one for each token of the
    vocabulary.
    """
    return sum(_size(event.result) if isinstance(event, Done) else _probabilities(event) for _, event in events)


def _probabilities(event: Event) -> int:
    if isinstance(event, Token):
        return sum(len(p.top) for p in event.probs or ())
    return sum(len(p.top) for p in event.result.probs) if isinstance(event, Done) else 0


def _size(result: Result) -> int:
    return _RESULT + sum(len(p.top) for p in result.probs) + len(result.request.params.sampling.logit_bias)


class _Ping:
    """A timer that wakes a stream after `interval` seconds without data; no timer if `interval` is not positive."""

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
    """A response that is not streamed: waits for all results, and cancels the generation if the client disconnects."""

    def __init__(self, generation: Generation, format: AnswerFormat) -> None:
        super().__init__(media_type="application/json")
        self._generation = generation
        self._format = format

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        generation = self._generation
        body_of(scope).release()
        generation.close_connection = scope.get("extensions", {}).get(ABORT)
        response: Response
        try:
            with disconnected(receive, generation.disconnect):
                results = await generation.results()
            if generation.gone:
                return
            weight = sum(map(_size, results))
            response = json_response(await off_loop(partial(self._format.answer, results), weight))
            response.headers["content-type"] = self.headers["content-type"]
        except ApiError as error:
            response = self._format.failure(error)
        finally:
            generation.close()
        for name, value in self.headers.items():
            response.headers.setdefault(name, value)
        await response(scope, receive, send)


async def begin(
    mailbox: Mailbox,
    engine: ServedEngine,
    requests: Sequence[Request],
    format: AnswerFormat,
    *,
    stream: bool,
    ping_interval: int,
    control: ReasoningControl | None = None,
) -> tuple[Generation, Response]:
    """Submit requests to the engine; return the generation, and the response that writes its events."""
    generation = Generation(mailbox, engine, requests, stream=stream, control=control)
    await generation.start()
    if stream:
        return generation, EventStream(generation, format, ping_interval=ping_interval)
    return generation, Answer(generation, format)
