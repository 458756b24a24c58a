"""Memory of a model: KV cache cells and recurrent states of its sequences."""

from llamado.models.memory.layers import KeysValues, Latent, LayerMemory, RecurrentState, SharedMemory, SideBySide
from llamado.models.memory.layout import KV_TYPES, Kept, check_types
from llamado.models.memory.memory import Memory
from llamado.models.memory.parts import SPARE
from llamado.models.memory.pool import align
from llamado.models.memory.sequence import Handle, Placed, Span, windows_before
from llamado.models.memory.storage import RowSpan, Storage

__all__ = [
    "KV_TYPES",
    "SPARE",
    "Handle",
    "Kept",
    "KeysValues",
    "Latent",
    "LayerMemory",
    "Memory",
    "Placed",
    "RecurrentState",
    "RowSpan",
    "SharedMemory",
    "SideBySide",
    "Span",
    "Storage",
    "align",
    "check_types",
    "windows_before",
]
