"""Facts from the header of a model's file: architecture, size, context, template, license."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np

from llamado.errors import LlamadoError
from llamado.gguf.header import TensorInfo
from llamado.gguf.metadata import StringArray, Value
from llamado.gguf.reader import GGUFFile
from llamado.quantize.file_types import file_type_name

FOREVER = timedelta(days=200 * 365)
"""Time until a model that is never unloaded expires, for APIs that need a date."""
_MOST_ELEMENTS = 5  # longer arrays are shown as empty, as Ollama does
_END = 1 << 16  # bytes of a file's end in its digest
_HIDDEN = ("general.name", "tokenizer.chat_template")


@dataclass(frozen=True, kw_only=True)
class ModelFacts:
    """Facts of a model that are read without loading it."""

    architecture: str = ""
    n_params: int = 0
    quantization: str = ""
    """llama-quantize's name, such as Q4_K_M."""
    n_ctx_train: int = 0
    n_embd: int = 0
    license: str = ""
    template: str = ""
    """The chat template, as Jinja."""
    size: int = 0
    """Bytes of its files."""
    modified: float = 0.0
    """Seconds since 1970."""
    digest: str = ""
    """SHA-256 of its files' headers, ends and sizes; hashing all of a large file would take minutes."""
    embeds: bool = False
    """An embedding model, which does not generate."""
    info: Mapping[str, Any] = field(default_factory=dict)
    """The metadata as JSON. Long arrays are empty, because cached vocabularies of many models would fill the memory."""
    path: str = ""

    @property
    def parameter_size(self) -> str:
        """The number of parameters in short form: 135M, 7.2B."""
        return short_number(self.n_params) if self.n_params else ""


@dataclass(frozen=True, kw_only=True)
class FileHeader:
    """All metadata and the list of tensors of a file, as JSON."""

    info: Mapping[str, Any]
    tensors: Sequence[Mapping[str, Any]]


_cache: dict[tuple[str, int, int], ModelFacts] = {}


def read_facts(path: str | Path) -> ModelFacts | None:
    """Return the facts of a file, cached until it changes; None for a file that is gone or no model."""
    file = Path(path)
    try:
        stat = file.stat()
        key = (str(file), stat.st_size, stat.st_mtime_ns)
        if key not in _cache:
            _cache[key] = _read(file, stat.st_mtime)
        return _cache[key]
    except (OSError, LlamadoError):
        return None


def read_header(path: str | Path) -> FileHeader | None:
    """Return all metadata and tensors of a file; None for a file that is gone or no model."""
    try:
        with GGUFFile.open(path) as file:
            tensors = [
                {"name": info.name, "type": info.type.name, "shape": _shape(info.ne)} for info in file.tensors.values()
            ]
            return FileHeader(info=_info(file, complete=True), tensors=tensors)
    except (OSError, LlamadoError):
        return None


def _info(file: GGUFFile, *, complete: bool) -> dict[str, Any]:
    shown = {key: _json(value, complete) for key, value in file.metadata.items() if key not in _HIDDEN}
    return shown | {"general.parameter_count": _parameters(file)}


def _parameters(file: GGUFFile) -> int:
    return sum(tensor.n_elements for tensor in file.tensors.values())


def _shape(ne: Sequence[int]) -> list[int]:
    last = max((i for i, n in enumerate(ne) if n != 1), default=0)
    return list(ne[: last + 1])


def _read(path: Path, modified: float) -> ModelFacts:
    with GGUFFile.open(path) as file:
        metadata = file.metadata
        architecture = metadata.str_("general.architecture", "")
        number = metadata.int_("general.file_type", -1)
        name = file_type_name(number) if number >= 0 else None
        return ModelFacts(
            architecture=architecture,
            n_params=_parameters(file),
            quantization=name or _most_frequent(file.tensors),
            n_ctx_train=_whole(metadata.get(f"{architecture}.context_length")),
            n_embd=_whole(metadata.get(f"{architecture}.embedding_length")),
            license=_license(metadata),
            template=metadata.str_("tokenizer.chat_template", ""),
            size=file.file_bytes,
            modified=modified,
            digest=_digest(file),
            embeds=f"{architecture}.pooling_type" in metadata,
            info=_info(file, complete=False),
            path=str(path),
        )


def _whole(value: Value | None) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) else 0


def _most_frequent(tensors: Mapping[str, TensorInfo]) -> str:
    weights: dict[str, int] = {}
    for info in tensors.values():
        weights[info.type.name] = weights.get(info.type.name, 0) + info.n_elements
    return max(weights, key=weights.__getitem__, default="")


def _license(metadata: Mapping[str, Value]) -> str:
    found = [metadata.get(f"general.license{end}") for end in ("", ".name", ".link")]
    return "\n".join(text for text in found if isinstance(text, str) and text)


def _digest(file: GGUFFile) -> str:
    made = hashlib.sha256()
    for shard in range(file.n_shards):
        data = file.shard_data(shard)
        begins = min((info.offset for info in file.tensors.values() if info.shard == shard), default=data.size)
        made.update(b"%d " % data.size)
        made.update(data[:begins].data)
        made.update(data[max(begins, data.size - _END) :].data)
    return made.hexdigest()


def _json(value: Value, complete: bool) -> Any:
    if isinstance(value, (list, np.ndarray, StringArray)):
        if len(value) > _MOST_ELEMENTS and not complete:
            return []
        items = value.tolist() if isinstance(value, np.ndarray) else value
        return [_json(item, complete) for item in items]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def short_number(n: int) -> str:
    """Return a count in Ollama's short form of parameter counts, such as 135M."""
    for unit, letter, digits in ((10**9, "B", 1), (10**6, "M", 2), (10**3, "K", 0)):
        if n >= unit:
            return f"{n / unit:.{0 if n % unit == 0 else digits}f}{letter}"
    return str(n)


def timestamp(seconds: float) -> str:
    """Return a time in seconds since 1970 as RFC 3339 text, in UTC."""
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")
