"""The asyncio client."""

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
    """LlamaServerClient with coroutines as methods. Parameters: those of ServerAddress."""

    def _open(self) -> None:
        self._http = httpx.AsyncClient(
            base_url=self.base_url, timeout=self._request_timeout, headers=self._headers, verify=self._verify
        )

    # -- status --------------------------------------------------------------------------------------------------------

    async def check(self) -> State:
        """Request `/health` once and return the state."""
        self.state = await self._look(self.health_check_timeout)
        return self.state

    async def wait_until_ready(self, on_check: Callable[[State, float], None] | None = None) -> bool:
        """Wait until the server is ready; return False after `startup_timeout`, with the reason in `state`.

        `on_check(state, seconds)` is called after each check.
        """
        began = time.monotonic()
        watch = StartupWatch(self.startup_timeout)
        while True:
            timeout = watch.look_timeout(time.monotonic() - began, self.health_check_timeout)
            self.state = watch.note(await self._look(timeout))
            elapsed = time.monotonic() - began
            if on_check is not None:
                on_check(self.state, elapsed)
            if self.state.ready:
                return True
            pause = watch.pause(elapsed)
            if pause is None:
                return False
            await asyncio.sleep(pause)

    async def is_alive(self) -> bool:
        """Liveness: return True if the server answers, even while it loads."""
        return (await self.check()).alive

    async def is_healthy(self) -> bool:
        """Readiness: return True if the server accepts requests now."""
        return (await self.check()).ready

    async def workload(self) -> State:
        """Like `check`, but BUSY instead of READY if no slot is free."""
        state = await self.check()
        if state.phase is Phase.READY:
            slots = await self.get_slot_status()
            if slots and all(slot.get("is_processing") for slot in slots):
                self.state = state = State(Phase.BUSY, f"ready, and all {len(slots)} slots are at work")
        return state

    async def get_slot_status(self) -> list[Json] | None:
        """Return the server's slots, or None if they are not available (`--no-slots`, missing key, no answer)."""
        try:
            return requests.list_of(await self._get("/slots", self.health_check_timeout))
        except (RequestFailed, ServerUnavailable):
            return None

    async def metrics(self) -> dict[str, float]:
        """Return the values of `/metrics`. Raises RequestFailed (501: the server runs without `--metrics`)."""
        return requests.metrics((await self._get("/metrics", self.health_check_timeout)).text)

    async def props(self) -> Json:
        """Return `/props`: the model, its chat template, default parameters. Raises RequestFailed."""
        return requests.object_of(await self._get("/props", self.health_check_timeout))

    # -- requests ------------------------------------------------------------------------------------------------------

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
        """Continue a prompt with `/completion`: return the response, or with `stream` its events (`content`, `stop` …).

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
        """Like `completion`, for `/v1/chat/completions`: return OpenAI's response, or with `stream` its chunks.

        `messages`: OpenAI's list, or the text of one user message.
        """
        path, body = requests.chat(messages, stream, options)
        return self._events(path, body) if stream else await self._post(path, body)

    @overload
    async def chat(self, messages: Messages, *, stream: Literal[False] = False, **options: Any) -> str: ...
    @overload
    async def chat(self, messages: Messages, *, stream: Literal[True], **options: Any) -> AsyncIterator[str]: ...
    async def chat(self, messages: Messages, *, stream: bool = False, **options: Any) -> str | AsyncIterator[str]:
        """Return the text of the next message, or with `stream` its pieces."""
        path, body = requests.chat(messages, stream, options)
        if stream:
            return self._texts(path, body)
        return requests.text_of(await self._post(path, body))

    async def tokenize(self, text: str, *, add_special: bool = False) -> list[int]:
        """Return the token ids of a text. Raises RequestFailed and ServerUnavailable."""
        path, body = requests.tokenize(text, add_special)
        return requests.tokens_of(await self._post(path, body))

    async def close(self) -> None:
        """Close the connections."""
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
                    if time.monotonic() > deadline:  # bytes may trickle in, each in time
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
        """Send a request and yield the 200 response; retry after 503. Raises RequestFailed and ServerUnavailable."""
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
