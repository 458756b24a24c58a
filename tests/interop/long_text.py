"""A long text for perplexities: the documentation of Python's own modules, which every installation has."""

from __future__ import annotations

import ast
import importlib.util
import inspect
from pathlib import Path

# Prose, mathematics and examples; modules that hardly change between releases.
_MODULES = ("statistics", "heapq", "difflib", "fractions", "textwrap", "shelve", "random", "calendar", "csv", "doctest")


def documentation(module: str) -> list[str]:
    """The docstrings of a module's source, outermost first."""
    spec = importlib.util.find_spec(module)
    assert spec is not None and spec.origin is not None
    tree = ast.parse(Path(spec.origin).read_text(encoding="utf-8"))
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef)
    found = [ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, documented)]
    return [inspect.cleandoc(text) for text in found if text and text.isascii()]


def long_text(n_characters: int) -> str:
    """The first `n_characters` of it, less the part of a line at the end."""
    text = "\n\n".join("\n\n".join(documentation(module)) for module in _MODULES)
    assert len(text) >= n_characters, f"only {len(text)} characters of documentation"
    return text[:n_characters].rpartition("\n")[0]
