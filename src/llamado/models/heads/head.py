"""Base class of draft heads that read a target model's hidden states."""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from llamado.models.base import Model
from llamado.models.hparams import HyperParameters


class Head(Model):
    """Reads a token and the target's hidden state that predicted it, and predicts the next token.

    `hidden_widths` are the accepted widths of hidden states. The first is that of the target's features. The last is
    that of the head's own state, which it outputs for the rows with logits (FEATURES). The head reads its own state for
    tokens that the target has not computed yet.
    """

    first: ClassVar[int] = 0
    """The first token of a sequence that it reads; the state before the very first token does not exist."""
    tokens: NDArray[np.int64] | None = None
    """The target tokens that its logits stand for; None: all, in order."""

    @abstractmethod
    def features(self, target: HyperParameters) -> tuple[int, ...]:
        """Return the target features it reads, see BatchShape. Raises InvalidModel if the target does not match."""
