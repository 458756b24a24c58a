"""LoRA adapters: low-rank additions to a model's matrices, read from GGUF files of their own.

File format (convert_lora_to_gguf.py and llama-adapter.cpp, b11434): metadata `general.type` = "adapter",
`general.architecture` as the model's, `adapter.type` = "lora", `adapter.lora.alpha`. For each adapted matrix W [n_in,
n_out] there are tensors `W.lora_a` [n_in, rank] and `W.lora_b` [rank, n_out]. The embedding is indexed by rows instead,
so its `lora_a` is [rank, n_vocab] and its `lora_b` [rank, n_embd]. An activated LoRA also has
`adapter.alora.invocation_tokens`.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from llamado.ggml.role import ModelPart, Role
from llamado.ggml.tensor import Tensor, contiguous_strides
from llamado.gguf.header import TensorInfo
from llamado.gguf.reader import GGUFFile
from llamado.models.errors import InvalidAdapter, InvalidModel
from llamado.models.keys import Keys

log = logging.getLogger(__name__)

_A, _B = ".lora_a", ".lora_b"
_INVOCATION = "adapter.alora.invocation_tokens"


class LoraPair(NamedTuple):
    """The two low-rank factors of one matrix; its products get B(A x) added."""

    a: Tensor
    b: Tensor


class Adapter:
    """An open adapter file bound to a model's weights; `pairs` maps weight names to their factors.

    Tensor names contain the adapter's number among the model's adapters and a digest of the file, so they are unique.
    """

    def __init__(
        self,
        file: GGUFFile,
        number: int,
        *,
        architecture: str,
        weights: Mapping[str, Tensor],
        roles: Mapping[str, Sequence[Role]],
    ) -> None:
        """Bind the file to the model's `weights` and their `roles`, both by name.

        Raises InvalidAdapter or GgufError, naming the key or tensor that is wrong.
        """
        self.file = file
        self.path = file.path
        metadata = file.metadata
        self._expect("general.type", "adapter")
        self._expect("adapter.type", "lora")
        self._expect("general.architecture", architecture)
        try:
            self.alpha = Keys(metadata).float_("adapter.lora.alpha", 0.0)
        except InvalidModel as error:
            raise InvalidAdapter(f"{self.path}: {error}") from None
        self.invocation = metadata.ints(_INVOCATION, ())
        """Tokens that activate an activated LoRA (arXiv 2504.12397); empty for other adapters."""
        self.task_name = metadata.str_("adapter.lora.task_name", "")
        self.prompt_prefix = metadata.str_("adapter.lora.prompt_prefix", "")
        self._mark = f"{number}.{_stamp(file)}"
        self._sources: dict[str, str] = {}
        self.pairs = self._bind(weights, roles)

    def strength(self, weight: str, scale: float) -> float:
        """Return the factor of B(A x): scale × alpha / rank in float32, or `scale` if the file has no alpha."""
        f = np.float32
        rank = self.pairs[weight].b.ne[0]
        return float(f(f(scale) * f(self.alpha)) / f(rank)) if self.alpha else float(f(scale))

    def data(self, name: str) -> NDArray[np.uint8]:
        """Return the bytes of one of its tensors, a view of the file."""
        return self.file.data(self._sources[name])

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return tuple(tensor for pair in self.pairs.values() for tensor in pair)

    def _expect(self, key: str, value: str) -> None:
        found = self.file.metadata.str_(key, "")
        if found != value:
            shown = f"is '{found[:100]}'" if found else "is missing"
            raise InvalidAdapter(f"{self.path}: metadata key '{key}' {shown}; '{value}' is expected")

    def _bind(self, weights: Mapping[str, Tensor], roles: Mapping[str, Sequence[Role]]) -> dict[str, LoraPair]:
        found: dict[str, dict[str, TensorInfo]] = {}
        ignored = []
        for name, info in self.file.tensors.items():
            weight, part = name[: -len(_A)], name[-len(_A) :]
            if part in (_A, _B):
                found.setdefault(weight, {})[part] = info
            elif name.endswith("_norm.weight"):
                ignored.append(name)
            else:
                raise InvalidAdapter(
                    f"{self.path}: tensor '{name}' is not part of a LoRA adapter: names end in {_A} or {_B}"
                )
        if ignored:  # As in llama.cpp: some adapters contain trained norms, and work without them.
            log.warning("%s: ignoring %d norm tensors, such as %s", self.path, len(ignored), ignored[0])
        if not found:
            raise InvalidAdapter(f"{self.path}: the file has no tensors")
        return {
            weight: self._pair(weight, weights.get(weight), roles.get(weight, ()), parts)
            for weight, parts in found.items()
        }

    def _pair(
        self, weight: str, base: Tensor | None, roles: Sequence[Role], parts: Mapping[str, TensorInfo]
    ) -> LoraPair:
        for part in (_A, _B):
            if part not in parts:
                raise InvalidAdapter(f"{self.path}: tensor '{weight}{part}' is missing")
        if base is None:
            raise InvalidAdapter(
                f"{self.path}: tensor '{weight}{_A}' is for a weight '{weight}', which the model does not have; is the "
                "adapter for another model?"
            )
        a, b = parts[_A], parts[_B]
        n_in, n_out, n_experts = base.ne[0], base.ne[1], base.ne[2]
        if any(role.part is ModelPart.INPUT for role in roles):
            if len(roles) > 1:
                raise InvalidAdapter(
                    f"{self.path}: tensor '{a.name}' is for the embedding, which in this model is also the output "
                    "matrix; an adapter for only one of the two cannot be applied"
                )
            rank = a.ne[0]
            expected = {_A: (rank, n_out, 1, 1), _B: (rank, n_in, 1, 1)}
        else:
            rank = a.ne[1]
            expected = {_A: (n_in, rank, n_experts, 1), _B: (rank, n_out, n_experts, 1)}
        for part, info in parts.items():
            if info.ne != expected[part]:
                raise InvalidAdapter(
                    f"{self.path}: tensor '{info.name}' has shape {_shape(info.ne)}; {_shape(expected[part])} is "
                    f"expected for a weight of shape {_shape(base.ne)}"
                )
        return LoraPair(self._tensor(a), self._tensor(b))

    def _tensor(self, info: TensorInfo) -> Tensor:
        name = f"{info.name}.{self._mark}"
        self._sources[name] = info.name
        return Tensor(info.type, info.ne, contiguous_strides(info.type, info.ne), name=name)


def _stamp(file: GGUFFile) -> str:
    """Return eight digits that identify a file, because caches of tensor hashes are keyed by tensor name."""
    info = file.path.stat()
    stamp = f"{file.path.resolve()} {info.st_size} {info.st_mtime_ns}"
    return hashlib.sha256(stamp.encode(errors="replace")).hexdigest()[:8]


def _shape(ne: Sequence[int]) -> list[int]:
    last = max((i for i, n in enumerate(ne) if n != 1), default=0)
    return list(ne[: max(2, last + 1)])
