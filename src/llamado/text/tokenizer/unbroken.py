"""How much of a text is worked on at a time.

A pass over text by a library holds the interpreter's lock until it has ended, and other threads, such as the one that
answers /health, wait. So long texts are taken in parts; none takes more than a millisecond or two.
"""

from __future__ import annotations

from collections.abc import Iterator

UNBROKEN = 1 << 14  # characters


def parts_of(text: str) -> Iterator[str]:
    """`text` in order, UNBROKEN characters at a time."""
    return (text[at : at + UNBROKEN] for at in range(0, len(text), UNBROKEN))
