"""Errors of the `models` package."""

from __future__ import annotations

from llamado.errors import LlamadoError


class UnsupportedModel(LlamadoError):
    """A valid file needs an architecture or a feature that is not implemented."""


class InvalidModel(LlamadoError):
    """A hyper-parameter or weight contradicts the architecture named by the file."""


class InvalidAdapter(LlamadoError):
    """A LoRA adapter or control vector file is invalid, or does not fit the model."""
