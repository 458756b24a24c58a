"""What a device may do with the largest of a row of logits: cut them down and draw one of them."""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class Cut(IntEnum):
    """A step of a sampler chain behind top-k, with its number; see engine/sampling/samplers.py for what each does."""

    TOP_P = 0
    """The number is the probability."""
    MIN_P = 1
    """The number is the logarithm of the least share of the largest one's probability."""
    TEMPERATURE = 2
    """Divides; nothing is cut."""


class Drawing(NamedTuple):
    """How one of a row's largest is drawn."""

    steps: NDArray[np.float64]
    """[n, 3]: a Cut, its number, and how many it leaves at least."""
    u: float
    """A random number in [0, 1)."""
