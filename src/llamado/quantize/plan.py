"""What a quantized file will hold: key-values and tensors in llama-quantize's order, before anything is computed."""

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
from llamado.quantize.mixture import Shape, TypeMixture, Wishes, needs_imatrix
from llamado.quantize.rows import QUANTIZERS, readable

QUANTIZATION_VERSION = 2  # GGML_QNT_VERSION
_SPLIT_KEYS = ("split.no", "split.count", "split.tensors.count")
_LAYER = re.compile(r"blk\.(\d+)\.")
_MOST_TEXT = 127  # bytes of an overridden text (llama_model_kv_override)

Override = tuple[str, "int | float | bool | str"]


@dataclass(frozen=True)
class QuantizeRequest:
    """What is to be made of a file.

    `prune`: layers that are left out. `overrides`: key-values set anew. `keep_split`: as many files as the model has.
    """

    kind: FileType
    wishes: Wishes = field(default_factory=Wishes)
    imatrix: Imatrix | None = None
    allow_requantize: bool = False
    prune: frozenset[int] = frozenset()
    overrides: Sequence[Override] = ()
    keep_split: bool = False


class Step(NamedTuple):
    """One tensor: where it comes from, what it becomes, and what its columns weigh, float32[experts · row]."""

    source: TensorInfo
    target: NewTensor
    weights_name: str

    @property
    def changes(self) -> bool:
        return self.source.type is not self.target.type


class File(NamedTuple):
    """One file that will be written."""

    fields: Fields
    steps: list[Step]


class FilePlan(NamedTuple):
    """Files, tensors that have to take another type than the one due, and those that need an importance matrix."""

    files: list[File]
    fallbacks: list[str]
    wanting: list[str]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors as they will be."""
        return sum(step.target.nbytes for file in self.files for step in file.steps)


def plan(file: GGUFFile, request: QuantizeRequest) -> FilePlan:
    """What the request makes of a model. Raises QuantizeError for what cannot be made."""
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
    names, n_layers = _renumbered(tensors, request.prune)
    if request.prune:
        architecture = file.metadata.str_("general.architecture")
        _set(fields, f"{architecture}.block_count", n_layers, ValueType.UINT32)
    kept = [t for t in tensors if t.name in names]
    if request.keep_split:
        kept.sort(key=lambda t: (t.shard, t.offset))
    metadata = file.metadata.with_values(dict(request.overrides))
    mixture = TypeMixture(
        kind, Shape.of(metadata), request.wishes, [names[t.name] for t in kept], request.imatrix is not None
    )
    steps, wanting = [], []
    for tensor in kept:
        name, type_ = names[tensor.name], tensor.type
        if kind is not COPY and mixture.quantizes(name, _n_dims(tensor.ne)):
            type_ = mixture.type_of(name, tensor.ne)
            if needs_imatrix(name, type_, kind):
                wanting.append(name)
        step = Step(tensor, NewTensor(name, type_, tensor.ne), tensor.name)
        if step.changes:
            _check(step, request)
        steps.append(step)
    return FilePlan(_files(file, fields, steps, request), mixture.fallbacks, [] if request.imatrix else wanting)


def _check(step: Step, request: QuantizeRequest) -> None:
    name, source, target = step.target.name, step.source.type, step.target.type
    if target not in QUANTIZERS:
        raise QuantizeError(f"{name}: {target.name} is not a type that can be written")
    if not readable(source):
        raise QuantizeError(f"{name}: {source.name} cannot be read as numbers")
    if source not in (T.F32, T.F16, T.BF16) and not request.allow_requantize:
        raise QuantizeError(
            f"{name} is {source.name} already, and what is lost twice is worse than what is lost once: take the model "
            "in F16, BF16 or F32, or add --allow-requantize"
        )


def _files(file: GGUFFile, fields: Fields, steps: list[Step], request: QuantizeRequest) -> list[File]:
    n = 1 + max((step.source.shard for step in steps), default=0) if request.keep_split else 1
    files = [File(fields if i == 0 else {}, []) for i in range(n)]
    for step in steps:
        files[step.source.shard if request.keep_split else 0].steps.append(step)
    if n > 1:
        for i, part in enumerate(files):
            _set(part.fields, "split.no", i, ValueType.UINT16)
            _set(part.fields, "split.count", n, ValueType.UINT16)
            _set(part.fields, "split.tensors.count", len(steps), ValueType.INT32)
    return files


def _set(fields: Fields, key: str, value: int | float | bool | str, kind: ValueType | None) -> None:
    """Sets a key-value; it moves behind all others, as llama.cpp has it."""
    fields.pop(key, None)
    fields[key] = encode(value, kind)


def _layer(name: str) -> int:
    match = re.match(r"blk\.(-?\d+)\.?", name)
    return int(match[1]) if match else -1


def _renumbered(tensors: Sequence[TensorInfo], prune: frozenset[int]) -> tuple[Mapping[str, str], int]:
    """New names of the tensors that stay, and how many layers there are then."""
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
    """The type most tensors have; of equals the one that came to that number first."""
    seen: Counter[T] = Counter()
    best, most = T.F32, 0
    for tensor in tensors:
        seen[tensor.type] += 1
        if seen[tensor.type] > most:
            best, most = tensor.type, seen[tensor.type]
    return best
