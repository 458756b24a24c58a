"""Weights of an architecture, taken from the tensors of a file with checked shapes and roles."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from llamado.ggml.role import ModelPart, Role
from llamado.ggml.tensor import Shape, Tensor, contiguous_strides
from llamado.gguf.header import ModelFile
from llamado.gguf.reader import GGUFFile
from llamado.gguf.types import TensorType
from llamado.models.errors import InvalidModel, UnsupportedModel
from llamado.models.forward import Linear

_OF_ACTIVATIONS = ".input_scale"
"""Scales for 4-bit activations in NVFP4 files; unused, as in llama.cpp, which only reads them."""


class Weights:
    """Tensors of a file, handed out by role and name: `weights.input.require("token_embd.weight", 64, 1000)`.

    `taken` are the tensors an architecture has requested, `roles` their roles, both by name. No data is read: a weight
    is a Tensor with the type and shape in the file, bound to memory when the model is run.
    """

    def __init__(self, file: ModelFile) -> None:
        self._file = file
        self.taken: dict[str, Tensor] = {}
        self._ignored: set[str] = set()
        self.roles: dict[str, tuple[Role, ...]] = {}
        self.input = RoleWeights(self, ModelPart.INPUT)
        self.output = RoleWeights(self, ModelPart.OUTPUT)
        self.shared = RoleWeights(self, ModelPart.SHARED)

    def layer(self, layer: int, stack: str = "blk", block: int | None = None) -> RoleWeights:
        """Return the weights of a layer; names omit the prefix `blk.N.`, or `stack` in place of `blk`.

        `block` is N, if it differs from the layer number.
        """
        return RoleWeights(self, ModelPart.LAYER, layer, stack=stack, block=block)

    def ne(self, name: str) -> Shape:
        """Return a tensor's shape; raise InvalidModel if the file does not have it."""
        info = self._file.tensors.get(name)
        if info is None:
            raise InvalidModel(f"{self._file.source}: tensor '{name}' is missing")
        return info.ne

    def has(self, name: str) -> bool:
        """Return True if the file has a tensor with this name."""
        return name in self._file.tensors

    def values(self, name: str) -> NDArray[np.float32]:
        """Read the numbers of a small F32 tensor that the host needs; raise InvalidModel if there is none to read."""
        info = self._file.tensors.get(name)
        if info is None or not isinstance(self._file, GGUFFile):
            raise InvalidModel(f"{self._file.source}: tensor '{name}' is missing")
        if info.type is not TensorType.F32:
            raise InvalidModel(f"{self._file.source}: tensor '{name}' is {info.type.name}; F32 is expected")
        return self._file.data(name).view(np.float32).copy()

    def take(self, role: Role, *ne: int) -> Tensor | None:
        """Return the tensor `role.name`, or None if it is missing; raise InvalidModel if its shape is not `ne`."""
        name = role.name
        info = self._file.tensors.get(name)
        if info is None:
            return None
        if info.ne != (*ne, 1, 1, 1)[:4]:
            found = list(info.ne[: max(len(ne), 1 + max(i for i, n in enumerate(info.ne) if i == 0 or n != 1))])
            raise InvalidModel(f"{self._file.source}: tensor '{name}' has shape {found}; expected {list(ne)}")
        weight = self.taken.get(name)
        if weight is None:
            weight = Tensor(info.type, info.ne, contiguous_strides(info.type, info.ne), name=name)
            self.taken[name] = weight
        return self.add_role(weight, role)

    def add_role(self, weight: Tensor, role: Role) -> Tensor:
        """Add a role to a weight that was taken."""
        roles = self.roles.get(weight.name, ())
        if role not in roles:
            self.roles[weight.name] = (*roles, role)
        return weight

    def ignore(self, name: str) -> None:
        """Ignore a tensor, whether the file has it or not."""
        self._ignored.add(name)

    def missing(self, name: str, ne: tuple[int, ...]) -> InvalidModel:
        """Return the error for a missing required tensor."""
        return InvalidModel(f"{self._file.source}: tensor '{name}' is missing; expected shape {list(ne)}")

    def check_all_taken(self, unused: range) -> None:
        """Raise UnsupportedModel if weights would be ignored, other than those of the blocks `unused`."""
        free = tuple(f"blk.{block}." for block in unused)
        known = self.taken.keys() | self._ignored
        left = [
            name
            for name in self._file.tensors
            if name not in known and not name.startswith(free) and not name.endswith(_OF_ACTIVATIONS)
        ]
        if left:
            more = f" and {len(left) - 5} more" if len(left) > 5 else ""
            raise UnsupportedModel(
                f"{self._file.source}: {self._file.metadata['general.architecture']} does not use "
                f"the tensors {', '.join(left[:5])}{more}; this variant is not supported"
            )


class RoleWeights:
    """Tensors of a file for one part of a model. `experts`: the number of experts, and of those that a token uses."""

    def __init__(
        self,
        weights: Weights,
        part: ModelPart,
        layer: int = -1,
        experts: tuple[int, int] = (1, 1),
        stack: str = "blk",
        block: int | None = None,
    ) -> None:
        self._weights = weights
        self._part, self._layer, self._stack, self._block = part, layer, stack, block
        self._experts = experts
        self._prefix = f"{stack}.{layer if block is None else block}." if part is ModelPart.LAYER else ""

    def experts(self, n: int, n_used: int) -> RoleWeights:
        """Return the weights that stack `n` experts, of which a token uses `n_used`."""
        return RoleWeights(self._weights, self._part, self._layer, (n, n_used), self._stack, self._block)

    def _role(self, name: str) -> Role:
        return Role(self._part, self._prefix + name, self._layer, *self._experts)

    def require(self, name: str, *ne: int) -> Tensor:
        """Return the tensor `name` of shape `ne`; raise InvalidModel if it is missing or has another shape."""
        weight = self.optional(name, *ne)
        if weight is None:
            raise self._weights.missing(self._prefix + name, ne)
        return weight

    def optional(self, name: str, *ne: int) -> Tensor | None:
        """Return the tensor `name`, or None if it is missing; raise InvalidModel if its shape is not `ne`."""
        return self._weights.take(self._role(name), *ne)

    def share(self, name: str, weight: Tensor) -> Tensor:
        """Add the role `name` to a weight that has another role already."""
        return self._weights.add_role(weight, self._role(name))

    def has(self, name: str) -> bool:
        """Return True if the file has the tensor."""
        return self._weights.has(self._prefix + name)

    def ne(self, name: str) -> Shape:
        """Return a tensor's shape; raise InvalidModel if the file does not have it."""
        return self._weights.ne(self._prefix + name)

    def ignore(self, *names: str) -> None:
        """Ignore tensors, whether the file has them or not."""
        for name in names:
            self._weights.ignore(self._prefix + name)

    def linear(self, name: str, n_in: int, n_out: int) -> Linear:
        """Return the matrix `name.weight`, with `name.bias` and `name.scale` if present; raise InvalidModel."""
        weight = self.require(f"{name}.weight", n_in, n_out)
        return Linear(weight, self.optional(f"{name}.bias", n_out), self.optional(f"{name}.scale", 1))
