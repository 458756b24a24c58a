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


class EngineClosed(EngineError):
    """The engine is shutting down: it takes no more requests and has ended those that were left."""


class ComputeFailed(EngineError):
    """The forward pass of a batch failed; only the requests in that batch are lost."""


class Unavailable(EngineError):
    """A device is gone and did not come back in the time that requests may wait for it; later it may be there."""
