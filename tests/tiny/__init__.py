"""Small models of every architecture, with random weights, by name in `TINY`; one file of this folder per family.

Tests compare them with llama.cpp, and their bits in different batches.
"""

from __future__ import annotations

from collections.abc import Iterable
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import Any

from tiers import chosen

from tiny.spec import Tiny, make

TINY: dict[str, Tiny] = {}
for _module in iter_modules([str(Path(__file__).parent)]):
    for _one in getattr(import_module(f"tiny.{_module.name}"), "MODELS", ()):
        assert _one.name not in TINY, _one.name
        TINY[_one.name] = _one

REPRESENTATIVE = {
    "llama", "gemma3", "gpt2", "deepseek2", "qwen3moe", "gpt-oss", "llama4", "granitehybrid", "falcon-h1", "qwen3next",
    "mamba2", "rwkv7", "bert", "modern-bert",
}  # fmt: skip
"""Every kind of position, window, attention, expert and recurrent state, and two encoders."""


def each_architecture(names: Iterable[str]) -> list[Any]:
    """Return parameters: representative architectures in each run, the others in the full one (see CONTRIBUTING)."""
    return chosen(names, REPRESENTATIVE)


__all__ = ["REPRESENTATIVE", "TINY", "Tiny", "each_architecture", "make"]
