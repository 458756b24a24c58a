"""A gateway in a thread, and replicas without a model, controlled by the test or by request bodies."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from typing import Any

import httpx
from waiting import GUARD, until


class StandIn:
    """One replica: `/health`, `/v1/models`, `/props`, `/slots`, `/metrics`, and a response to every POST.

    A body may ask for `stream` events, `hold` (events wait for the test's `go`), a `status`, `usage`, or `raw` bytes as
    the response. With `used`, the replica keeps a count of the request's tokens (`/usage`).
    """

    def __init__(self, name: str, *, models: tuple[str, ...] = ("m",), build: str = "b11434-llamado-1.0") -> None:
        self.name = name
        self.models = models
        self.build = build
        self.health: tuple[int, dict[str, Any]] = (200, {"status": "ok"})
        self.status = 200
        """Status of all responses to requests."""
        self.drop = 0
        """Number of further requests whose connections are closed without a response."""
        self.slots: list[dict[str, Any]] | None = None
        self.metrics = "# TYPE llamacpp:n counter\nllamacpp:n 1\n"
        self.requests: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.bodies: list[bytes] = []
        self.cancelled = 0
        self.used: dict[str, int] = {}
        """Tokens by usage id."""
        self.checks = 0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._open: set[asyncio.StreamWriter] = set()
        self._server: asyncio.Server | None = None
        self._thaw = self._go = asyncio.Event()
        self.port = 0
        self._call(self._prepare())
        self.start()

    def _call(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(60)

    async def _prepare(self) -> None:
        self._thaw, self._go = asyncio.Event(), asyncio.Event()
        self._thaw.set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Listen, again after `kill`."""
        self._call(self._start())

    async def _start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port, limit=1 << 26)
        self.port = self._server.sockets[0].getsockname()[1]

    def kill(self) -> None:
        """Stop listening and reset all connections, as if the process had died."""
        self._call(self._kill())

    async def _kill(self) -> None:
        assert self._server is not None
        self._server.close()
        for writer in list(self._open):
            writer.transport.abort()

    def freeze(self) -> None:
        """Accept connections without responding."""
        self._loop.call_soon_threadsafe(self._thaw.clear)

    def thaw(self) -> None:
        self._loop.call_soon_threadsafe(self._thaw.set)

    def go(self) -> None:
        """Release held responses."""
        self._loop.call_soon_threadsafe(self._go.set)

    def close(self) -> None:
        self._call(self._end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(GUARD)

    async def _end(self) -> None:
        await self._kill()
        tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open.add(writer)
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
                first, *lines = head.split("\r\n")
                headers = {k.lower(): v for k, _, v in (line.partition(": ") for line in lines) if k}
                body = await reader.readexactly(int(headers.get("content-length", 0)))
                await self._thaw.wait()
                method, path = first.split(" ")[:2]
                if method == "POST":
                    self.headers.append(headers)
                    self.bodies.append(body)
                    is_form = headers.get("content-type", "").startswith("multipart/")
                    if (fields := {} if is_form else json.loads(body)).get("used") is not None:
                        self.used[headers["x-llamado-usage-id"]] = fields["used"]
                    if not await self._answer(fields, reader, writer):
                        return
                else:
                    self._look(*path.partition("?")[::2], writer)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self._open.discard(writer)
            writer.transport.abort()

    def _look(self, path: str, query: str, writer: asyncio.StreamWriter) -> None:
        if path == "/health":
            self.checks += 1
            self._reply(writer, *self.health)
        elif path == "/v1/models":
            self._reply(writer, 200, {"data": [{"id": m, "aliases": [f"{m}-alias"]} for m in self.models]})
        elif path == "/props":
            self._reply(writer, 200, {"total_slots": 4, "build_info": self.build, "who": self.name})
        elif path == "/usage" and (used := self.used.get(query.removeprefix("id="))) is not None:
            self._reply(writer, 200, {"total_tokens": used})
        elif path == "/slots":
            self._reply(writer, *((501, {}) if self.slots is None else (200, self.slots)))
        elif path == "/metrics":
            self._reply(writer, 200, self.metrics.encode(), "text/plain")
        else:
            self._reply(writer, 404, {})

    def _reply(self, writer: asyncio.StreamWriter, status: int, body: Any, kind: str = "application/json") -> None:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        more = "retry-after: 7\r\n" if status == 503 else ""
        head = f"HTTP/1.1 {status} X\r\ncontent-type: {kind}\r\ncontent-length: {len(data)}\r\n{more}\r\n"
        writer.write(head.encode() + data)

    async def _answer(self, fields: dict[str, Any], reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        self.requests.append(fields)
        if self.drop:
            self.drop -= 1
            return False
        usage = {"prompt_tokens": 5, "completion_tokens": 3, "total_tokens": 8}
        if "raw" in fields:
            writer.write(fields["raw"].encode("latin-1"))
            return True
        status = fields.get("status", self.status)
        if status != 200:
            self._reply(writer, status, {"error": {"code": status, "message": f"said {self.name}"}})
            return True
        gone = asyncio.ensure_future(reader.read(1))
        try:
            if fields.get("hold") == "all" and not await self._held(gone):
                return False
            if not fields.get("stream"):
                self._reply(writer, 200, {"name": self.name, "usage": usage})
                return True
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
            for i in range(int(fields["stream"])):
                if i == 1 and fields.get("hold") and not await self._held(gone):
                    return False
                last = {"usage": usage} if i == int(fields["stream"]) - 1 else {}
                part = f"data: {json.dumps({'name': self.name, 'i': i, **last})}\n\n".encode()
                writer.write(b"%x\r\n%b\r\n" % (len(part), part))
                await writer.drain()
            writer.write(b"0\r\n\r\n")
            return True
        finally:
            gone.cancel()
            with contextlib.suppress(asyncio.CancelledError, ConnectionError):
                await gone

    async def _held(self, gone: asyncio.Future[bytes]) -> bool:
        """Wait for `go`; return False if the gateway disconnects first."""
        going = asyncio.ensure_future(self._go.wait())
        await asyncio.wait([gone, going], return_when=asyncio.FIRST_COMPLETED)
        going.cancel()
        if gone.done():
            self.cancelled += 1
        return not gone.done()


class RunningGateway:
    """A running gateway and its client."""

    def __init__(self, url: str, server: Any, admin_key: str) -> None:
        self.url = url
        self.server = server
        self.http = httpx.Client(base_url=url, timeout=60)
        self.admin_key = admin_key
        self._admin = {"Authorization": f"Bearer {admin_key}"}

    def ask(self, **body: Any) -> httpx.Response:
        return self.http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "hi"}], **body})

    def hold(self, n: int) -> list[Ask]:
        """Send `n` requests that wait for `go`."""
        return [Ask(self, hold="all", messages=[{"role": "user", "content": str(i)}]) for i in range(n)]

    def names(self, n: int, text: str = "") -> set[str]:
        """Send `n` requests; return the names of the replicas that answered."""
        return {self.ask(messages=[{"role": "user", "content": f"{text}{i}"}]).json()["name"] for i in range(n)}

    def admin(self, method: str, path: str, **body: Any) -> httpx.Response:
        return self.http.request(method, path, json=body or None, headers=self._admin)

    def states(self) -> dict[str, dict[str, Any]]:
        return {r["name"]: r for r in self.admin("GET", "/gateway/replicas").json()["replicas"]}

    def until(self, name: str, **shown: Any) -> None:
        """Wait until the replica's status has these values."""
        until(lambda: shown.items() <= self.states().get(name, {}).items())

    def streaming(self, **body: Any) -> Any:
        """Return a streamed request as a context manager."""
        body = {"messages": [{"role": "user", "content": "hi"}], "stream": 3, **body}
        return self.http.stream("POST", "/v1/chat/completions", json=body)


class Ask(threading.Thread):
    """A request in its own thread; `answer()` waits for the response."""

    def __init__(self, gateway: RunningGateway, **body: Any) -> None:
        super().__init__(daemon=True)
        self._gateway, self._body = gateway, body
        self._answer: httpx.Response | None = None
        self.start()

    def run(self) -> None:
        self._answer = self._gateway.ask(**self._body)

    def answer(self) -> httpx.Response:
        self.join(60)
        assert self._answer is not None
        return self._answer
