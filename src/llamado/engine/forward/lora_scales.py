"""How strong LoRA adapters are for requests that do not say."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from llamado.engine.errors import EngineError, InvalidRequest
from llamado.engine.forward.contract import Scales, as_scales


class DefaultScales:
    """The scales of all adapters of a model, which may change at any time, from any thread."""

    def __init__(self, scales: Sequence[float] = ()) -> None:
        """Raises ValueError for numbers that a float32 cannot hold."""
        self.n_adapters = len(scales)
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


def default_scales(scales: Sequence[float], apply: bool) -> DefaultScales:
    """Those of a server's flags; all 0 where they are not to be applied yet. Raises EngineError."""
    try:
        return DefaultScales([scale if apply else 0.0 for scale in scales])
    except ValueError as error:
        raise EngineError(str(error)) from None
