"""Fake model: bytes are tokens, and one thread answers every prompt with a fixed text."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import cache
from typing import Any

import httpx
import numpy as np
import orjson

from llamado.engine.errors import ContextExceeded, EngineClosed
from llamado.engine.request import (
    Away,
    Counters,
    Done,
    EngineSnapshot,
    Event,
    Failure,
    Fault,
    Progress,
    Request,
    Result,
    SlotSnapshot,
    StopType,
    Timings,
    Token,
    TokenProb,
    TokenProbs,
)
from llamado.http.access import AccessRules
from llamado.media.chunks import EncoderInput, MediaChunk, Piece
from llamado.media.media import Media, MediaKind
from llamado.server.app import create_app
from llamado.server.model import ModelInfo, ServedMedia, ServedModel
from llamado.server.state import ServerState
from llamado.server.switches import Switches
from llamado.text.grammar.source import GrammarError, GrammarSource, Trigger
from llamado.text.template.chat import ChatTemplate, EndTokens
from llamado.tools.api import ToolsApi
from llamado.tools.settings import ToolSettings

ANSWER = "Hello, wörld!\nAll is well."
EOS = 256
N_VOCAB = 257


class FakeTokenizer:
    n_vocab = N_VOCAB
    eog = frozenset({EOS})
    bos, add_bos = 2, False
    eos, add_eos = EOS, False
    fim_pre: int | None = 3
    fim_suf: int | None = 4
    fim_mid: int | None = 5
    fim_rep: int | None = None
    fim_sep: int | None = None

    def encode(self, text: str, *, add_special: bool = False, parse_special: bool = True) -> list[int]:
        return list(text.encode())

    def piece(self, token: int, *, special: bool = False) -> bytes:
        return bytes([token]) if token < 256 else b"<eos>" if special else b""

    def find(self, text: str) -> int | None:
        return ord(text) if len(text) == 1 else None

    def decode(self, tokens: Sequence[int], *, special: bool = False) -> str:
        return b"".join(self.piece(t, special=special) for t in tokens).decode("utf-8", "replace")


TEMPLATE = """
{%- for m in messages -%}
  {%- if m.role == 'forbidden' -%}{{ raise_exception('no such role') }}{%- endif -%}
  <{{ m.role }}>{{ m.content }}</>
{%- endfor -%}
{%- if add_generation_prompt -%}<assistant>{%- endif -%}
"""


@cache
def template(source: str = TEMPLATE) -> ChatTemplate:
    return ChatTemplate(source, EndTokens("<s>", "<eos>"))


class FakeConstraint:
    """A constraint without effect that records its arguments."""

    def __init__(self, source: GrammarSource | None, triggers: Sequence[Trigger] = ()) -> None:
        self.source, self.triggers = source, triggers
        self.tags: dict[str, Any] = {}
        self.ended = 0

    def start(self) -> Any:
        return self

    def mask(self) -> None:
        return None

    def accept(self, token: int) -> None:
        pass

    def end_reasoning(self) -> bool:
        self.ended += 1
        return True


class FakeGrammars:
    """Fake compiler: rejects grammars whose text has `bad`."""

    def compile(
        self, source: GrammarSource, *, triggers: Sequence[Trigger] = (), generation_prompt: str = ""
    ) -> FakeConstraint:
        if "bad" in source.text:
            raise GrammarError("a bad grammar")
        return FakeConstraint(source, triggers)

    def with_reasoning(self, inner: Any, **tags: Any) -> FakeConstraint:
        constraint = FakeConstraint(inner and inner.source)
        constraint.tags = tags
        return constraint


class FakeEngine:
    """Fake engine: sends events from its own thread, cancels at the next token, returns a snapshot at any time."""

    def __init__(self, answer: str = ANSWER, delay: float = 0.0, n_slots: int = 4) -> None:
        self.answer = answer
        self.delay = delay
        self.before: Callable[[int], object] = lambda i: None
        """Called before each token with its index in the answer."""
        self.n_slots = n_slots
        self.cancelled: list[int] = []
        self.requests: list[Request] = []
        self.fail: Exception | None = None
        self.fail_after = 0  # tokens
        self.fails_once = False
        self.n_cached = 0
        """Number of tokens of each prompt that are reported as cached."""
        self.fault: Fault | None = None
        self.degraded: tuple[Away, ...] = ()
        self.step_seconds = 0.0
        self._wake = threading.Condition()
        self._running: list[tuple[int, Request, Callable[[Event], None]]] = []
        self._next = 0
        self._stop = False
        self._thread = threading.Thread(target=self._run, name="fake-engine", daemon=True)
        self._thread.start()

    def submit(
        self, request: Request, emit: Callable[[Event], None], *, flush: Callable[[], None] | None = None
    ) -> int:
        request.validate()
        if len(request.prompt) >= 4096:
            raise ContextExceeded(len(request.prompt), 4096)
        with self._wake:
            self._next += 1
            self.requests.append(request)
            self._running.append((self._next, request, emit))
            self._wake.notify()
            return self._next

    def cancel(self, task_id: int) -> None:
        self.cancelled.append(task_id)

    @property
    def busy(self) -> int:
        return len(self._running)

    def snapshot(self) -> EngineSnapshot:
        running = list(self._running)
        slots = []
        for i in range(self.n_slots):
            task, request = (running[i][0], running[i][1]) if i < len(running) else (-1, None)
            slots.append(SlotSnapshot(i, 4096, request is not None, task, request, 1, 1, 0, True, False, -1, 1))
        counters = Counters(10, 2.0, 1, 20, 18, 3.0, 7, 14, 30)
        return EngineSnapshot(tuple(slots), counters, len(running), 0, 30, 4096, self.fault, degraded=self.degraded)

    def stalled(self) -> float:
        return self.step_seconds

    def close(self, timeout: float = 1.0) -> None:
        with self._wake:
            self._stop = True
            self._wake.notify()
        self._thread.join(timeout)

    def _run(self) -> None:
        while True:
            with self._wake:
                while not self._running and not self._stop:
                    self._wake.wait()
                if self._stop:
                    return
                task, request, emit = self._running[0]
            self._answer(task, request, emit)
            self._running.pop(0)

    def _answer(self, task: int, request: Request, emit: Callable[[Event], None]) -> None:
        if self.fail is not None:
            for i in range(self.fail_after):
                emit(Token("x", [120], None, i, None))
            failed, self.fail = self.fail, None if self.fails_once else self.fail
            emit(Failure(failed))
            return
        params, n_prompt, n_cached = request.params, len(request.prompt), self.n_cached
        if params.return_progress:
            timings = Timings(n_cached, n_prompt - n_cached, 1.0) if params.timings_per_token else None
            emit(Progress(n_prompt, n_cached, n_prompt, 1, timings))
        text, stop, word = self.answer, "eos", ""
        for candidate in params.stop:
            if candidate in text:
                text, stop, word = text[: text.index(candidate)], "word", candidate
        tokens = list(text.encode())
        if 0 <= params.n_predict < len(tokens):
            tokens, stop, word = tokens[: params.n_predict], "limit", ""
        prompt_probs = [
            TokenProbs(TokenProb(token, bytes([token]), math.nan, math.nan), ()) if not i
            else TokenProbs(one := TokenProb(token, bytes([token]), 0.25, math.log(0.25)), (one,)[: params.n_probs])
            for i, token in enumerate(request.prompt if params.prompt_probs else ())
        ]  # fmt: skip
        sent, content, all_probs = b"", "", []
        for i, token in enumerate(tokens):
            if task in self.cancelled:
                return
            self.before(i)
            if self._stop:
                emit(Failure(EngineClosed("the server is shutting down")))
                return
            if self.delay:
                time.sleep(self.delay)
            sent += bytes([token])
            try:
                piece = sent.decode()
                sent = b""
            except UnicodeDecodeError:
                piece = ""
            content += piece
            probs = None
            if params.n_probs:
                one = TokenProb(token, bytes([token]), 0.5, math.log(0.5))
                probs = [TokenProbs(one, (one, TokenProb(7, b"\x07", 0.0, -math.inf))[: params.n_probs])]
                all_probs += probs
            timings = Timings(n_cached, n_prompt - n_cached, 1.0, i + 1, 1.0) if params.timings_per_token else None
            emit(Token(piece, [token], probs, i, timings, () if i else prompt_probs))
        kind: StopType = stop  # type: ignore[assignment]
        timings = Timings(n_cached, n_prompt - n_cached, 2.0, len(tokens), 3.0)
        seed = params.sampling.seed
        emit(
            Done(
                Result(
                    content=content, tokens=tokens, probs=all_probs, stop_type=kind, stopping_word=word,
                    truncated=False, n_prompt=n_prompt, n_cached=n_cached, n_predicted=len(tokens),
                    n_tokens_cached=n_prompt + len(tokens), has_new_line="\n" in content, timings=timings, id_slot=0,
                    id_task=task, seed=42 if seed is None else seed, request=request,
                    prompt_probs=prompt_probs,
                )
            )
        )  # fmt: skip


INFO = ModelInfo(
    name="fake", path="/models/fake.gguf", aliases=("fake",), n_ctx=4096, n_ctx_train=8192, n_vocab=N_VOCAB, n_embd=64,
    n_params=1000, size=2000, ftype="Q4_1", vocab_type=2, chat_template="{{ x }}", bos_token="<s>", eos_token="<eos>",
)  # fmt: skip


class FakeMedia:
    """Fake encoders: a picture of h rows becomes h tokens between `[` and `]`, a sound one token for 100 samples."""

    def __init__(self, *kinds: MediaKind, marker: str = "<x>") -> None:
        """`kinds`: those that the model takes; none: both."""
        self.marker = marker
        self.kinds = kinds or (MediaKind.IMAGE, MediaKind.AUDIO)
        self.prepared: list[Media] = []

    def prepare(self, media: Media) -> list[Piece]:
        self.prepared.append(media)
        n = len(media.data) if media.kind is MediaKind.IMAGE else len(media.data) // 100
        encoded = EncoderInput((n,), {"x": np.ascontiguousarray(media.data)})
        return ["[", MediaChunk(media.kind, encoded, n, media.digest), "]"]

    def served(self) -> ServedMedia:
        rates = {MediaKind.IMAGE: 0, MediaKind.AUDIO: 16000}
        found = {kind: rates[kind] for kind in self.kinds}
        return ServedMedia(prepare=lambda media: self.prepare(media), rates=found, marker=self.marker)


def served(
    engine: FakeEngine, source: str = TEMPLATE, cluster: Any = None, media: FakeMedia | None = None
) -> ServedModel:
    return ServedModel(
        media=None if media is None else media.served(),
        engine=engine,
        tokenizer=FakeTokenizer(),
        template=template(source),
        grammars=FakeGrammars(),
        info=INFO,
        n_slots=engine.n_slots,
        longest_token=lambda: 4,
        cluster=cluster,
    )


@asynccontextmanager
async def client_of(state: ServerState) -> AsyncIterator[httpx.AsyncClient]:
    """HTTP client of an application in this process."""
    transport = httpx.ASGITransport(app=create_app(state))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
        yield http


@asynccontextmanager
async def client(
    engine: FakeEngine | None = None,
    *,
    loaded: bool = True,
    access: AccessRules | None = None,
    source: str = TEMPLATE,
    tools: ToolSettings | None = None,
    media: FakeMedia | None = None,
    **switches: Any,
) -> AsyncIterator[httpx.AsyncClient]:
    """HTTP client of an application in this process; `client.state` and `client.engine` are its parts."""
    engine = engine or FakeEngine()
    state = ServerState(access=access or AccessRules(), switches=Switches(**switches))
    if loaded:
        state.served = served(engine, source, media=media)
    if tools is not None:
        state.tools = ToolsApi.open(tools, state.access, ["127.0.0.1"])
    async with client_of(state) as http:
        http.state, http.engine = state, engine  # type: ignore[attr-defined]
        try:
            yield http
        finally:
            engine.close()
            state.tools.close()


def run(coroutine: Any) -> Any:
    """Run an async test."""
    return asyncio.run(coroutine)


def send(
    path: str, body: Any = None, engine: FakeEngine | None = None, method: str = "POST", **options: Any
) -> httpx.Response:
    """Send one request to a new application; `options`: see `client`."""

    async def work() -> httpx.Response:
        async with client(engine, **options) as http:
            sent = {"content": body} if isinstance(body, bytes) else {"json": body}
            return await http.request(method, path, **sent)

    response: httpx.Response = run(work())
    return response


def read(response: httpx.Response) -> tuple[int, Any]:
    """Return the status, and the text of an event stream, the objects of JSON lines, or a JSON value."""
    kind = response.headers["content-type"]
    if kind.startswith("text/"):
        return response.status_code, response.text
    if kind == "application/x-ndjson":
        assert response.text.endswith("\n")
        return response.status_code, [orjson.loads(line) for line in response.text.splitlines()]
    return response.status_code, response.json()


def post(path: str, body: Any, engine: FakeEngine | None = None, **options: Any) -> tuple[int, Any]:
    return read(send(path, body, engine, **options))


def get(path: str, **options: Any) -> tuple[int, Any]:
    return read(send(path, method="GET", **options))


def typed_events(body: str) -> list[Any]:
    """Return the data of SSE messages whose event names are the types in their data."""
    parts = [part.split("\n") for part in body.split("\n\n") if part]
    found = [orjson.loads(data.removeprefix("data: ")) for _, data in parts]
    assert [name.removeprefix("event: ") for name, _ in parts] == [event["type"] for event in found]
    return found


def events(body: str) -> list[str]:
    """Return the data of each SSE message."""
    return [part.removeprefix("data: ") for part in body.split("\n\n") if part.startswith("data: ")]
