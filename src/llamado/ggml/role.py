"""What a weight is for: the part of a model it belongs to, and how much of it a token reads.

Whoever asks a file for a weight says its role; whoever places, measures, adapts or compares weights reads it. Names
only tell tensors apart.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto


class ModelPart(Enum):
    """A part of a model."""

    INPUT = auto()
    """Before the layers: the embedding, of which a token takes a row, and its norm."""
    LAYER = auto()
    OUTPUT = auto()
    """After the layers: the matrix that makes logits, a classifier, the norm before them."""
    SHARED = auto()
    """Small, and used in all layers: each device that has a layer has it."""


@dataclass(frozen=True, slots=True)
class Role:
    """One use of a weight; a weight that serves twice, as embedding and as output matrix, has two.

    `name` is what a tensor with this role alone is called: patterns that users give are matched with it. `layer`
    numbers the layer of a LAYER's weight. A weight that holds several experts' matrices has the number of `experts`,
    and how many of them are `used` for a token.
    """

    part: ModelPart
    name: str
    layer: int = -1
    experts: int = 1
    used: int = 1

    def bytes_read(self, nbytes: int, row_bytes: int) -> int:
        """Of a weight's bytes, with rows of so many, those that computing one token reads."""
        return row_bytes if self.part is ModelPart.INPUT else nbytes * self.used // self.experts
