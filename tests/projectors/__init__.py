"""Small projector files with random weights, for every projector."""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from projectors.spec import TinyProjector


def every() -> dict[str, TinyProjector]:
    """Return all small projectors by their names: PROJECTORS of the modules of this package."""
    modules = (import_module(f"{__name__}.{module.name}") for module in iter_modules(__path__))
    return {tiny.name: tiny for module in modules for tiny in getattr(module, "PROJECTORS", ())}
