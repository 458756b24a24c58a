"""GGUF model files: a memory-mapped reader, metadata, a writer, and the sources that models are fetched from."""

from llamado.gguf.errors import GgufError, SourceError
from llamado.gguf.header import TensorInfo
from llamado.gguf.metadata import Metadata, StringArray, Value, ValueType
from llamado.gguf.reader import GGUFFile
from llamado.gguf.types import TensorType

__all__ = [
    "GGUFFile",
    "GgufError",
    "Metadata",
    "SourceError",
    "StringArray",
    "TensorInfo",
    "TensorType",
    "Value",
    "ValueType",
]
