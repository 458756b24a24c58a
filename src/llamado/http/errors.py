"""Error bodies as llama-server sends them: `{"error": {"code", "message", "type", …}}`."""

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


class ApiError(LlamadoError):
    """A request that is answered by an error body; `extra` holds further fields of it.

    `retry_after`: seconds after which asking again makes sense.
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
"""The paths of Ollama's API, where errors are a text."""


ANTHROPIC = frozenset({"/v1/messages", "/v1/messages/count_tokens"})
"""The paths of Anthropic's API, where an error's object has a type and error types are others."""
# By HTTP status; others are `api_error`.
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
    """An error in Anthropic's form, with llama-server's fields beside."""
    return {"type": "error", "error": {**error.error, "type": _ANTHROPIC_TYPES.get(error.status, "api_error")}}


def error_body(error: ApiError, path: str) -> bytes:
    """The JSON body of an error in the form of the API that a path belongs to."""
    if path in ANTHROPIC:
        return orjson.dumps(anthropic_error(error))
    return orjson.dumps({"error": error.message}) if path in OLLAMA else error.body


RESPONSES = frozenset({"/responses", "/v1/responses"})
"""The paths of OpenAI's Responses API, whose streams have named and numbered events."""


def error_event(error: ApiError, path: str, number: int) -> bytes:
    """Return an error as a stream's last event, in the form of the API that a path belongs to.

    `number`: of the event, where events are numbered.
    """
    if path in ANTHROPIC:
        return b"event: error\ndata: " + error_body(error, path) + b"\n\n"
    if path in RESPONSES:
        told = {"type": "error", "sequence_number": number, **responses_error(error)}
        return b"event: error\ndata: " + orjson.dumps(told) + b"\n\n"
    return b"data: " + error.body + b"\n\n"


def responses_error(error: ApiError) -> dict[str, Any]:
    """Return the fields of an error event of the Responses API."""
    return {"code": error.type, "message": error.message, "param": None, "error": error.error}


class ClientGone(LlamadoError):
    """The client closed its connection before its request was complete."""


def unexpected(error: Exception) -> ApiError:
    """500: an error that no room gives a status."""
    if isinstance(error, ApiError):
        return error
    return ApiError(
        "server_error", str(error) if isinstance(error, LlamadoError) else f"{type(error).__name__}: {error}"
    )


def invalid(message: str) -> ApiError:
    """400: the client's request cannot be understood."""
    return ApiError("invalid_request_error", message)


def not_supported(message: str) -> ApiError:
    """501: understood, but this server does not do it."""
    return ApiError("not_supported_error", message)


def not_found() -> ApiError:
    """404 for a path (or a method on a path) that does not exist."""
    return ApiError("not_found_error", "File Not Found")


def loading() -> ApiError:
    """503 while the model is being loaded."""
    return ApiError("unavailable_error", "Loading model")
