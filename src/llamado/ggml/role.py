"""Weight roles: the part of a model that a weight belongs to, and how much of the weight one token reads.

Code that requests a weight from a file gives its role. Placement, cost estimates, adapters and comparisons read the
role; tensor names only identify tensors.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto


class ModelPart(Enum):
    """A part of a model."""

    INPUT = auto()
    """Before the layers: the token embedding, of which a token reads one row, and its norm."""
    LAYER = auto()
    OUTPUT = auto()
    """After the layers: the output norm and the matrix that computes logits, or a classifier."""
    SHARED = auto()
    """Small weights that every layer uses; each device with a layer holds a copy."""


@dataclass(frozen=True, slots=True)
class Role:
    """One use of a weight. A weight that is both the embedding and the output matrix has two roles.

    `name` is the tensor name in this role; patterns given by users are matched against it. `layer` is the layer number
    if `part` is LAYER. A weight that stacks expert matrices has `experts` of them, of which a token uses `used`.
    """

    part: ModelPart
    name: str
    layer: int = -1
    experts: int = 1
    used: int = 1

    def bytes_read(self, nbytes: int, row_bytes: int) -> int:
        """Return how many of the weight's `nbytes` bytes one token reads; `row_bytes` is the size of a row."""
        return row_bytes if self.part is ModelPart.INPUT else nbytes * self.used // self.experts
