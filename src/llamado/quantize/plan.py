"""Plan of a quantized file: key-values and tensors in llama-quantize's order, before anything is computed."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from llamado.gguf import GGUFFile, TensorInfo
from llamado.gguf.metadata import ValueType
from llamado.gguf.types import TensorType as T
from llamado.gguf.writer import Fields, NewTensor, encode, read_fields
from llamado.quantize.errors import QuantizeError
from llamado.quantize.file_types import COPY, GUESSED, FileType, file_type_of
from llamado.quantize.imatrix import Imatrix
from llamado.quantize.mixture import ModelShape, TypeMixture, TypeOptions, needs_imatrix
from llamado.quantize.rows import QUANTIZERS, is_readable

QUANTIZATION_VERSION = 2  # GGML_QNT_VERSION
_SPLIT_KEYS = ("split.no", "split.count", "split.tensors.count")
_LAYER = re.compile(r"blk\.(\d+)\.")
_MOST_TEXT = 127  # bytes of an overridden string (llama_model_kv_override)

Override = tuple[str, "int | float | bool | str"]


@dataclass(frozen=True)
class QuantizeRequest:
    """Options for quantizing a file.

    `prune`: layers to remove. `overrides`: key-values to set. `keep_split`: write as many files as the model has.
    """

    kind: FileType
    type_options: TypeOptions = field(default_factory=TypeOptions)
    imatrix: Imatrix | None = None
    allow_requantize: bool = False
    prune: frozenset[int] = frozenset()
    overrides: Sequence[Override] = ()
    keep_split: bool = False


class TensorPlan(NamedTuple):
    """One tensor: its source, its target, and the name of its entry in the importance matrix."""

    source: TensorInfo
    target: NewTensor
    weights_name: str

    @property
    def is_changed(self) -> bool:
        return self.source.type is not self.target.type


class OutputFile(NamedTuple):
    """One file to be written."""

    fields: Fields
    tensor_plans: list[TensorPlan]


class FilePlan(NamedTuple):
    """Files to be written, tensors that fall back to another type, and tensors that need an importance matrix."""

    files: list[OutputFile]
    fallbacks: list[str]
    needing_imatrix: list[str]

    @property
    def nbytes(self) -> int:
        """Return the size in bytes of all tensors after quantizing."""
        return sum(tensor_plan.target.nbytes for file in self.files for tensor_plan in file.tensor_plans)


def plan(file: GGUFFile, request: QuantizeRequest) -> FilePlan:
    """Plan a request for a model. Raises QuantizeError if it is impossible."""
    tensors = sorted(file.tensors.values(), key=lambda t: (_layer(t.name), t.name.encode()))
    kind = request.kind
    number = file.metadata.int_("general.file_type", file_type_of(_most_frequent(tensors)) | GUESSED)
    fields = read_fields(file.path)
    _set(fields, "general.quantization_version", QUANTIZATION_VERSION, ValueType.UINT32)
    _set(fields, "general.file_type", number if kind is COPY else kind.number, ValueType.UINT32)
    for key in _SPLIT_KEYS:
        fields.pop(key, None)
    for key, value in (*request.overrides, *(request.imatrix.overrides() if request.imatrix else ())):
        if isinstance(value, str):
            value = value.encode()[:_MOST_TEXT].decode("utf-8", "ignore")
        whole = isinstance(value, int) and not isinstance(value, bool)
        _set(fields, key, abs(value) if whole else value, ValueType.UINT32 if whole else None)
    names, n_layers = _renumber_layers(tensors, request.prune)
    if request.prune:
        architecture = file.metadata.str_("general.architecture")
        _set(fields, f"{architecture}.block_count", n_layers, ValueType.UINT32)
    kept = [t for t in tensors if t.name in names]
    if request.keep_split:
        kept.sort(key=lambda t: (t.shard, t.offset))
    metadata = file.metadata.with_values(dict(request.overrides))
    mixture = TypeMixture(
        kind, ModelShape.of(metadata), request.type_options, [names[t.name] for t in kept], request.imatrix is not None
    )
    tensor_plans, needing_imatrix = [], []
    for tensor in kept:
        name, type_ = names[tensor.name], tensor.type
        if kind is not COPY and mixture.is_quantized(name, _n_dims(tensor.ne)):
            type_ = mixture.type_of(name, tensor.ne)
            if needs_imatrix(name, type_, kind):
                needing_imatrix.append(name)
        tensor_plan = TensorPlan(tensor, NewTensor(name, type_, tensor.ne), tensor.name)
        if tensor_plan.is_changed:
            _check(tensor_plan, request)
        tensor_plans.append(tensor_plan)
    return FilePlan(
        _files(file, fields, tensor_plans, request), mixture.fallbacks, [] if request.imatrix else needing_imatrix
    )


def _check(tensor_plan: TensorPlan, request: QuantizeRequest) -> None:
    name, source, target = tensor_plan.target.name, tensor_plan.source.type, tensor_plan.target.type
    if target not in QUANTIZERS:
        raise QuantizeError(f"{name}: {target.name} is not a supported target type")
    if not is_readable(source):
        raise QuantizeError(f"{name}: {source.name} is not a supported source type")
    if source not in (T.F32, T.F16, T.BF16) and not request.allow_requantize:
        raise QuantizeError(
            f"{name} is {source.name} already; quantizing twice adds to the loss: use the model "
            "in F16, BF16 or F32, or add --allow-requantize"
        )


def _files(
    file: GGUFFile, fields: Fields, tensor_plans: list[TensorPlan], request: QuantizeRequest
) -> list[OutputFile]:
    n = 1 + max((tensor_plan.source.shard for tensor_plan in tensor_plans), default=0) if request.keep_split else 1
    files = [OutputFile(fields if i == 0 else {}, []) for i in range(n)]
    for tensor_plan in tensor_plans:
        files[tensor_plan.source.shard if request.keep_split else 0].tensor_plans.append(tensor_plan)
    if n > 1:
        for i, part in enumerate(files):
            _set(part.fields, "split.no", i, ValueType.UINT16)
            _set(part.fields, "split.count", n, ValueType.UINT16)
            _set(part.fields, "split.tensors.count", len(tensor_plans), ValueType.INT32)
    return files


def _set(fields: Fields, key: str, value: int | float | bool | str, kind: ValueType | None) -> None:
    """Set a key-value and move it to the end, as llama.cpp does."""
    fields.pop(key, None)
    fields[key] = encode(value, kind)


def _layer(name: str) -> int:
    match = re.match(r"blk\.(-?\d+)\.?", name)
    return int(match[1]) if match else -1


def _renumber_layers(tensors: Sequence[TensorInfo], prune: frozenset[int]) -> tuple[Mapping[str, str], int]:
    """Return the new names of the remaining tensors, and the remaining number of layers."""
    if not prune:
        return {t.name: t.name for t in tensors}, 0
    numbers: dict[int, int | None] = {}
    following = 0
    names = {}
    for tensor in tensors:
        match = _LAYER.search(tensor.name)
        if match is None:
            names[tensor.name] = tensor.name
            continue
        layer = int(match[1])
        if layer not in numbers:
            if layer in prune:
                numbers[layer] = None
            else:
                numbers[layer] = layer if layer < min(prune) else following
                following = numbers[layer] + 1  # type: ignore[operator]
        new = numbers[layer]
        if new is not None:
            names[tensor.name] = tensor.name[: match.start(1)] + str(new) + tensor.name[match.end(1) :]
    return names, following


def _n_dims(ne: Sequence[int]) -> int:
    return max((i + 1 for i, n in enumerate(ne) if n > 1), default=1)


def _most_frequent(tensors: Sequence[TensorInfo]) -> T:
    """Return the most frequent type; of equally frequent ones, the first that reached that count."""
    seen: Counter[T] = Counter()
    best, most = T.F32, 0
    for tensor in tensors:
        seen[tensor.type] += 1
        if seen[tensor.type] > most:
            best, most = tensor.type, seen[tensor.type]
    return best
