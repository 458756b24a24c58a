"""What a model that drafts from another one's hidden states is."""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from llamado.models.base import Model
from llamado.models.hparams import HyperParameters


class Head(Model):
    """Reads a token and the hidden state that the target had when it predicted that token, and predicts the next one.

    `takes` are the widths of hidden states that it can be given: the first is that of the target's features, the last
    that of its own, which it gives out (FEATURES, of the rows that have logits) and takes in their place where the
    target was not asked yet.
    """

    first: ClassVar[int] = 0
    """The first token of a sequence that it reads: the state before the very first is not known."""
    tokens: NDArray[np.int64] | None = None
    """The target's tokens that its logits are of, where these are not all in order."""

    @abstractmethod
    def features(self, target: HyperParameters) -> tuple[int, ...]:
        """What it needs of a target, see BatchShape. Raises InvalidModel where that is not the one it was made for."""
