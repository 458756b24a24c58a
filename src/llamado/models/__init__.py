"""Model architectures: from a file's hyper-parameters and weights to the graph of a forward pass."""

from __future__ import annotations

from difflib import get_close_matches

from llamado.gguf.header import ModelFile
from llamado.gguf.metadata import Metadata
from llamado.models.adapter import Adapter
from llamado.models.base import Model
from llamado.models.batch import BatchShape, Output
from llamado.models.control import ControlVector, load_control
from llamado.models.errors import InvalidAdapter, InvalidModel, UnsupportedModel
from llamado.models.hparams import HyperParameters, Pooling, Rope
from llamado.models.keys import FILE_ROPE, RopeOptions
from llamado.models.lora import load_adapters
from llamado.models.memory import KV_TYPES, Memory
from llamado.models.registry import ARCHITECTURES, FOREIGN_NAMES, UNSUPPORTED


def load_model(file: ModelFile, rope: RopeOptions = FILE_ROPE) -> Model:
    """Build the model of a file; raise UnsupportedModel, InvalidModel or GgufError naming the cause.

    `rope` holds the user's overrides of the rotary embedding.
    """
    return find_architecture(file.source, file.metadata)(file, rope)


def find_architecture(source: str, metadata: Metadata) -> type[Model]:
    """Return the class for a file's architecture; raise UnsupportedModel or GgufError."""
    name = metadata.str_("general.architecture")
    architecture = ARCHITECTURES.get(name)
    if architecture is None:
        raise UnsupportedModel(f"{source}: architecture '{name}' is not supported. {_near(name)}")
    return architecture.load()


_LISTED = "python -m llamado.models.architectures.page"  # the docs are not part of an installed package


def _near(name: str) -> str:
    """Return a hint for an unsupported architecture."""
    if name in FOREIGN_NAMES:
        return FOREIGN_NAMES[name]
    if name in UNSUPPORTED:
        return f"{UNSUPPORTED[name][0].upper()}{UNSUPPORTED[name][1:]}. All supported architectures: {_LISTED}"
    near = get_close_matches(name, ARCHITECTURES, n=4, cutoff=0.5)
    alike = f"Similar names: {', '.join(near)}. " if near else ""
    return f"{alike}All {len(ARCHITECTURES)} supported architectures, among them llama, qwen2, gemma3: {_LISTED}"


__all__ = [
    "ARCHITECTURES",
    "KV_TYPES",
    "Adapter",
    "BatchShape",
    "ControlVector",
    "HyperParameters",
    "InvalidAdapter",
    "InvalidModel",
    "Memory",
    "Model",
    "Output",
    "Pooling",
    "Rope",
    "RopeOptions",
    "UnsupportedModel",
    "find_architecture",
    "load_adapters",
    "load_control",
    "load_model",
]
