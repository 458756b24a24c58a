"""The architectures: from a file's hyper-parameters and weight names to the graph of a forward pass."""

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
from llamado.models.registry import ARCHITECTURES, ELSEWHERE, NOT_HERE


def load_model(file: ModelFile, rope: RopeOptions = FILE_ROPE) -> Model:
    """The model in a file; raises UnsupportedModel, InvalidModel or GgufError naming what is wrong.

    `rope`: what a user wants of positions.
    """
    return find_architecture(file.source, file.metadata)(file, rope)


def find_architecture(source: str, metadata: Metadata) -> type[Model]:
    """What computes the model in a file, by its metadata; raises UnsupportedModel or GgufError."""
    name = metadata.str_("general.architecture")
    architecture = ARCHITECTURES.get(name)
    if architecture is None:
        raise UnsupportedModel(f"{source}: models of architecture '{name}' do not run here. {_near(name)}")
    return architecture.load()


_LISTED = "python -m llamado.models.architectures.page"  # the docs are not in an installed package


def _near(name: str) -> str:
    """What runs in the place of an architecture that does not, in words."""
    if name in ELSEWHERE:
        return ELSEWHERE[name]
    if name in NOT_HERE:
        return f"{NOT_HERE[name][0].upper()}{NOT_HERE[name][1:]}. All that do: {_LISTED}"
    near = get_close_matches(name, ARCHITECTURES, n=4, cutoff=0.5)
    alike = f"Of names like it {', '.join(near)}; a" if near else "A"
    return f"{alike}ll that do, {len(ARCHITECTURES)} architectures, among them llama, qwen2, gemma3: {_LISTED}"


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
