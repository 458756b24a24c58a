"""Scales of LoRA adapters: defaults, and those of a request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from llamado.engine.errors import EngineError, InvalidRequest
from llamado.engine.forward.contract import ActivatedScales, Scales, as_scales


class DefaultScales:
    """The scales of all adapters of a model, which any thread may change at any time."""

    def __init__(self, scales: Sequence[float] = (), invocations: Sequence[Sequence[int]] = ()) -> None:
        """`invocations`: the tokens that activate each adapter; empty for adapters that always apply.

        Raises ValueError for numbers that float32 cannot hold.
        """
        self.n_adapters = len(scales)
        self.invocations = [tuple(tokens) for tokens in invocations] or [()] * self.n_adapters
        self.now = as_scales(scales)
        """The scales of a request without its own."""

    @property
    def each(self) -> tuple[float, ...]:
        """The scales of all adapters, in float32."""
        return self.now or (0.0,) * self.n_adapters

    def set(self, named: Mapping[int, float]) -> None:
        """Set the scales of later requests; see `of`."""
        self.now = self.of(named)

    def of(self, named: Mapping[int, float]) -> Scales:
        """Return the scales for adapters by number: adapters that are not listed get 0, and unknown numbers are
        ignored.

        Raises InvalidRequest for a number that float32 cannot hold.
        """
        try:
            return as_scales(named.get(i, 0.0) for i in range(self.n_adapters))
        except ValueError as error:
            raise InvalidRequest(str(error)) from None

    def for_prompt(self, named: Mapping[int, float], prompt: Sequence[int]) -> Scales:
        """Return the scales of a request (default: the present ones). An activated LoRA applies from the last
        occurrence of its tokens in the prompt on, or not at all without one.

        As in llama-server, it also applies to one token before. Beside an adapter that always applies, it always does,
        too. Raises InvalidRequest for several activated ones.
        """
        scales = self.of(named) if named else self.now
        working = [i for i, scale in enumerate(scales) if scale]
        if not working or not all(self.invocations[i] for i in working):
            return scales
        if len(working) > 1:
            raise InvalidRequest("Cannot run multiple aLoRAs in a single request")
        at = _last_place(self.invocations[working[0]], prompt)
        if at is None:
            return ()
        return ActivatedScales(scales, at - 1) if at > 1 else scales


def _last_place(tokens: Sequence[int], prompt: Sequence[int]) -> int | None:
    """Return the position of the last occurrence of tokens, by llama-server's search: backwards, and a token that ended
    a partial match does not start another one.
    """
    left = len(tokens)
    for i in range(len(prompt) - 1, -1, -1):
        left = left - 1 if prompt[i] == tokens[left - 1] else len(tokens)
        if not left:
            return i
    return None


def default_scales(scales: Sequence[float], apply: bool, invocations: Sequence[Sequence[int]] = ()) -> DefaultScales:
    """Return the scales of a server's flags; all 0 unless `apply`. Raises EngineError."""
    try:
        return DefaultScales([scale if apply else 0.0 for scale in scales], invocations)
    except ValueError as error:
        raise EngineError(str(error)) from None
