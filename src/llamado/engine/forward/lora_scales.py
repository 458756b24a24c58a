"""How strong LoRA adapters are for requests that do not say."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from llamado.engine.errors import EngineError, InvalidRequest
from llamado.engine.forward.contract import Activated, Scales, as_scales


class DefaultScales:
    """The scales of all adapters of a model, which may change at any time, from any thread."""

    def __init__(self, scales: Sequence[float] = (), invocations: Sequence[Sequence[int]] = ()) -> None:
        """`invocations`: the tokens with which each adapter begins to work, none of those that always do.

        Raises ValueError for numbers that a float32 cannot hold.
        """
        self.n_adapters = len(scales)
        self.invocations = [tuple(tokens) for tokens in invocations] or [()] * self.n_adapters
        self.now = as_scales(scales)
        """Those of a request that names none."""

    @property
    def each(self) -> tuple[float, ...]:
        """A number for each adapter, in float32."""
        return self.now or (0.0,) * self.n_adapters

    def set(self, named: Mapping[int, float]) -> None:
        """For requests that come from now on; see `of`."""
        self.now = self.of(named)

    def of(self, named: Mapping[int, float]) -> Scales:
        """What adapters named by number make: those that are not named have 0, and numbers of none are ignored.

        Raises InvalidRequest for a number that a float32 cannot hold.
        """
        try:
            return as_scales(named.get(i, 0.0) for i in range(self.n_adapters))
        except ValueError as error:
            raise InvalidRequest(str(error)) from None

    def for_prompt(self, named: Mapping[int, float], prompt: Sequence[int]) -> Scales:
        """Those of a request (of one that names none those of now): an activated LoRA works from the last place on
        where the prompt has its tokens, and where it has them nowhere not at all.

        As in llama-server one token more is computed with it, the one before; beside an adapter that always works it
        always does, too. Raises InvalidRequest for several activated ones.
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
        return Activated(scales, at - 1) if at > 1 else scales


def _last_place(tokens: Sequence[int], prompt: Sequence[int]) -> int | None:
    """Where the last occurrence of tokens begins, found as llama-server finds it: backwards, and what ended a match is
    not looked at as the end of another one.
    """
    left = len(tokens)
    for i in range(len(prompt) - 1, -1, -1):
        left = left - 1 if prompt[i] == tokens[left - 1] else len(tokens)
        if not left:
            return i
    return None


def default_scales(scales: Sequence[float], apply: bool, invocations: Sequence[Sequence[int]] = ()) -> DefaultScales:
    """Those of a server's flags; all 0 where they are not to be applied yet. Raises EngineError."""
    try:
        return DefaultScales([scale if apply else 0.0 for scale in scales], invocations)
    except ValueError as error:
        raise EngineError(str(error)) from None
