"""The projector file (`mmproj`) among the files beside a model (`find_best_mmproj` in common/download.cpp, b11434)."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path

from llamado.gguf.errors import GgufError, SourceError

WORD = "mmproj"
"""In the names of projector files."""
_FLAGS = {"image": "clip.has_vision_encoder", "audio": "clip.has_audio_encoder"}
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


def input_kinds(projector: Path) -> tuple[str, ...]:
    """Return the kinds of media that a projector file encodes, from its header: "image", "audio".

    () if the file is missing or damaged.
    """
    try:
        stat = projector.stat()
    except OSError:
        return ()
    return _input_kinds(projector, stat.st_size, stat.st_mtime_ns)


@lru_cache(maxsize=256)
def _input_kinds(projector: Path, size: int, changed: int) -> tuple[str, ...]:
    """Return the kinds of a file as it was at a time: lists of models are made again and again."""
    from llamado.gguf.reader import GGUFFile

    try:
        with GGUFFile.open(projector) as file:
            return tuple(kind for kind, flag in _FLAGS.items() if file.metadata.bool_(flag, False))
    except (GgufError, OSError):
        return ()


def projector_beside(model: Path) -> Path | None:
    """Return the projector in the folder of a model's file, or None. Raises SourceError."""
    try:
        names = sorted(path.name for path in model.parent.iterdir() if path.is_file())
    except OSError as error:
        raise SourceError(f"{model.parent}: {error.strerror or error}") from None
    name = best_projector(names, model.name)
    return None if name is None else model.parent / name
