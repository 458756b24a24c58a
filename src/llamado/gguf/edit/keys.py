"""Change one key of a GGUF file; everything else is copied byte for byte."""

from __future__ import annotations

import json
import re
from pathlib import Path

from llamado.gguf.edit.copying import all_data, new_tensors
from llamado.gguf.errors import GgufError
from llamado.gguf.header import Header, parse_header
from llamado.gguf.metadata import Metadata, StringArray, Value, ValueType
from llamado.gguf.reader import GGUFFile
from llamado.gguf.report import Progress
from llamado.gguf.shards import SPLIT_COUNT, SPLIT_NO, SPLIT_TENSORS
from llamado.gguf.writer import Fields, encode, header_bytes, read_fields, write_gguf

TYPES = tuple(kind.name.lower() for kind in ValueType if kind is not ValueType.ARRAY)
"""Types that a new key may have."""

_PARTS = (SPLIT_COUNT, SPLIT_NO, SPLIT_TENSORS)
_KEY = re.compile(r"[a-z0-9_]+(\.[A-Za-z0-9_-]+)*")  # docs/gguf.md; Hugging Face training keys have capitals


def with_value(file: GGUFFile, key: str, text: str, type_name: str | None = None) -> Fields:
    """Return the key-values with `key` set to `text`, parsed by type: a string, number, true or false, or a JSON list.

    An existing key keeps its type. A new key has `type_name`, or is an array of it if `text` is a JSON list. Raises
    GgufError.
    """
    if key in _PARTS:
        raise GgufError("only llamado gguf split and merge set this key", path=file.path, field=key)
    fields = read_fields(file.path)
    stored = file.metadata.type_name(key) if key in fields else ""
    if stored and type_name not in (None, stored):
        raise GgufError(f"its type is {stored} and cannot change; omit --type", path=file.path, field=key)
    if not stored and not _KEY.fullmatch(key):
        raise GgufError("a key consists of words of a-z, 0-9 and _, separated by dots", path=file.path, field=key[:80])
    if not stored and type_name is None:
        raise GgufError(f"the file has no such key; add it with --type ({', '.join(TYPES)})", path=file.path, field=key)
    array = stored.startswith("array of ") or (not stored and text.lstrip().startswith("[") and type_name != "string")
    kind = ValueType[(stored or type_name or "").removeprefix("array of ").upper()]
    try:
        value = _list(text, kind) if array else _single(text, kind)
        fields[key] = encode(value, None if kind is ValueType.STRING else kind)
    except (ValueError, OverflowError) as error:
        wanted = f"{'an array of ' if array else ''}{kind.name.lower()}"
        raise GgufError(
            f"the key is {wanted}, which {text[:60]!r} is not ({error})", path=file.path, field=key
        ) from None
    return fields


def header_with(file: GGUFFile, fields: Fields) -> Header:
    """Return the header of the new file, parsed like that of any file; raise GgufError if it would be invalid."""
    return parse_header(header_bytes(fields, new_tensors(file.tensors.values())), file.source)


def rewrite(file: GGUFFile, fields: Fields, to: Path, progress: Progress | None = None) -> None:
    """Write the file with these key-values; `to` may be the file itself. Raises GgufError."""
    if file.n_shards > 1:
        raise GgufError("the model is split; merge it first", path=file.path, field=SPLIT_COUNT)
    write_gguf(to, fields, new_tensors(file.tensors.values()), all_data(file, progress))


def format_value(metadata: Metadata, key: str) -> str:
    """Format a value for a message; empty if the key is absent."""
    value = metadata.get(key)
    if value is None:
        return ""
    text = json.dumps(value) if isinstance(value, str) else str(value)
    return text if len(text) <= 60 else f"{text[:57]}…"


def _single(text: str, kind: ValueType) -> Value:
    if kind is ValueType.STRING:
        return text
    if kind is ValueType.BOOL:
        if text.lower() not in ("true", "false"):
            raise ValueError("expected true or false")
        return text.lower() == "true"
    return float(text) if kind in (ValueType.FLOAT32, ValueType.FLOAT64) else int(text, 0)


def _list(text: str, kind: ValueType) -> Value:
    given = json.loads(text)
    wanted: tuple[type, ...] = {ValueType.STRING: (str,), ValueType.BOOL: (bool,)}.get(kind, (int,))
    if kind in (ValueType.FLOAT32, ValueType.FLOAT64):
        wanted = (int, float)
    if not isinstance(given, list) or not all(type(one) in wanted for one in given):
        raise ValueError("expected a JSON list of such values")
    return StringArray.of(given) if kind is ValueType.STRING else given
