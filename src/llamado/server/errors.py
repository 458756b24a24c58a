"""Error bodies as llama-server sends them: `{"error": {"code", "message", "type", …}}`."""

from __future__ import annotations

from typing import Any

import orjson

from llamado.engine.errors import ContextExceeded, EngineClosed, InvalidRequest, QueueFull, Unavailable
from llamado.errors import LlamadoError
from llamado.text.errors import TemplateError, TokenizerError
from llamado.text.grammar import ConstraintError, GrammarError

# llama-server's error types and their HTTP status (`format_error_response` in tools/server/server-common.cpp).
STATUS = {
    "invalid_request_error": 400,
    "authentication_error": 401,
    "permission_error": 403,
    "not_found_error": 404,
    "server_error": 500,
    "not_supported_error": 501,
    "unavailable_error": 503,
    "exceed_context_size_error": 400,
}


RETRY_AFTER = 5
"""Seconds: a worker that was started again is found within that."""


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


def translate(error: Exception) -> ApiError:
    """The body for an error of a lower room."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, ContextExceeded):
        extra = {"n_prompt_tokens": error.n_prompt_tokens, "n_ctx": error.n_ctx}
        return ApiError("exceed_context_size_error", str(error), **extra)
    if isinstance(error, (InvalidRequest, TemplateError, TokenizerError, GrammarError, ConstraintError)):
        return invalid(str(error))
    if isinstance(error, Unavailable):
        return ApiError("unavailable_error", str(error), retry_after=RETRY_AFTER)
    if isinstance(error, QueueFull):
        return ApiError("unavailable_error", str(error), retry_after=error.retry_after)
    if isinstance(error, EngineClosed):
        return ApiError("unavailable_error", str(error))
    if isinstance(error, RecursionError):
        return invalid("the request's JSON is nested too deeply")
    if isinstance(error, LlamadoError):
        return ApiError("server_error", str(error))
    return ApiError("server_error", f"{type(error).__name__}: {error}")
