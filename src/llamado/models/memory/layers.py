"""Kinds of layer memory: rows per token, or state per sequence."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class KeysValues:
    """Attention: a row of `k` and one of `v` elements per token; with a `window` only the last tokens are seen.

    A token at position p sees positions p - window + 1 to p; with `chunked`, those from the last multiple of the window
    on; with `symmetric`, half a window to each side. `head_k` and `head_v` are head sizes, if rows consist of heads.
    Rows of a sequence start at multiples of `block`. `index`: elements of another row, F16, by which tokens are
    selected. `pooled`: see Latent.
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
    """Multi-head latent attention (DeepSeek-V2, 2024): one row of `n` elements per token for keys and values.

    `window`: as in KeysValues. `pooled`: a token's share, in F16 elements, of a row that several consecutive tokens
    have in common.
    """

    n: int
    window: int = 0
    pooled: int = 0


@dataclass(frozen=True, slots=True)
class RecurrentState:
    """Recurrence: F32 rows of these widths per sequence, independent of its length."""

    widths: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class AttentionAndState:
    """Attention and recurrence in one layer."""

    attention: KeysValues | Latent
    state: RecurrentState


@dataclass(frozen=True, slots=True)
class SharedMemory:
    """No memory of its own: attention reads the memory of an earlier `layer`."""

    layer: int


LayerMemory = KeysValues | Latent | RecurrentState | AttentionAndState | SharedMemory
