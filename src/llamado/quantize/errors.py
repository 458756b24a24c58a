"""Errors of the `quantize` package."""

from __future__ import annotations

from llamado.errors import LlamadoError


class QuantizeError(LlamadoError):
    """A model cannot be quantized as requested. The message names the tensor or file, the cause, and what to do."""
