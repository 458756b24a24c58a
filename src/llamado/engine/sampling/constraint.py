"""What limits the tokens of an answer, as the engine sees it: grammars, JSON schemas, budgets for thinking."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray


class Matcher(Protocol):
    """The state of one answer under a constraint; used by the engine's thread alone."""

    def mask(self) -> NDArray[np.uint32] | None:
        """Which tokens may come next: bit `i % 32` of word `i // 32` stands for token i. None: all may.

        At least one bit is set. The array is valid until the next call.
        """
        ...

    def accept(self, token: int) -> None:
        """Take note of the answer's next token, which the mask allowed."""
        ...


class Constraint(Protocol):
    """A compiled limit on answers; one may serve many requests at the same time."""

    def start(self) -> Matcher:
        """The state at the beginning of an answer. Raises LlamadoError."""
        ...
