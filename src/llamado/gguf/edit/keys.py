"""A file with another value of one key: all else, to the byte, as it was."""

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
"""What a new key may be said to be."""

_PARTS = (SPLIT_COUNT, SPLIT_NO, SPLIT_TENSORS)
_KEY = re.compile(r"[a-z0-9_]+(\.[A-Za-z0-9_-]+)*")  # docs/gguf.md; keys of Hugging Face's training have capitals


def changed(file: GGUFFile, key: str, text: str, type_name: str | None = None) -> Fields:
    """The key-values with `key` as `text` says: a text as it is, a number, true or false, of arrays a JSON list.

    A key keeps its type; a new one has `type_name` (a list of such things for a JSON list). Raises GgufError.
    """
    if key in _PARTS:
        raise GgufError("parts are made by llamado gguf split and merge alone", path=file.path, field=key)
    fields = read_fields(file.path)
    stored = file.metadata.type_name(key) if key in fields else ""
    if stored and type_name not in (None, stored):
        raise GgufError(f"its type is {stored} and stays so; leave --type out", path=file.path, field=key)
    if not stored and not _KEY.fullmatch(key):
        raise GgufError("a key is words of a-z, 0-9 and _, with dots between them", path=file.path, field=key[:80])
    if not stored and type_name is None:
        raise GgufError(
            f"the file has no such key; --type makes it one ({', '.join(TYPES)})", path=file.path, field=key
        )
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
    """What the file will say of itself, read as any file is; raises GgufError for what no file may have."""
    return parse_header(header_bytes(fields, new_tensors(file.tensors.values())), file.source)


def rewrite(file: GGUFFile, fields: Fields, to: Path, progress: Progress | None = None) -> None:
    """Writes the file with these key-values; `to` may be the file itself. Raises GgufError."""
    if file.n_shards > 1:
        raise GgufError("it is divided into parts; merge it first", path=file.path, field=SPLIT_COUNT)
    write_gguf(to, fields, new_tensors(file.tensors.values()), all_data(file, progress))


def shown(metadata: Metadata, key: str) -> str:
    """A value as messages have it; nothing where there is none."""
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
            raise ValueError("true or false is due")
        return text.lower() == "true"
    return float(text) if kind in (ValueType.FLOAT32, ValueType.FLOAT64) else int(text, 0)


def _list(text: str, kind: ValueType) -> Value:
    given = json.loads(text)
    wanted: tuple[type, ...] = {ValueType.STRING: (str,), ValueType.BOOL: (bool,)}.get(kind, (int,))
    if kind in (ValueType.FLOAT32, ValueType.FLOAT64):
        wanted = (int, float)
    if not isinstance(given, list) or not all(type(one) in wanted for one in given):
        raise ValueError("a JSON list of such values is due")
    return StringArray.of(given) if kind is ValueType.STRING else given
