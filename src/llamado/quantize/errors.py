"""The errors of the `quantize` room."""

from __future__ import annotations

from llamado.errors import LlamadoError


class QuantizeError(LlamadoError):
    """A model cannot be quantized as asked; says which tensor or file, why, and what to do."""
