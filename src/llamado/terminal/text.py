"""Plain output without control characters."""

from __future__ import annotations

import builtins
import re
from typing import TextIO

# Controls of ASCII and Latin-1 but tab and line feed; line separators; marks that change the direction of what follows;
# halves of surrogate pairs, which no encoding has.
_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str) -> str:
    """Return `text` with control characters spelled out: a terminal acts on none of it.

    JSON stays JSON: its writers escape those of ASCII themselves.
    """
    return text if text.isprintable() else _CONTROLS.sub(_spelled, text)


def _spelled(found: re.Match[str]) -> str:
    code = ord(found[0])
    return f"\\x{code:02x}" if code < 0x20 else f"\\u{code:04x}"


def print(*values: object, sep: str = " ", end: str = "\n", file: TextIO | None = None, flush: bool = False) -> None:
    """Print values as the built-in function does, without control characters."""
    builtins.print(printable(sep.join(map(str, values)) + end), end="", file=file, flush=flush)
