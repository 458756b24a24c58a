"""Parameters for sampling on a device: the cuts applied to the largest logits of a row, and the random number."""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class Cut(IntEnum):
    """A step of a sampler chain after top-k, with its parameter; see engine/sampling/samplers.py for their meaning."""

    TOP_P = 0
    """The parameter is the probability."""
    MIN_P = 1
    """The parameter is the logarithm of the smallest kept probability, as a share of the largest one."""
    TEMPERATURE = 2
    """The parameter is the divisor; nothing is cut."""


class Drawing(NamedTuple):
    """Parameters for drawing one token from the largest logits of a row."""

    steps: NDArray[np.float64]
    """[n, 3]: a Cut, its parameter, and the least number of logits it leaves."""
    u: float
    """A random number in [0, 1)."""
