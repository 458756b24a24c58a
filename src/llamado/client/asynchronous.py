"""The client for programs with an event loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Any, Literal, Self, overload

import httpx

from llamado.client import requests
from llamado.client.health import MAX_BODY, Backoff, Phase, StartupWatch, State, judge
from llamado.client.requests import Json, Messages, RequestFailed, ServerAddress, ServerUnavailable

__all__ = ["AsyncLlamaServerClient"]


class AsyncLlamaServerClient(ServerAddress):
    """One server, ours or the real llama-server; its methods are coroutines, else as LlamaServerClient.

    See ServerAddress for what can be set.
    """

    def _open(self) -> None:
        self._http = httpx.AsyncClient(
            base_url=self.base_url, timeout=self._request_timeout, headers=self._headers, verify=self._verify
        )

    # -- how it stands -------------------------------------------------------------------------------------------------

    async def check(self) -> State:
        """Look at `/health` once."""
        self.state = await self._look(self.health_check_timeout)
        return self.state

    async def wait_until_ready(self, told: Callable[[State, float], None] | None = None) -> bool:
        """Wait until requests are answered; False when `startup_timeout` is over, and `state` then says why.

        `told(state, seconds)` is called after each look.
        """
        began = time.monotonic()
        watch = StartupWatch(self.startup_timeout)
        while True:
            timeout = watch.look_timeout(time.monotonic() - began, self.health_check_timeout)
            self.state = watch.note(await self._look(timeout))
            elapsed = time.monotonic() - began
            if told is not None:
                told(self.state, elapsed)
            if self.state.ready:
                return True
            pause = watch.pause(elapsed)
            if pause is None:
                return False
            await asyncio.sleep(pause)

    async def is_alive(self) -> bool:
        """Liveness: whether a server answers, be it that it is loading."""
        return (await self.check()).alive

    async def is_healthy(self) -> bool:
        """Readiness: whether requests are answered now."""
        return (await self.check()).ready

    async def workload(self) -> State:
        """Readiness and workload: READY, or BUSY when no slot is free; otherwise as `check`."""
        state = await self.check()
        if state.phase is Phase.READY:
            slots = await self.get_slot_status()
            if slots and all(slot.get("is_processing") for slot in slots):
                self.state = state = State(Phase.BUSY, f"ready, and all {len(slots)} slots are at work")
        return state

    async def get_slot_status(self) -> list[Json] | None:
        """The server's slots; None where it does not tell (`--no-slots`, a key is missing, nobody answers)."""
        try:
            return requests.list_of(await self._get("/slots", self.health_check_timeout))
        except (RequestFailed, ServerUnavailable):
            return None

    async def metrics(self) -> dict[str, float]:
        """The numbers of `/metrics`. Raises RequestFailed (501: the server runs without `--metrics`)."""
        return requests.metrics((await self._get("/metrics", self.health_check_timeout)).text)

    async def props(self) -> Json:
        """`/props`: the model, its template, defaults. Raises RequestFailed."""
        return requests.object_of(await self._get("/props", self.health_check_timeout))

    # -- asking --------------------------------------------------------------------------------------------------------

    @overload
    async def completion(
        self, prompt: str | Sequence[int], *, stream: Literal[False] = False, **options: Any
    ) -> Json: ...
    @overload
    async def completion(
        self, prompt: str | Sequence[int], *, stream: Literal[True], **options: Any
    ) -> AsyncIterator[Json]: ...
    async def completion(
        self, prompt: str | Sequence[int], *, stream: bool = False, **options: Any
    ) -> Json | AsyncIterator[Json]:
        """Continue a prompt with `/completion`: its answer, or with `stream` its events (`content`, `stop` …).

        >>> async for event in await server.completion("Once", stream=True): ...

        Raises RequestFailed and ServerUnavailable.
        """
        path, body = requests.completion(prompt, stream, options)
        return self._events(path, body) if stream else await self._post(path, body)

    @overload
    async def chat_completion(self, messages: Messages, *, stream: Literal[False] = False, **options: Any) -> Json: ...
    @overload
    async def chat_completion(
        self, messages: Messages, *, stream: Literal[True], **options: Any
    ) -> AsyncIterator[Json]: ...
    async def chat_completion(
        self, messages: Messages, *, stream: bool = False, **options: Any
    ) -> Json | AsyncIterator[Json]:
        """The next message of a conversation by `/v1/chat/completions`, as OpenAI's API gives it; else as `completion`.

        `messages`: OpenAI's list, or the text of one message.
        """
        path, body = requests.chat(messages, stream, options)
        return self._events(path, body) if stream else await self._post(path, body)

    @overload
    async def chat(self, messages: Messages, *, stream: Literal[False] = False, **options: Any) -> str: ...
    @overload
    async def chat(self, messages: Messages, *, stream: Literal[True], **options: Any) -> AsyncIterator[str]: ...
    async def chat(self, messages: Messages, *, stream: bool = False, **options: Any) -> str | AsyncIterator[str]:
        """The text of the next message, or with `stream` its pieces."""
        path, body = requests.chat(messages, stream, options)
        if stream:
            return self._texts(path, body)
        return requests.text_of(await self._post(path, body))

    async def tokenize(self, text: str, *, add_special: bool = False) -> list[int]:
        """The tokens of a text by `/tokenize`. Raises RequestFailed and ServerUnavailable."""
        path, body = requests.tokenize(text, add_special)
        return requests.tokens_of(await self._post(path, body))

    async def close(self) -> None:
        """Let the connections go."""
        await self._http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    # ------------------------------------------------------------------------------------------------------------------

    async def _look(self, timeout: float) -> State:
        deadline = time.monotonic() + timeout
        try:
            async with self._http.stream("GET", "/health", timeout=timeout) as response:
                body = b""
                async for chunk in response.aiter_bytes():
                    body += chunk
                    if len(body) > MAX_BODY:
                        return requests.too_long()
                    if time.monotonic() > deadline:  # each byte in time, and the whole of them never
                        raise TimeoutError
        except Exception as error:
            return requests.judge_failure(error, timeout)
        return judge(response.status_code, response.headers, body)

    async def _get(self, path: str, timeout: float) -> httpx.Response:
        try:
            response = await self._http.get(path, timeout=timeout)
        except httpx.HTTPError as error:
            raise self._unreachable(error) from None
        if response.status_code != 200:
            raise requests.failure(response)
        return response

    async def _post(self, path: str, body: Json) -> Json:
        async with self._sent(path, body) as response:
            try:
                await response.aread()
            except httpx.HTTPError as error:
                raise self._unreachable(error) from None
            return requests.object_of(response)

    async def _events(self, path: str, body: Json) -> AsyncIterator[Json]:
        async with self._sent(path, body) as response:
            try:
                async for line in response.aiter_lines():
                    event = requests.event(line)
                    if event is not None:
                        yield event
            except httpx.HTTPError as error:
                raise self._unreachable(error) from None

    async def _texts(self, path: str, body: Json) -> AsyncIterator[str]:
        async for event in self._events(path, body):
            if text := requests.text_of(event):
                yield text

    @asynccontextmanager
    async def _sent(self, path: str, body: Json) -> AsyncIterator[httpx.Response]:
        """The answer to a request, 200; one that is answered by 503 is sent again."""
        began = time.monotonic()
        backoff = Backoff(0.1, 5.0)
        while True:
            request = self._http.build_request("POST", path, json=body)
            try:
                response = await self._http.send(request, stream=True)
            except httpx.HTTPError as error:
                raise self._unreachable(error) from None
            try:
                if response.status_code == 200:
                    yield response
                    return
                await response.aread()
            finally:
                await response.aclose()
            if response.status_code != 503:
                raise requests.failure(response)
            pause = backoff.pause(judge(503, response.headers, b"").retry_after)
            if time.monotonic() - began + pause > self.busy_timeout:
                raise ServerUnavailable(f"for {self.busy_timeout:g} s: {requests.failure(response)}")
            await asyncio.sleep(pause)
