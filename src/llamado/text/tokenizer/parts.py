"""The part of a long text that is processed at a time.

A pass over text by a library holds the interpreter's lock until it ends, and other threads wait, such as the one that
answers /health. So long texts are processed in parts; none takes more than one or two milliseconds.
"""

from __future__ import annotations

from collections.abc import Iterator

PART_LENGTH = 1 << 14  # characters


def parts_of(text: str) -> Iterator[str]:
    """Return `text` in order, PART_LENGTH characters at a time."""
    return (text[at : at + PART_LENGTH] for at in range(0, len(text), PART_LENGTH))
