"""Error bodies in llama-server's format: `{"error": {"code", "message", "type", …}}`."""

from __future__ import annotations

from typing import Any

import orjson

from llamado.errors import LlamadoError

# llama-server's error types and their HTTP status (`format_error_response` in tools/server/server-common.cpp).
STATUS = {
    "invalid_request_error": 400,
    "authentication_error": 401,
    "permission_error": 403,
    "not_found_error": 404,
    "rate_limit_error": 429,
    "server_error": 500,
    "not_supported_error": 501,
    "unavailable_error": 503,
    "exceed_context_size_error": 400,
}


_RESTART_SECONDS = 5  # in `Retry-After` during shutdown


class ApiError(LlamadoError):
    """A request fails with an error body. `extra`: further fields of it.

    `retry_after`: seconds until a retry is worthwhile.
    """

    def __init__(
        self, type: str, message: str, *, status: int | None = None, retry_after: int | None = None, **extra: Any
    ) -> None:
        super().__init__(message)
        self.retry_after = retry_after
        self.type = type
        self.message = message
        self.status = STATUS[type] if status is None else status
        self.extra = extra

    @property
    def error(self) -> dict[str, Any]:
        """The object under `error`."""
        return {"code": self.status, "message": self.message, "type": self.type, **self.extra}

    @property
    def body(self) -> bytes:
        """The JSON body."""
        return orjson.dumps({"error": self.error})


OLLAMA = frozenset(
    f"/api/{name}"
    for name in (
        "chat", "generate", "embed", "embeddings", "tags", "ps", "show", "version", "pull", "push", "create", "copy",
        "delete",
    )
)  # fmt: skip
"""Paths of Ollama's API, which reports errors as plain strings."""


ANTHROPIC = frozenset({"/v1/messages", "/v1/messages/count_tokens"})
"""Paths of Anthropic's API, which has its own error object and error types."""
# By HTTP status; all others are `api_error`.
_ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def anthropic_error(error: ApiError) -> dict[str, Any]:
    """Return an error in Anthropic's format, with llama-server's fields added."""
    return {"type": "error", "error": {**error.error, "type": _ANTHROPIC_TYPES.get(error.status, "api_error")}}


def error_body(error: ApiError, path: str) -> bytes:
    """Return the JSON body of an error in the format of the API that `path` belongs to."""
    if path in ANTHROPIC:
        return orjson.dumps(anthropic_error(error))
    return orjson.dumps({"error": error.message}) if path in OLLAMA else error.body


RESPONSES = frozenset({"/responses", "/v1/responses"})
"""Paths of OpenAI's Responses API, whose streams have named and numbered events."""


def error_event(error: ApiError, path: str, number: int) -> bytes:
    """Return an error as the last event of a stream, in the format of the API that `path` belongs to.

    `number`: the event's sequence number, for APIs that number events.
    """
    if path in ANTHROPIC:
        return b"event: error\ndata: " + error_body(error, path) + b"\n\n"
    if path in RESPONSES:
        event = {"type": "error", "sequence_number": number, **responses_error(error)}
        return b"event: error\ndata: " + orjson.dumps(event) + b"\n\n"
    return b"data: " + error.body + b"\n\n"


def responses_error(error: ApiError) -> dict[str, Any]:
    """Return the fields of an error event of the Responses API."""
    return {"code": error.type, "message": error.message, "param": None, "error": error.error}


class ClientDisconnected(LlamadoError):
    """The client closed its connection before its request was complete."""


def unexpected(error: Exception) -> ApiError:
    """Return 500 for an exception without an HTTP status of its own."""
    if isinstance(error, ApiError):
        return error
    return ApiError(
        "server_error", str(error) if isinstance(error, LlamadoError) else f"{type(error).__name__}: {error}"
    )


def invalid(message: str) -> ApiError:
    """Return 400: the request is malformed."""
    return ApiError("invalid_request_error", message)


def not_supported(message: str) -> ApiError:
    """Return 501: the request is valid, but this server does not support it."""
    return ApiError("not_supported_error", message)


def not_found() -> ApiError:
    """Return 404: the path, or the method on it, does not exist."""
    return ApiError("not_found_error", "File Not Found")


def shutting_down() -> ApiError:
    """Return 503: the process is shutting down, and neither begins nor continues answers."""
    message = "the server is shutting down: send the request again when it is back"
    return ApiError("unavailable_error", message, retry_after=_RESTART_SECONDS)


def loading() -> ApiError:
    """Return 503: the model is being loaded."""
    return ApiError("unavailable_error", "Loading model")
