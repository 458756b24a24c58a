"""Translation of the errors of lower packages into error responses."""

from __future__ import annotations

from llamado.engine.errors import ContextExceeded, EngineClosed, InputTooLarge, InvalidRequest, QueueFull, Unavailable
from llamado.http.errors import (
    STATUS,
    ApiError,
    ClientDisconnected,
    invalid,
    loading,
    not_found,
    not_supported,
    unexpected,
)
from llamado.media.errors import MediaError
from llamado.text.errors import TemplateError, TokenizerError
from llamado.text.grammar.source import ConstraintError, GrammarError

__all__ = ["STATUS", "ApiError", "invalid", "loading", "not_found", "not_supported", "too_long", "translate"]

RETRY_AFTER = 5
"""Seconds in `Retry-After`: a restarted worker rejoins within this time."""


def translate(error: Exception) -> ApiError:
    """Return the API error for an error of any package."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, ContextExceeded):
        extra = {"n_prompt_tokens": error.n_prompt_tokens, "n_ctx": error.n_ctx}
        return ApiError("exceed_context_size_error", str(error), **extra)
    if isinstance(error, InputTooLarge):
        return ApiError("exceed_context_size_error", str(error), n_prompt_tokens=error.n_tokens, n_ctx=error.n_batch)
    if isinstance(
        error,
        (ClientDisconnected, InvalidRequest, MediaError, TemplateError, TokenizerError, GrammarError, ConstraintError),
    ):
        return invalid(str(error))
    if isinstance(error, Unavailable):
        return ApiError("unavailable_error", str(error), retry_after=RETRY_AFTER)
    if isinstance(error, QueueFull):
        return ApiError("unavailable_error", str(error), retry_after=error.retry_after)
    if isinstance(error, EngineClosed):
        return ApiError("unavailable_error", str(error))
    if isinstance(error, RecursionError):
        return invalid("the request's JSON is nested too deeply")
    return unexpected(error)


def too_long(n_tokens: int, n_ctx: int, *, at_least: bool = False) -> ApiError:
    """Return the error for a prompt that does not fit; `at_least`: `n_tokens` is a lower bound."""
    count = f"at least {n_tokens}" if at_least else str(n_tokens)
    return ApiError(
        "exceed_context_size_error",
        f"request ({count} tokens) exceeds the available context size ({n_ctx} tokens), try increasing it",
        n_prompt_tokens=n_tokens,
        n_ctx=n_ctx,
    )
