"""Requests and responses of a llama server as data; the two clients send them."""

from __future__ import annotations

import json
import ssl
from collections.abc import Mapping, Sequence
from typing import Any, TypedDict, Unpack

import httpx
from prometheus_client.parser import text_string_to_metric_families

from llamado.client.health import CONNECTING, MAX_BODY, Phase, State
from llamado.errors import LlamadoError

Json = dict[str, Any]
Messages = str | Sequence[Mapping[str, Any]]


class RequestFailed(LlamadoError):
    """The server returned an error, with its HTTP `status` and llama-server's error `type`."""

    def __init__(self, message: str, *, status: int, type: str) -> None:
        super().__init__(message)
        self.status, self.type = status, type


class ServerUnavailable(LlamadoError):
    """The server does not answer, or answered 503 for too long."""


def base(url: str) -> str:
    """Return a server's URL without a trailing slash; `host:port` gets `http://`. Raises ServerUnavailable."""
    text = url.strip()
    if "://" not in text:
        text = f"http://{text}"
    text = text.rstrip("/")
    try:
        parsed = httpx.URL(text)
    except (httpx.InvalidURL, ValueError, TypeError) as error:
        raise ServerUnavailable(f"{url!r} is no address: {error}; expected http://host:port") from None
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise ServerUnavailable(f"{url!r} is no address of an HTTP server: expected http://host:port")
    return text


class ClientOptions(TypedDict, total=False):
    """Options of a client besides the timeouts of its checks."""

    busy_timeout: float
    """Seconds for which a request is retried after 503, with exponential backoff or as Retry-After says; 60."""
    request_timeout: float
    """Seconds without a byte after which a response is abandoned; 600."""
    api_key: str | None
    verify: ssl.SSLContext | bool
    """Certificates that an https:// server may present; True: those that this machine trusts, the default."""


class ServerAddress:
    """Address and timeouts of a server; base class of both clients.

    `startup_timeout`: seconds that `wait_until_ready` waits. `health_check_timeout`: seconds that one check may take.
    `options`: see ClientOptions. Raises ServerUnavailable for an invalid URL.
    """

    def __init__(
        self,
        base_url: str,
        startup_timeout: float = 300,
        health_check_timeout: float = 5,
        **options: Unpack[ClientOptions],
    ) -> None:
        if unknown := options.keys() - ClientOptions.__annotations__.keys():
            raise TypeError(f"unexpected keyword argument {min(unknown)!r}")
        self.base_url = base(base_url)
        self.startup_timeout = startup_timeout
        self.health_check_timeout = health_check_timeout
        self.busy_timeout = options.get("busy_timeout", 60.0)
        self.state: State = CONNECTING
        """Result of the last check."""
        self._request_timeout = httpx.Timeout(options.get("request_timeout", 600.0), connect=health_check_timeout)
        self._verify = options.get("verify", True)
        api_key = options.get("api_key")
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._open()

    def _open(self) -> None:
        """Create the connection pool."""
        raise NotImplementedError

    def _unreachable(self, error: httpx.HTTPError) -> ServerUnavailable:
        what = str(error) or type(error).__name__
        return ServerUnavailable(f"{self.base_url} cannot be asked: {what}; llamado wait {self.base_url} tells more")


def judge_failure(error: Exception, timeout: float) -> State:
    """Return the state for a /health request that failed with `error`; re-raise any other exception."""
    if isinstance(error, httpx.ConnectTimeout):
        return State(Phase.CONNECTING, f"no connection within {timeout:g} s; is the address right?")
    if isinstance(error, (httpx.TimeoutException, TimeoutError)):
        return State(Phase.CONNECTING, f"accepts connections, and does not answer within {timeout:g} s")
    if isinstance(error, httpx.ConnectError):
        return State(Phase.CONNECTING, f"cannot connect: {error}")
    if isinstance(error, httpx.RemoteProtocolError):
        return State(Phase.UNHEALTHY, f"something else answers there: it does not speak HTTP ({error})")
    if isinstance(error, httpx.HTTPError):
        return State(Phase.CONNECTING, f"the connection broke: {error or type(error).__name__}")
    raise error


def too_long() -> State:
    """Return the state for a /health response that is too long to come from a llama server."""
    return State(Phase.UNHEALTHY, f"something else answers there: /health is longer than {MAX_BODY} bytes")


def failure(response: httpx.Response) -> RequestFailed:
    """Return an error response as an exception. Its body must have been read."""
    error = _parsed(response)
    error = error.get("error") if isinstance(error, dict) else None
    if isinstance(error, dict):
        message, type = str(error.get("message", "")), str(error.get("type", ""))
    else:
        message, type = response.text[:200], ""
    where = f"{response.request.method} {response.request.url}"
    return RequestFailed(f"{where}: {response.status_code} {message}".rstrip(), status=response.status_code, type=type)


def object_of(response: httpx.Response) -> Json:
    """Return the JSON object of a response. Raises RequestFailed for anything else."""
    value = _parsed(response)
    if not isinstance(value, dict):
        where = f"{response.request.method} {response.request.url}"
        raise RequestFailed(f"{where}: answers no JSON object: {response.text[:80]!r}", status=200, type="")
    return value


def list_of(response: httpx.Response) -> list[Json] | None:
    """Return the objects of a response that is a JSON list of objects, else None."""
    value = _parsed(response)
    return value if isinstance(value, list) and all(isinstance(one, dict) for one in value) else None


def _parsed(response: httpx.Response) -> Any:
    """Return the JSON of a response, or None if it is invalid or nested too deep."""
    try:
        return json.loads(response.content)
    except (ValueError, RecursionError):
        return None


def completion(prompt: str | Sequence[int], stream: bool, options: Mapping[str, Any]) -> tuple[str, Json]:
    """Return path and body of a `/completion` request."""
    return "/completion", {**options, "prompt": prompt if isinstance(prompt, str) else list(prompt), "stream": stream}


def chat(messages: Messages, stream: bool, options: Mapping[str, Any]) -> tuple[str, Json]:
    """Return path and body of a `/v1/chat/completions` request; a string is one user message."""
    said = [{"role": "user", "content": messages}] if isinstance(messages, str) else [dict(m) for m in messages]
    return "/v1/chat/completions", {**options, "messages": said, "stream": stream}


def tokenize(text: str, add_special: bool) -> tuple[str, Json]:
    """Return path and body of a `/tokenize` request."""
    return "/tokenize", {"content": text, "add_special": add_special}


def tokens_of(value: Mapping[str, Any]) -> list[int]:
    """Return the token ids of a `/tokenize` response."""
    tokens = value.get("tokens")
    return [token for token in tokens if isinstance(token, int)] if isinstance(tokens, list) else []


def event(line: str) -> Json | None:
    """Return the JSON object of one line of an event stream, or None if it has none. Raises RequestFailed."""
    if not line.startswith("data:"):
        return None
    text = line[5:].strip()
    if text == "[DONE]":
        return None
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        raise RequestFailed(f"the stream holds what is no JSON: {text[:80]!r}", status=200, type="") from None
    if isinstance(value, dict) and isinstance(value.get("error"), dict):
        error = value["error"]
        code = error.get("code")
        status = code if isinstance(code, int) else 500
        raise RequestFailed(str(error.get("message")), status=status, type=str(error.get("type")))
    return value if isinstance(value, dict) else None


def text_of(value: Mapping[str, Any]) -> str:
    """Return the text of a response or stream event, of either API."""
    choices = value.get("choices")
    if not isinstance(choices, list):
        return str(value.get("content", ""))
    first = choices[0] if choices and isinstance(choices[0], dict) else {}
    said = first.get("delta") or first.get("message")
    text = said.get("content") if isinstance(said, dict) else None
    return text if isinstance(text, str) else ""


def metrics(text: str) -> dict[str, float]:
    """Parse Prometheus text into a dictionary. Keys include labels: `name{label="value"}`."""
    found = {}
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                labels = ",".join(f'{name}="{value}"' for name, value in sorted(sample.labels.items()))
                found[f"{sample.name}{{{labels}}}" if labels else sample.name] = float(sample.value)
    except (ValueError, LookupError, TypeError) as error:
        raise RequestFailed(f"/metrics answers what Prometheus cannot read: {error}", status=200, type="") from None
    return found
