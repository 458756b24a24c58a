"""What can go wrong between a request and its answer."""

from __future__ import annotations

from llamado.errors import LlamadoError


class EngineError(LlamadoError):
    """A request could not be answered."""


class InvalidRequest(EngineError):
    """A request asks for something that cannot be done; nothing was computed for it."""


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
    """A text to embed that has to be seen as a whole does not fit into one batch."""

    def __init__(self, n_tokens: int, n_batch: int) -> None:
        super().__init__(
            f"input ({n_tokens} tokens) is too large to process. increase the physical batch size "
            f"(current batch size: {n_batch}): start the server with -b {n_tokens} -ub {n_tokens}, or send shorter ones"
        )
        self.n_tokens = n_tokens
        self.n_batch = n_batch


class EngineClosed(EngineError):
    """The engine is shutting down: it takes no more requests and has ended those that were left."""


class ComputeFailed(EngineError):
    """The forward pass of a batch failed; only the requests in that batch are lost."""


class Unavailable(EngineError):
    """A device is gone and did not come back in the time that requests may wait for it; later it may be there."""


class QueueFull(EngineError):
    """As many requests wait for a slot as may; nothing was computed for this one.

    `retry_after`: seconds after which there is probably room, from the pace of those that were answered lately.
    """

    def __init__(self, n_waiting: int, retry_after: int) -> None:
        super().__init__(f"{n_waiting} requests are waiting already; try again in {retry_after} s")
        self.n_waiting = n_waiting
        self.retry_after = retry_after


class ConstraintFailed(EngineError):
    """What limits an answer's tokens failed; only that answer is lost."""


class SlotFileError(InvalidRequest):
    """A saved slot cannot be used: no file of that name, another model's, another cache type's, or damaged."""


class SlotNotSaved(EngineError):
    """A slot could not be written to a file; the file that was there before is as it was."""


class NoRoom(InvalidRequest):
    """A saved slot has more tokens than there are cells beside those of running answers."""


def compute_failed(error: Exception) -> LlamadoError:
    """What is said of a failure in a forward pass; errors of our own say it themselves."""
    if isinstance(error, LlamadoError):
        return error
    named = ComputeFailed(f"the forward pass failed: {type(error).__name__}: {error}")
    named.__cause__ = error
    return named


def constraint_failed(error: Exception) -> LlamadoError:
    """What is said of a failure in what limits the tokens; errors of our own say it themselves."""
    if isinstance(error, LlamadoError):
        return error
    failed = ConstraintFailed(f"what limits the answer's tokens failed: {type(error).__name__}: {error}")
    failed.__cause__ = error
    return failed
