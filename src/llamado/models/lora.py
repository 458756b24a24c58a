"""LoRA adapters: low-rank additions to a model's matrices, from GGUF files of their own.

The file (convert_lora_to_gguf.py and llama-adapter.cpp, b11434): metadata `general.type` = "adapter",
`general.architecture` as the model's, `adapter.type` = "lora", `adapter.lora.alpha`; for each matrix W [n_in, n_out] of
the model that is added to, tensors `W.lora_a` [n_in, rank] and `W.lora_b` [rank, n_out]. For the embedding, of which
rows are taken instead, `lora_a` is [rank, n_vocab] and `lora_b` [rank, n_embd].
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from llamado.ggml.tensor import Tensor, contiguous_strides
from llamado.gguf.reader import GGUFFile, TensorInfo
from llamado.gguf.types import TensorType
from llamado.models.base import BatchShape, Model, Output
from llamado.models.errors import InvalidAdapter, InvalidModel
from llamado.models.keys import Keys

log = logging.getLogger(__name__)

_A, _B = ".lora_a", ".lora_b"
_EMBEDDING = "token_embd.weight"
_INVOCATION = "adapter.alora.invocation_tokens"
_CELLS = 256
# Types of matrices that can be multiplied with here.
_TYPES = frozenset(
    {
        TensorType.F32, TensorType.F16, TensorType.BF16, TensorType.Q4_0, TensorType.Q4_1, TensorType.Q5_0,
        TensorType.Q5_1, TensorType.Q8_0, TensorType.Q4_K, TensorType.Q5_K, TensorType.Q6_K,
    }
)  # fmt: skip


class Pair(NamedTuple):
    """What is added to the products of one matrix: B(A x)."""

    a: Tensor
    b: Tensor


class Adapter:
    """An open adapter file, bound to a model: `pairs` by the names of the model's weights.

    Names of its tensors are its own: they hold its number among the model's adapters, and what tells files apart.
    """

    def __init__(self, file: GGUFFile, model: Model, number: int) -> None:
        """Raises InvalidAdapter or GgufError, naming the key or tensor that is wrong."""
        self.file = file
        self.path = file.path
        metadata = file.metadata
        self._expect("general.type", "adapter")
        self._expect("adapter.type", "lora")
        self._expect("general.architecture", model.architecture)
        if _INVOCATION in metadata:
            raise InvalidAdapter(
                f"{self.path}: metadata key '{_INVOCATION}' makes it an activated LoRA, which works from certain "
                "tokens on; those are not known here"
            )
        try:
            self.alpha = Keys(metadata).float_("adapter.lora.alpha", 0.0)
        except InvalidModel as error:
            raise InvalidAdapter(f"{self.path}: {error}") from None
        self.task_name = metadata.str_("adapter.lora.task_name", "")
        self.prompt_prefix = metadata.str_("adapter.lora.prompt_prefix", "")
        self._mark = f"{number}.{_stamp(file)}"
        self._sources: dict[str, str] = {}
        self.pairs = self._bind(model)

    def strength(self, weight: str, scale: float) -> float:
        """What B(A x) is multiplied by: scale × alpha / rank in float32, and where no alpha is given the scale."""
        f = np.float32
        rank = self.pairs[weight].b.ne[0]
        return float(f(f(scale) * f(self.alpha)) / f(rank)) if self.alpha else float(f(scale))

    def data(self, name: str) -> NDArray[np.uint8]:
        """Bytes of one of its tensors, a view of the file."""
        return self.file.data(self._sources[name])

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return tuple(tensor for pair in self.pairs.values() for tensor in pair)

    def nbytes(self, weight: str) -> int:
        """Bytes of what belongs to a weight."""
        pair = self.pairs.get(weight)
        return 0 if pair is None else pair.a.nbytes + pair.b.nbytes

    def _expect(self, key: str, value: str) -> None:
        found = self.file.metadata.str_(key, "")
        if found != value:
            shown = f"is '{found[:100]}'" if found else "is missing"
            raise InvalidAdapter(f"{self.path}: metadata key '{key}' {shown}; '{value}' is expected")

    def _bind(self, model: Model) -> dict[str, Pair]:
        found: dict[str, dict[str, TensorInfo]] = {}
        ignored = []
        for name, info in self.file.tensors.items():
            weight, part = name[: -len(_A)], name[-len(_A) :]
            if part in (_A, _B):
                found.setdefault(weight, {})[part] = info
            elif name.endswith("_norm.weight"):
                ignored.append(name)
            else:
                raise InvalidAdapter(f"{self.path}: tensor '{name}' is no part of a LoRA: names end in {_A} or {_B}")
        if ignored:  # as llama.cpp does: trained along in some adapters, which work without it
            log.warning("%s: %d tensors of norms are not used, such as %s", self.path, len(ignored), ignored[0])
        if not found:
            raise InvalidAdapter(f"{self.path}: there is no tensor in it")
        return {weight: self._pair(model, weight, parts) for weight, parts in found.items()}

    def _pair(self, model: Model, weight: str, parts: Mapping[str, TensorInfo]) -> Pair:
        for part in (_A, _B):
            if part not in parts:
                raise InvalidAdapter(f"{self.path}: tensor '{weight}{part}' is missing beside its other half")
        base = model.weights.get(weight)
        if base is None:
            raise InvalidAdapter(
                f"{self.path}: tensor '{weight}{_A}' is for a weight '{weight}', which the model does not have; is the "
                "adapter for another model?"
            )
        a, b = parts[_A], parts[_B]
        n_in, n_out = base.ne[0], base.ne[1]
        if weight == _EMBEDDING:
            if model.generates and "output.weight" not in model.weights:
                raise InvalidAdapter(
                    f"{self.path}: tensor '{a.name}' is for the embedding, which in this model is the output matrix "
                    "too; adapters for one of both cannot be applied"
                )
            rank = a.ne[0]
            expected = {_A: (rank, n_out, 1, 1), _B: (rank, n_in, 1, 1)}
        else:
            rank = a.ne[1]
            expected = {_A: (n_in, rank, 1, 1), _B: (rank, n_out, 1, 1)}
        for part, info in parts.items():
            if info.ne != expected[part]:
                raise InvalidAdapter(
                    f"{self.path}: tensor '{info.name}' has shape {_shape(info.ne)}; {_shape(expected[part])} is "
                    f"expected for a weight of shape {_shape(base.ne)}"
                )
            if info.type not in _TYPES:
                known = ", ".join(sorted(type.name for type in _TYPES))
                raise InvalidAdapter(
                    f"{self.path}: tensor '{info.name}' is of type {info.type.name}; known are {known}"
                )
        return Pair(self._tensor(a), self._tensor(b))

    def _tensor(self, info: TensorInfo) -> Tensor:
        name = f"{info.name}.{self._mark}"
        self._sources[name] = info.name
        return Tensor(info.type, info.ne, contiguous_strides(info.type, info.ne), name=name)


def load_adapters(model: Model, paths: Sequence[str | os.PathLike[str]], *, mmap: bool = True) -> tuple[Adapter, ...]:
    """Open adapter files and give them to a model, in place of those it had.

    Close their files when the model is not used any more. Raises InvalidAdapter or GgufError, naming file and tensor.
    """
    adapters: list[Adapter] = []
    files: list[GGUFFile] = []
    before = model.adapters
    try:
        for path in paths:
            files.append(_open(Path(path), mmap))
            adapters.append(Adapter(files[-1], model, len(adapters)))
        model.adapters = tuple(adapters)
        if adapters:
            _check_used(model)
    except BaseException:
        model.adapters = before
        for file in files:
            file.close()
        raise
    return model.adapters


def _open(path: Path, mmap: bool) -> GGUFFile:
    file = GGUFFile.open(path, mmap=mmap)
    if file.n_shards > 1:
        file.close()
        raise InvalidAdapter(f"{path}: an adapter that is split over several files; join them first")
    return file


def _check_used(model: Model) -> None:
    """Raises InvalidAdapter for a pair that no forward pass would use: the answers would be wrong."""
    output = Output.LOGITS if model.generates else Output.SCORES
    shape = BatchShape(1, 1, _CELLS, output, (1.0,) * len(model.adapters))
    graph = model.build(shape, model.kv_tensors(_CELLS))
    used = {source for node in graph.nodes for source in node.src}
    for adapter in model.adapters:
        for weight, pair in adapter.pairs.items():
            if pair.a not in used:
                raise InvalidAdapter(
                    f"{adapter.path}: tensor '{weight}{_A}' is for a weight '{weight}' that nothing is multiplied with"
                )


def _stamp(file: GGUFFile) -> str:
    """Eight digits that tell files apart: whoever keeps hashes of tensors by name must not take another file's."""
    info = file.path.stat()
    stamp = f"{file.path.resolve()} {info.st_size} {info.st_mtime_ns}"
    return hashlib.sha256(stamp.encode(errors="replace")).hexdigest()[:8]


def _shape(ne: Sequence[int]) -> list[int]:
    last = max((i for i, n in enumerate(ne) if n != 1), default=0)
    return list(ne[: max(2, last + 1)])
