"""The client for programs that wait."""

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
    """One server, ours or the real llama-server; methods may be called from several threads.

    See ServerAddress for what can be set.
    """

    def _open(self) -> None:
        self._http = httpx.Client(
            base_url=self.base_url, timeout=self._request_timeout, headers=self._headers, verify=self._verify
        )

    # -- how it stands -------------------------------------------------------------------------------------------------

    def check(self) -> State:
        """Look at `/health` once."""
        self.state = self._look(self.health_check_timeout)
        return self.state

    def wait_until_ready(self, told: Callable[[State, float], None] | None = None) -> bool:
        """Wait until requests are answered; False when `startup_timeout` is over, and `state` then says why.

        `told(state, seconds)` is called after each look.
        """
        began = time.monotonic()
        watch = StartupWatch(self.startup_timeout)
        while True:
            timeout = watch.look_timeout(time.monotonic() - began, self.health_check_timeout)
            self.state = watch.note(self._look(timeout))
            elapsed = time.monotonic() - began
            if told is not None:
                told(self.state, elapsed)
            if self.state.ready:
                return True
            pause = watch.pause(elapsed)
            if pause is None:
                return False
            time.sleep(pause)

    def is_alive(self) -> bool:
        """Liveness: whether a server answers, be it that it is loading."""
        return self.check().alive

    def is_healthy(self) -> bool:
        """Readiness: whether requests are answered now."""
        return self.check().ready

    def workload(self) -> State:
        """Readiness and workload: READY, or BUSY when no slot is free; otherwise as `check`."""
        state = self.check()
        if state.phase is Phase.READY:
            slots = self.get_slot_status()
            if slots and all(slot.get("is_processing") for slot in slots):
                self.state = state = State(Phase.BUSY, f"ready, and all {len(slots)} slots are at work")
        return state

    def get_slot_status(self) -> list[Json] | None:
        """The server's slots; None where it does not tell (`--no-slots`, a key is missing, nobody answers)."""
        try:
            return requests.list_of(self._get("/slots", self.health_check_timeout))
        except (RequestFailed, ServerUnavailable):
            return None

    def metrics(self) -> dict[str, float]:
        """The numbers of `/metrics`. Raises RequestFailed (501: the server runs without `--metrics`)."""
        return requests.metrics(self._get("/metrics", self.health_check_timeout).text)

    def props(self) -> Json:
        """`/props`: the model, its template, defaults. Raises RequestFailed."""
        return requests.object_of(self._get("/props", self.health_check_timeout))

    # -- asking --------------------------------------------------------------------------------------------------------

    @overload
    def completion(self, prompt: str | Sequence[int], *, stream: Literal[False] = False, **options: Any) -> Json: ...
    @overload
    def completion(self, prompt: str | Sequence[int], *, stream: Literal[True], **options: Any) -> Iterator[Json]: ...
    def completion(self, prompt: str | Sequence[int], *, stream: bool = False, **options: Any) -> Json | Iterator[Json]:
        """Continue a prompt with `/completion`: its answer, or with `stream` its events (`content`, `stop` …).

        Raises RequestFailed and ServerUnavailable.
        """
        path, body = requests.completion(prompt, stream, options)
        return self._events(path, body) if stream else self._post(path, body)

    @overload
    def chat_completion(self, messages: Messages, *, stream: Literal[False] = False, **options: Any) -> Json: ...
    @overload
    def chat_completion(self, messages: Messages, *, stream: Literal[True], **options: Any) -> Iterator[Json]: ...
    def chat_completion(self, messages: Messages, *, stream: bool = False, **options: Any) -> Json | Iterator[Json]:
        """The next message of a conversation by `/v1/chat/completions`, as OpenAI's API gives it; else as `completion`.

        `messages`: OpenAI's list, or the text of one message.
        """
        path, body = requests.chat(messages, stream, options)
        return self._events(path, body) if stream else self._post(path, body)

    @overload
    def chat(self, messages: Messages, *, stream: Literal[False] = False, **options: Any) -> str: ...
    @overload
    def chat(self, messages: Messages, *, stream: Literal[True], **options: Any) -> Iterator[str]: ...
    def chat(self, messages: Messages, *, stream: bool = False, **options: Any) -> str | Iterator[str]:
        """The text of the next message, or with `stream` its pieces."""
        path, body = requests.chat(messages, stream, options)
        if stream:
            return (text for event in self._events(path, body) if (text := requests.text_of(event)))
        return requests.text_of(self._post(path, body))

    def tokenize(self, text: str, *, add_special: bool = False) -> list[int]:
        """The tokens of a text by `/tokenize`. Raises RequestFailed and ServerUnavailable."""
        path, body = requests.tokenize(text, add_special)
        return requests.tokens_of(self._post(path, body))

    def close(self) -> None:
        """Let the connections go."""
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
                    if time.monotonic() > deadline:  # each byte in time, and the whole of them never
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
        """The answer to a request, 200; one that is answered by 503 is sent again."""
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
