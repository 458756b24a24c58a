"""Memory layout of a model: the cache tensors of its layers, grouped into parts, and their sizes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from llamado.ggml.graph import new_tensor
from llamado.ggml.tensor import Tensor
from llamado.gguf.types import TensorType
from llamado.models.errors import UnsupportedModel
from llamado.models.hadamard import key_rotation, value_rotation
from llamado.models.memory.layers import (
    AttentionAndState,
    KeysValues,
    Latent,
    LayerMemory,
    RecurrentState,
    SharedMemory,
)
from llamado.models.memory.parts import BLOCK, Tokens
from llamado.models.memory.pool import align
from llamado.models.memory.states import States
from llamado.models.memory.window import Window

KV_TYPES = (
    TensorType.F32,
    TensorType.F16,
    TensorType.BF16,
    TensorType.Q8_0,
    TensorType.Q4_0,
    TensorType.Q4_1,
    TensorType.IQ4_NL,
    TensorType.Q5_0,
    TensorType.Q5_1,
)
"""Supported cache types. Some GPU back ends of ggml do not support all of them."""

SLACK = 256
"""Extra tokens per sequence beyond a window and a batch, so that windows are seldom copied."""


class LayerCache(NamedTuple):
    """A layer's cache, as seen by a graph."""

    layer: int
    """The layer that owns the memory: this one, or the earlier one it shares with."""
    number: int
    """Index of the part; `BatchPlacement.rows` has one entry per part."""
    part: Tokens | Window | States
    tensors: tuple[Tensor, ...]
    """K and V, then the index and pooled rows if present; one latent row; or the states."""
    window: int
    chunked: bool
    symmetric: bool = False
    rotations: tuple[int, int] = (0, 0)
    """Elements of keys and of values that are rotated together before storing (`hadamard.py`); 0: none."""


@dataclass(frozen=True, kw_only=True)
class MemoryOptions:
    """Sizes and types of a model's memory."""

    n_cells: int
    """Tokens of all sequences together."""
    n_ctx: int = 0
    """Most tokens of one sequence; 0: all cells."""
    n_sequences: int = 1
    max_batch: int = 512
    """Most tokens of a batch."""
    whole: bool = False
    """True to keep all tokens in layers with a window, too (llama.cpp's --swa-full)."""
    type_k: TensorType = TensorType.F16
    type_v: TensorType = TensorType.F16
    rotated: bool = True
    """True to rotate keys and values before quantization (see `hadamard.py`)."""
    n_drafted: int = 0
    """States per sequence that are kept while draft tokens are verified (see States); with 0, models with recurrent
    state cannot use drafts.
    """
    slack: int = SLACK


class Layout:
    """Tensors for the memory of `layers`. `causal`: tokens see only earlier tokens."""

    def __init__(self, layers: Sequence[LayerMemory], options: MemoryOptions, *, causal: bool = True) -> None:
        self._options = options
        self.n_cells = align(options.n_cells)
        self.n_ctx = options.n_ctx or self.n_cells
        self._causal = causal
        self.types = options.type_k, options.type_v
        self.block = max(BLOCK, *(layer.block for layer in map(_attention, layers) if isinstance(layer, KeysValues)), 1)
        """Rows of a sequence start at multiples of it."""
        self._tokens = Tokens(self.n_cells, self.block)
        self._windows: dict[int, Window] = {}
        self._states: States | None = None
        added: list[tuple[int, Tokens | Window | States, tuple[Tensor, ...]]] = []
        beside: dict[int, tuple[Tensor, ...]] = {}
        for layer, memory in enumerate(layers):
            if isinstance(memory, SharedMemory):
                added.append(added[memory.layer])
                continue
            if isinstance(memory, AttentionAndState):
                beside[layer] = self._add(layer, memory.state)[1]
                memory = memory.attention
            added.append((layer, *self._add(layer, memory)))
        self._others: list[Window | States] = [*self._windows.values()]
        if self._states is not None:
            self._others.append(self._states)
        self.parts: tuple[Tokens | Window | States, ...] = (
            *((self._tokens,) if self._tokens.layers else ()),
            *self._others,
        )
        rotations = {windowed: self._rotations(layers, windowed) for windowed in (False, True)}
        self.unrotated = not options.rotated and any(any(pair) for pair in rotations.values())
        """True if rotation applies to this cache but is turned off."""
        if self.unrotated:
            rotations = dict.fromkeys(rotations, (0, 0))
        self._caches = []
        for layer, part, tensors in added:
            memory, layer_cache = (
                _attention(layers[layer]),
                LayerCache(layer, self.parts.index(part), part, tensors, 0, False),
            )
            if isinstance(memory, KeysValues):
                window = memory.window
                layer_cache = layer_cache._replace(window=window, chunked=memory.chunked, symmetric=memory.symmetric)
                layer_cache = layer_cache._replace(rotations=rotations[window > 0])
            elif isinstance(memory, Latent):
                layer_cache = layer_cache._replace(window=memory.window)
            self._caches.append(layer_cache)
        self._states_of = {
            layer: layer_cache for layer, layer_cache in enumerate(self._caches) if isinstance(layer_cache.part, States)
        }
        for layer, tensors in beside.items():
            assert self._states is not None
            number = self.parts.index(self._states)
            self._states_of[layer] = LayerCache(layer, number, self._states, tensors, 0, False)

    def _rotations(self, layers: Sequence[LayerMemory], windowed: bool) -> tuple[int, int]:
        """Return the rotation sizes of the layers with a window, or of those without; see `hadamard.py`."""
        attention = [_attention(layer) for layer in layers]
        those = [layer for layer in attention if isinstance(layer, KeysValues) and (layer.window > 0) == windowed]
        type_k, type_v = self.types
        return key_rotation(type_k, {layer.head_k for layer in those}), value_rotation(
            type_v, {s.head_v for s in those}
        )

    def _add(
        self, layer: int, memory: KeysValues | Latent | RecurrentState
    ) -> tuple[Tokens | Window | States, tuple[Tensor, ...]]:
        options = self._options
        part: Tokens | Window | States
        if isinstance(memory, KeysValues):
            window = memory.window
            bounded = window and not options.whole and not memory.symmetric
            part = self._window(window) if bounded else self._tokens
            named = (("k", memory.k, self.types[0]), ("v", memory.v, self.types[1]))
            if memory.index:
                named = (*named, ("i", memory.index, TensorType.F16))  # type: ignore[assignment]
        elif isinstance(memory, Latent):
            bounded = memory.window and not options.whole
            part = self._window(memory.window) if bounded else self._tokens
            named = (("k", memory.n, self.types[0]),)  # type: ignore[assignment]
        else:
            if self._states is None:
                self._states = States("_s", options.n_sequences, options.n_drafted)
            part = self._states
            named = tuple((f"s{i}", width, TensorType.F32) for i, width in enumerate(memory.widths))  # type: ignore
        if not isinstance(memory, RecurrentState) and memory.pooled:
            named = (*named, ("p", memory.pooled, TensorType.F16))  # type: ignore[assignment]
        tensors = tuple(
            new_tensor(type, width, part.n_rows + part.n_spare, name=f"cache_{name}_l{layer}")
            for name, width, type in named
        )
        part.layers[layer] = tensors
        return part, tensors

    def _window(self, window: int) -> Tokens | Window:
        part, options = self._windows.get(window), self._options
        if part is None:
            suffix = f"_swa{len(self._windows) or ''}"
            part = Window(suffix, window, options.max_batch, options.slack, options.n_sequences)
            if part.n_rows >= self.n_cells:
                return self._tokens
            self._windows[window] = part
        return part

    def __getitem__(self, layer: int) -> LayerCache:
        return self._caches[layer]

    def states(self, layer: int) -> LayerCache:
        """Return the states of a layer, which may also have keys and values."""
        return self._states_of[layer]

    def _of(self, layer: int) -> list[LayerCache]:
        """Return all caches of a layer."""
        layer_cache, states = self._caches[layer], self._states_of.get(layer)
        return [layer_cache] if states is None or states is layer_cache else [layer_cache, states]

    def __len__(self) -> int:
        return len(self._caches)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All cache tensors, in layer order."""
        return tuple(
            tensor
            for layer in range(len(self))
            for layer_cache in self._of(layer)
            if layer_cache.layer == layer
            for tensor in layer_cache.tensors
        )

    @property
    def layer_of(self) -> dict[str, int]:
        """Map tensor names to layers."""
        return {
            t.name: layer_cache.layer
            for layer in range(len(self))
            for layer_cache in self._of(layer)
            for t in layer_cache.tensors
        }

    @property
    def rows_of(self) -> dict[str, int]:
        """Map tensor names to the number of rows usable by sequences."""
        return {tensor.name: part.n_rows for part in self.parts for tensor in part.tensors}

    def layer_bytes(self, layer: int) -> int:
        """Return the bytes of a layer's memory, for all sequences."""
        own = [layer_cache for layer_cache in self._of(layer) if layer_cache.layer == layer]
        return sum(layer_cache.part.n_rows * tensor.nb[1] for layer_cache in own for tensor in layer_cache.tensors)

    def read_bytes(self, layer: int, n: int) -> int:
        """Return the bytes that one token reads of a layer's memory in a sequence of `n` tokens."""
        total = 0
        for layer_cache in self._of(layer):
            rows = (
                1 if isinstance(layer_cache.part, States) else min(n, layer_cache.window) if layer_cache.window else n
            )
            total += rows * sum(tensor.nb[1] for tensor in layer_cache.tensors)
        return total

    def mask_rows(self, n: int) -> int:
        """Return the total rows of a graph's masks per token, if the first `n` cells are in use."""
        masks = {
            (layer_cache.number, layer_cache.window)
            for layer_cache in self._caches
            if not isinstance(layer_cache.part, States)
        }
        return sum(min(n, self.parts[number].n_rows) for number, _ in masks)

    @property
    def token_bytes(self) -> int:
        """Bytes per token in the layers that keep all tokens, as used by `read` and `write`."""
        return self._tokens.row_bytes

    @property
    def row_sizes(self) -> list[int]:
        """Bytes per token in each tensor of those layers, in the order of `read`."""
        return [tensor.nb[1] for tensor in self._tokens.tensors]

    @property
    def kind(self) -> str:
        """Description of the cache contents; saved bytes can only be restored into a memory of the same kind."""
        return "; ".join(
            f"{layer_cache.part.suffix or 'all'} {layer_cache.window}: "
            + " ".join(f"{t.type.name} {t.ne[0]}" for t in layer_cache.tensors)
            + (f" turned {layer_cache.rotations}" if any(layer_cache.rotations) else "")
            for layer in range(len(self))
            for layer_cache in self._of(layer)
        )


def _attention(memory: LayerMemory) -> LayerMemory:
    """Return the attention memory of a layer that has one, else its only memory."""
    return memory.attention if isinstance(memory, AttentionAndState) else memory


def check_types(head_dim: int, types: Iterable[TensorType]) -> None:
    """Raise UnsupportedModel for unsupported cache types, or if heads are not whole blocks of the type."""
    for type in types:
        if type not in KV_TYPES:
            raise UnsupportedModel(
                f"a cache of type {type.name} is not supported; supported are {', '.join(t.name for t in KV_TYPES)}"
            )
        if head_dim % type.block_size:
            raise UnsupportedModel(f"a {type.name} cache needs heads of whole blocks; these have {head_dim} elements")
