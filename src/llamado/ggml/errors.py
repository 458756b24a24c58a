"""Errors raised while a graph is built."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llamado.errors import LlamadoError

if TYPE_CHECKING:
    from llamado.ggml.tensor import Tensor


class ShapeError(LlamadoError):
    """An operation cannot combine the shapes, strides or types of its sources."""

    def __init__(self, op: str, reason: str, *tensors: Tensor | None) -> None:
        self.op, self.reason = op, reason
        given = ", ".join(describe(t) for t in tensors)
        super().__init__(f"{op}: {reason}" + (f" (given {given})" if given else ""))


def describe(tensor: Tensor | None) -> str:
    """Return a one-line description: name, type and shape, plus strides if the tensor is not contiguous."""
    if tensor is None:
        return "none"
    text = f"{tensor.name or 'unnamed'} {tensor.type.name}{list(tensor.ne)}"
    return text if tensor.is_contiguous() else f"{text} strides {list(tensor.nb)}"
