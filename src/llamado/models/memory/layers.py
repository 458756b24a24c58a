"""What one layer remembers: of each token, or of a whole sequence."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class KeysValues:
    """Attention: a row of `k` and one of `v` elements per token; where `window` is given only the last ones are seen.

    A token at position p sees positions p - window + 1 to p, or where memory is `chunked` those from the last multiple
    of the window on. Where it is `symmetric` it sees half a window to each side. `head_k` and `head_v` are the elements
    of a head, where rows are those of heads. `block`: rows of a sequence begin at multiples of it. `index`: elements of
    a further row, F16, by which tokens are chosen. `pooled`: see Latent.
    """

    k: int
    v: int
    window: int = 0
    chunked: bool = False
    symmetric: bool = False
    head_k: int = 0
    head_v: int = 0
    block: int = 1
    index: int = 0
    pooled: int = 0


@dataclass(frozen=True, slots=True)
class Latent:
    """Multi-head latent attention (DeepSeek-V2, 2024): one row of `n` elements per token, keys and values in one.

    `window`: as that of KeysValues. `pooled`: elements, F16, that each token has of what several are together: so many
    tokens behind each other have one row.
    """

    n: int
    window: int = 0
    pooled: int = 0


@dataclass(frozen=True, slots=True)
class RecurrentState:
    """Recurrence: rows of F32 of these lengths for each sequence, however long it is."""

    widths: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SideBySide:
    """Attention and recurrence in one layer, each with what it remembers."""

    attention: KeysValues | Latent
    state: RecurrentState


@dataclass(frozen=True, slots=True)
class SharedMemory:
    """Nothing of its own: attention sees what an earlier `layer` remembers."""

    layer: int


LayerMemory = KeysValues | Latent | RecurrentState | SideBySide | SharedMemory
