"""The errors of the `models` room."""

from __future__ import annotations

from llamado.errors import LlamadoError


class UnsupportedModel(LlamadoError):
    """The file is sound, but no architecture here computes what it asks for."""


class InvalidModel(LlamadoError):
    """A hyper-parameter or weight contradicts the architecture the file names."""


class InvalidAdapter(LlamadoError):
    """A file of a LoRA adapter or a control vector is none, or does not fit the model."""
