"""Numbers in texts of strangers."""

from __future__ import annotations

_MOST_DIGITS = 18
"""Digits that 64 bits hold in any case; from 4,300 on `int` raises ValueError."""


def whole_number(text: str) -> int | None:
    """Return the number that a text of ASCII digits stands for; None for any other text, or a longer one.

    `str.isdigit` accepts digits that `int` does not, such as "²".
    """
    return int(text) if text.isascii() and text.isdigit() and len(text) <= _MOST_DIGITS else None
