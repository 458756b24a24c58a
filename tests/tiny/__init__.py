"""A small file of every architecture, with random weights: what tests compare with the real llama.cpp and hold to the
first law. A file of this folder for each family; `TINY` has them all by name.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules

from tiny.spec import Tiny, make

TINY: dict[str, Tiny] = {}
for _module in iter_modules([str(Path(__file__).parent)]):
    for _one in getattr(import_module(f"tiny.{_module.name}"), "MODELS", ()):
        assert _one.name not in TINY, _one.name
        TINY[_one.name] = _one

__all__ = ["TINY", "Tiny", "make"]
