"""What can go wrong when a graph is built."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llamado.errors import LlamadoError

if TYPE_CHECKING:
    from llamado.ggml.tensor import Tensor


class ShapeError(LlamadoError):
    """An operation was given tensors whose shapes, strides or types it cannot combine."""

    def __init__(self, op: str, reason: str, *tensors: Tensor | None) -> None:
        self.op, self.reason = op, reason
        given = ", ".join(describe(t) for t in tensors)
        super().__init__(f"{op}: {reason}" + (f" (given {given})" if given else ""))


def describe(tensor: Tensor | None) -> str:
    """One line on a tensor: name, type, shape; strides too when it is not contiguous."""
    if tensor is None:
        return "none"
    text = f"{tensor.name or 'unnamed'} {tensor.type.name}{list(tensor.ne)}"
    return text if tensor.is_contiguous() else f"{text} strides {list(tensor.nb)}"
