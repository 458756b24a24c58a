"""Memory of a model: KV cache cells and recurrent states of its sequences."""

from llamado.models.memory.layers import (
    AttentionAndState,
    KeysValues,
    Latent,
    LayerMemory,
    RecurrentState,
    SharedMemory,
)
from llamado.models.memory.layout import KV_TYPES, LayerCache, MemoryOptions, check_types
from llamado.models.memory.memory import Memory
from llamado.models.memory.parts import SPARE
from llamado.models.memory.pool import align
from llamado.models.memory.sequence import BatchPlacement, Handle, Span, windows_before
from llamado.models.memory.storage import RowSpan, Storage

__all__ = [
    "KV_TYPES",
    "SPARE",
    "AttentionAndState",
    "BatchPlacement",
    "Handle",
    "KeysValues",
    "Latent",
    "LayerCache",
    "LayerMemory",
    "Memory",
    "MemoryOptions",
    "RecurrentState",
    "RowSpan",
    "SharedMemory",
    "Span",
    "Storage",
    "align",
    "check_types",
    "windows_before",
]
