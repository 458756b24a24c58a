"""Numbers in untrusted text."""

from __future__ import annotations

_MOST_DIGITS = 18
"""Digits that always fit in 64 bits. `int` raises ValueError from 4,300 digits on."""


def whole_number(text: str) -> int | None:
    """Return the number in a text of ASCII digits, or None for any other or longer text.

    `str.isdigit` accepts digits that `int` does not, such as "²".
    """
    return int(text) if text.isascii() and text.isdigit() and len(text) <= _MOST_DIGITS else None
