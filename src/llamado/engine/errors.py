"""Errors between a request and its answer."""

from __future__ import annotations

from llamado.errors import LlamadoError


class EngineError(LlamadoError):
    """A request could not be answered."""


class InvalidRequest(EngineError):
    """A request is invalid; nothing was computed for it."""


class ContextExceeded(InvalidRequest):
    """The prompt alone fills the context of a slot (llama-server's `exceed_context_size_error`)."""

    def __init__(self, n_prompt_tokens: int, n_ctx: int) -> None:
        super().__init__(
            f"request ({n_prompt_tokens} tokens) exceeds the available context size ({n_ctx} tokens), try increasing it"
        )
        self.n_prompt_tokens = n_prompt_tokens
        self.n_ctx = n_ctx


class InputExceedsContext(ContextExceeded):
    """A text to embed is longer than the context."""

    def __init__(self, n_prompt_tokens: int, n_ctx: int) -> None:
        super().__init__(n_prompt_tokens, n_ctx)
        self.args = (
            f"input ({n_prompt_tokens} tokens) is larger than the max context size ({n_ctx} tokens): start the "
            f"server with -c {n_prompt_tokens}, if the model was trained for so many, or send shorter texts",
        )


class InputTooLarge(EngineError):
    """A text to embed that has to be processed as a whole does not fit into one batch."""

    def __init__(self, n_tokens: int, n_batch: int) -> None:
        super().__init__(
            f"input ({n_tokens} tokens) is too large to process. increase the physical batch size "
            f"(current batch size: {n_batch}): start the server with -b {n_tokens} -ub {n_tokens}, or send shorter ones"
        )
        self.n_tokens = n_tokens
        self.n_batch = n_batch


class EngineClosed(EngineError):
    """The engine is shutting down: it accepts no more requests and has ended the remaining ones."""


class ComputeFailed(EngineError):
    """The forward pass of a batch failed; only the requests in that batch are lost."""


class Unavailable(EngineError):
    """A device is lost and did not come back while requests may wait for it. A later retry may succeed."""


class QueueFull(EngineError):
    """The queue of requests is full; nothing was computed for this one.

    `retry_after`: seconds after which there is probably room, from the pace of recent answers.
    """

    def __init__(self, n_waiting: int, retry_after: int) -> None:
        super().__init__(f"{n_waiting} requests are waiting already; try again in {retry_after} s")
        self.n_waiting = n_waiting
        self.retry_after = retry_after


class ConstraintFailed(EngineError):
    """The constraint of an answer failed; only that answer is lost."""


class SlotFileError(InvalidRequest):
    """A saved slot cannot be used: missing file, another model, another cache type, or damaged."""


class SlotNotSaved(EngineError):
    """A slot could not be written to a file; an existing file is unchanged."""


class NoRoom(InvalidRequest):
    """A saved slot has more tokens than there are cells beside those of running answers."""


def compute_failed(error: Exception) -> LlamadoError:
    """Return the error for a failure in a forward pass; a LlamadoError is returned unchanged."""
    if isinstance(error, LlamadoError):
        return error
    named = ComputeFailed(f"the forward pass failed: {type(error).__name__}: {error}")
    named.__cause__ = error
    return named


def constraint_failed(error: Exception) -> LlamadoError:
    """Return the error for a failure of a constraint; a LlamadoError is returned unchanged."""
    if isinstance(error, LlamadoError):
        return error
    failed = ConstraintFailed(f"the constraint failed: {type(error).__name__}: {error}")
    failed.__cause__ = error
    return failed
