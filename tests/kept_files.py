"""Small files are made once: hundreds of tests of a process ask for the same ones."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar

MOST_BYTES = 256 << 20
LARGE = 3 << 20

Make = TypeVar("Make", bound=Callable[..., Path])


def kept(make: Make) -> Make:
    """Keeps what `make(…, path, **options)` writes for its arguments, unless it is large or a function changes it."""
    files: dict[bytes, bytes] = {}

    @wraps(make)
    def once(*given: Any, **options: Any) -> Path:
        *before, path = given
        if any(map(callable, options.values())):
            return make(*given, **options)
        key = pickle.dumps((before, sorted(options.items())))
        content = files.get(key)
        if content is not None:
            Path(path).write_bytes(content)
            return Path(path)
        made = make(*given, **options)
        size = made.stat().st_size
        if size <= LARGE and size + sum(map(len, files.values())) <= MOST_BYTES:
            files[key] = made.read_bytes()
        return made

    return once  # type: ignore[return-value]
