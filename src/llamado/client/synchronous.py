"""The blocking client."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Literal, Self, overload

import httpx

from llamado.client import requests
from llamado.client.health import MAX_BODY, Backoff, Phase, StartupWatch, State, judge
from llamado.client.requests import Json, Messages, RequestFailed, ServerAddress, ServerUnavailable

__all__ = ["LlamaServerClient"]


class LlamaServerClient(ServerAddress):
    """Client of one llamado or llama-server; its methods are thread-safe. Parameters: those of ServerAddress."""

    def _open(self) -> None:
        self._http = httpx.Client(
            base_url=self.base_url, timeout=self._request_timeout, headers=self._headers, verify=self._verify
        )

    # -- status --------------------------------------------------------------------------------------------------------

    def check(self) -> State:
        """Request `/health` once and return the state."""
        self.state = self._look(self.health_check_timeout)
        return self.state

    def wait_until_ready(self, on_check: Callable[[State, float], None] | None = None) -> bool:
        """Wait until the server is ready; return False after `startup_timeout`, with the reason in `state`.

        `on_check(state, seconds)` is called after each check.
        """
        began = time.monotonic()
        watch = StartupWatch(self.startup_timeout)
        while True:
            timeout = watch.look_timeout(time.monotonic() - began, self.health_check_timeout)
            self.state = watch.note(self._look(timeout))
            elapsed = time.monotonic() - began
            if on_check is not None:
                on_check(self.state, elapsed)
            if self.state.ready:
                return True
            pause = watch.pause(elapsed)
            if pause is None:
                return False
            time.sleep(pause)

    def is_alive(self) -> bool:
        """Liveness: return True if the server answers, even while it loads."""
        return self.check().alive

    def is_healthy(self) -> bool:
        """Readiness: return True if the server accepts requests now."""
        return self.check().ready

    def workload(self) -> State:
        """Like `check`, but BUSY instead of READY if no slot is free."""
        state = self.check()
        if state.phase is Phase.READY:
            slots = self.get_slot_status()
            if slots and all(slot.get("is_processing") for slot in slots):
                self.state = state = State(Phase.BUSY, f"ready, and all {len(slots)} slots are at work")
        return state

    def get_slot_status(self) -> list[Json] | None:
        """Return the server's slots, or None if they are not available (`--no-slots`, missing key, no answer)."""
        try:
            return requests.list_of(self._get("/slots", self.health_check_timeout))
        except (RequestFailed, ServerUnavailable):
            return None

    def metrics(self) -> dict[str, float]:
        """Return the values of `/metrics`. Raises RequestFailed (501: the server runs without `--metrics`)."""
        return requests.metrics(self._get("/metrics", self.health_check_timeout).text)

    def props(self) -> Json:
        """Return `/props`: the model, its chat template, default parameters. Raises RequestFailed."""
        return requests.object_of(self._get("/props", self.health_check_timeout))

    # -- requests ------------------------------------------------------------------------------------------------------

    @overload
    def completion(self, prompt: str | Sequence[int], *, stream: Literal[False] = False, **options: Any) -> Json: ...
    @overload
    def completion(self, prompt: str | Sequence[int], *, stream: Literal[True], **options: Any) -> Iterator[Json]: ...
    def completion(self, prompt: str | Sequence[int], *, stream: bool = False, **options: Any) -> Json | Iterator[Json]:
        """Continue a prompt with `/completion`: return the response, or with `stream` its events (`content`, `stop` …).

        Raises RequestFailed and ServerUnavailable.
        """
        path, body = requests.completion(prompt, stream, options)
        return self._events(path, body) if stream else self._post(path, body)

    @overload
    def chat_completion(self, messages: Messages, *, stream: Literal[False] = False, **options: Any) -> Json: ...
    @overload
    def chat_completion(self, messages: Messages, *, stream: Literal[True], **options: Any) -> Iterator[Json]: ...
    def chat_completion(self, messages: Messages, *, stream: bool = False, **options: Any) -> Json | Iterator[Json]:
        """Like `completion`, for `/v1/chat/completions`: return OpenAI's response, or with `stream` its chunks.

        `messages`: OpenAI's list, or the text of one user message.
        """
        path, body = requests.chat(messages, stream, options)
        return self._events(path, body) if stream else self._post(path, body)

    @overload
    def chat(self, messages: Messages, *, stream: Literal[False] = False, **options: Any) -> str: ...
    @overload
    def chat(self, messages: Messages, *, stream: Literal[True], **options: Any) -> Iterator[str]: ...
    def chat(self, messages: Messages, *, stream: bool = False, **options: Any) -> str | Iterator[str]:
        """Return the text of the next message, or with `stream` its pieces."""
        path, body = requests.chat(messages, stream, options)
        if stream:
            return (text for event in self._events(path, body) if (text := requests.text_of(event)))
        return requests.text_of(self._post(path, body))

    def tokenize(self, text: str, *, add_special: bool = False) -> list[int]:
        """Return the token ids of a text. Raises RequestFailed and ServerUnavailable."""
        path, body = requests.tokenize(text, add_special)
        return requests.tokens_of(self._post(path, body))

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ------------------------------------------------------------------------------------------------------------------

    def _look(self, timeout: float) -> State:
        deadline = time.monotonic() + timeout
        try:
            with self._http.stream("GET", "/health", timeout=timeout) as response:
                body = b""
                for chunk in response.iter_bytes():
                    body += chunk
                    if len(body) > MAX_BODY:
                        return requests.too_long()
                    if time.monotonic() > deadline:  # bytes may trickle in, each in time
                        raise TimeoutError
        except Exception as error:
            return requests.judge_failure(error, timeout)
        return judge(response.status_code, response.headers, body)

    def _get(self, path: str, timeout: float) -> httpx.Response:
        try:
            response = self._http.get(path, timeout=timeout)
        except httpx.HTTPError as error:
            raise self._unreachable(error) from None
        if response.status_code != 200:
            raise requests.failure(response)
        return response

    def _post(self, path: str, body: Json) -> Json:
        with self._sent(path, body) as response:
            try:
                response.read()
            except httpx.HTTPError as error:
                raise self._unreachable(error) from None
            return requests.object_of(response)

    def _events(self, path: str, body: Json) -> Iterator[Json]:
        with self._sent(path, body) as response:
            try:
                for line in response.iter_lines():
                    event = requests.event(line)
                    if event is not None:
                        yield event
            except httpx.HTTPError as error:
                raise self._unreachable(error) from None

    @contextmanager
    def _sent(self, path: str, body: Json) -> Iterator[httpx.Response]:
        """Send a request and yield the 200 response; retry after 503. Raises RequestFailed and ServerUnavailable."""
        began = time.monotonic()
        backoff = Backoff(0.1, 5.0)
        while True:
            request = self._http.build_request("POST", path, json=body)
            try:
                response = self._http.send(request, stream=True)
            except httpx.HTTPError as error:
                raise self._unreachable(error) from None
            try:
                if response.status_code == 200:
                    yield response
                    return
                response.read()
            finally:
                response.close()
            if response.status_code != 503:
                raise requests.failure(response)
            pause = backoff.pause(judge(503, response.headers, b"").retry_after)
            if time.monotonic() - began + pause > self.busy_timeout:
                raise ServerUnavailable(f"for {self.busy_timeout:g} s: {requests.failure(response)}")
            time.sleep(pause)
