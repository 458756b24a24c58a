"""A server in this process with scripted answers, for the page in a browser."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import uvicorn

sys.path.append(str(Path(__file__).parents[1] / "server"))

from fakes import FakeEngine, served

from llamado.engine.request import Event, Request, Token
from llamado.http.access import AccessRules
from llamado.server.app import create_app
from llamado.server.state import ServerState
from llamado.server.switches import Switches
from llamado.tools.api import ToolsApi
from llamado.tools.settings import ToolSettings

Say = Callable[[str], str]


class ScriptedEngine(FakeEngine):
    """An engine that answers each request in its own thread.

    `say` returns the answer to a prompt, which is sent in pieces of `piece` characters. `pause` is called after
    each; by default it sleeps for `delay` seconds.
    """

    def __init__(self, say: Say | str = "All is well.", *, piece: int = 4, delay: float = 0.0) -> None:
        super().__init__(delay=delay)
        self.say: Say | str = say
        self.piece = piece
        self.pause: Callable[[], object] = lambda: time.sleep(self.delay) if self.delay else None

    def submit(
        self, request: Request, emit: Callable[[Event], None], *, flush: Callable[[], None] | None = None
    ) -> int:
        request.validate()
        with self._wake:
            self._next += 1
            task = self._next
            self.requests.append(request)
            self._running.append((task, request, emit))
        threading.Thread(target=self._run_one, args=(task, request, emit), daemon=True).start()
        return task

    def _run_one(self, task: int, request: Request, emit: Callable[[Event], None]) -> None:
        one = FakeEngine.__new__(FakeEngine)  # it answers byte by byte; `gathered` joins the bytes
        one.__dict__.update(self.__dict__)
        prompt = bytes(token for token in request.prompt if token < 256).decode("utf-8", "replace")
        one.answer, one.delay = self.say if isinstance(self.say, str) else self.say(prompt), 0.0
        held: list[Token] = []
        length = 0

        def gathered(event: Event) -> None:
            nonlocal length
            if isinstance(event, Token):
                held.append(event)
                length += len(event.text)
                if length < self.piece:
                    return
            if held:
                emit(_joined(held))
                held.clear()
                length = 0
                self.pause()
            if not isinstance(event, Token):
                emit(event)

        try:
            one._answer(task, request, gathered)
        finally:
            with self._wake:
                self._running[:] = [running for running in self._running if running[0] != task]


def _joined(tokens: list[Token]) -> Token:
    """Join several tokens to one."""
    last = tokens[-1]
    probs = [prob for token in tokens for prob in token.probs or []] or None
    ids = [id for token in tokens for id in token.tokens]
    return Token("".join(token.text for token in tokens), ids, probs, last.index, last.timings)


@contextmanager
def scripted_server(
    engine: ScriptedEngine,
    *,
    source: str | None = None,
    keys: tuple[str, ...] = (),
    cluster: Any = None,
    tools: ToolSettings | None = None,
    **switches: Any,
) -> Iterator[str]:
    """Yield the address. `source`: chat template; `keys`: API keys."""
    ready: list[uvicorn.Server] = []

    async def serve() -> None:
        state = ServerState(
            access=AccessRules(api_keys=tuple(key.encode() for key in keys)), switches=Switches(**switches)
        )
        if tools is not None:
            state.tools = ToolsApi.open(tools, state.access, ["127.0.0.1"])
        state.served = served(engine, cluster=cluster) if source is None else served(engine, source, cluster)
        config = uvicorn.Config(create_app(state), port=0, log_level="error", lifespan="off")
        server = uvicorn.Server(config)
        server.install_signal_handlers = lambda: None  # type: ignore[method-assign]
        ready.append(server)
        await server.serve()

    thread = threading.Thread(target=lambda: asyncio.run(serve()), daemon=True)
    thread.start()
    while not (ready and ready[0].started):
        assert thread.is_alive()
        time.sleep(0.005)
    try:
        yield f"http://127.0.0.1:{ready[0].servers[0].sockets[0].getsockname()[1]}"
    finally:
        ready[0].should_exit = ready[0].force_exit = True
        thread.join(120)
        engine.close()
