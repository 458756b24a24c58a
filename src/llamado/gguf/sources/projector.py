"""The projector file (`mmproj`) among the files beside a model (`find_best_mmproj` in common/download.cpp, b11434)."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from llamado.gguf.errors import SourceError

WORD = "mmproj"
"""In the names of projector files."""
_TAG = re.compile(r"[-.]([A-Za-z0-9_]+)$")
_SHARD = re.compile(r"-\d{5}-of-\d{5}$")


def best_projector(files: Iterable[str], model: str) -> str | None:
    """Return the projector for a model among the paths of a repository, or None.

    It is in the model's folder or above it, the nearest one. Of several there, its weights have the number of bits that
    is closest to the model's; then the first.
    """
    folders = model.split("/")[:-1]
    best: tuple[int, int] | None = None
    found = None
    for file in files:
        *inside, name = file.split("/")
        if not name.endswith(".gguf") or WORD not in file or inside != folders[: len(inside)]:
            continue
        rank = (-len(inside), abs(_bits(file) - _bits(model)))
        if best is None or rank < best:
            best, found = rank, file
    return found


def _bits(file: str) -> int:
    """Return the bits of a weight, by the quantization in a file's name: 4 for `-Q4_K_M.gguf`; 0 if there is none."""
    tag = _TAG.search(_SHARD.sub("", file.removesuffix(".gguf")))
    digits = re.search(r"\d+", tag[1]) if tag is not None else None
    return int(digits[0][:9]) if digits is not None else 0


def projector_beside(model: Path) -> Path | None:
    """Return the projector in the folder of a model's file, or None. Raises SourceError."""
    try:
        names = sorted(path.name for path in model.parent.iterdir() if path.is_file())
    except OSError as error:
        raise SourceError(f"{model.parent}: {error.strerror or error}") from None
    name = best_projector(names, model.name)
    return None if name is None else model.parent / name
