"""From the tensors of a file to the weights of an architecture, each checked for its shape."""

from __future__ import annotations

from llamado.ggml.tensor import Shape, Tensor, contiguous_strides
from llamado.gguf.reader import GGUFFile
from llamado.models.errors import InvalidModel, UnsupportedModel
from llamado.models.forward import Linear


class Weights:
    """Hands out a file's tensors by name; `taken` are those an architecture has asked for.

    No byte is read: a weight is a Tensor with the type and shape in the file; who runs the model binds it to memory.
    """

    def __init__(self, file: GGUFFile) -> None:
        self._file = file
        self.taken: dict[str, Tensor] = {}

    def ne(self, name: str) -> Shape:
        """The shape a tensor has in the file; raises InvalidModel when there is none."""
        info = self._file.tensors.get(name)
        if info is None:
            raise InvalidModel(f"{self._file.path}: tensor '{name}' is missing")
        return info.ne

    def need(self, name: str, *ne: int) -> Tensor:
        """The tensor `name`, which must have shape `ne`; raises InvalidModel."""
        weight = self.maybe(name, *ne)
        if weight is None:
            raise InvalidModel(f"{self._file.path}: tensor '{name}' is missing; expected shape {list(ne)}")
        return weight

    def maybe(self, name: str, *ne: int) -> Tensor | None:
        """The tensor `name`, or None where the file has none; raises InvalidModel when its shape is not `ne`."""
        info = self._file.tensors.get(name)
        if info is None:
            return None
        if info.ne != (*ne, 1, 1, 1)[:4]:
            found = list(info.ne[: max(len(ne), 1 + max(i for i, n in enumerate(info.ne) if i == 0 or n != 1))])
            raise InvalidModel(f"{self._file.path}: tensor '{name}' has shape {found}; expected {list(ne)}")
        weight = self.taken.get(name)
        if weight is None:
            weight = Tensor(info.type, info.ne, contiguous_strides(info.type, info.ne), name=name)
            self.taken[name] = weight
        return weight

    def linear(self, name: str, n_in: int, n_out: int) -> Linear:
        """The matrix `name.weight` and, where there is one, `name.bias`; raises InvalidModel."""
        return Linear(self.need(f"{name}.weight", n_in, n_out), self.maybe(f"{name}.bias", n_out))

    def has(self, name: str) -> bool:
        """Whether the file has a tensor of that name."""
        return name in self._file.tensors

    def check_all_taken(self) -> None:
        """Raises UnsupportedModel for weights the architecture would ignore: the answers would be wrong."""
        left = [name for name in self._file.tensors if name not in self.taken]
        if left:
            more = f" and {len(left) - 5} more" if len(left) > 5 else ""
            raise UnsupportedModel(
                f"{self._file.path}: {self._file.metadata['general.architecture']} as known here has no use for "
                f"tensors {', '.join(left[:5])}{more}"
            )
