"""Pictures and sounds as text: base64, and `data:` URIs (RFC 2397)."""

from __future__ import annotations

import binascii

from llamado.media.errors import MediaError

_STEP = 1 << 18
"""Characters decoded at once: longer calls would hold the interpreter's lock for tens of milliseconds."""
_SHOWN = 60
"""Most characters of a client's text in an error."""
_TYPES = ("data:image/", "data:audio/")


def is_data_uri(text: str) -> bool:
    """Return True for a `data:` URI."""
    return text[:5].lower() == "data:"


def read_encoded(text: str) -> bytes:
    """Return the bytes of a `data:` URI or of base64 text. Raises MediaError."""
    if not is_data_uri(text):
        return decode_base64(text)
    comma = text.find(",")
    if comma < 0:
        raise MediaError("Invalid uri-encoded base64 value: a data URI needs a comma before the data")
    head = text[:comma]
    if not head[:_SHOWN].lower().startswith(_TYPES):
        raise MediaError(f"Invalid uri format: {head[:_SHOWN]}; expected data:image/… or data:audio/…")
    if head[-7:].lower() != ";base64":
        raise MediaError("uri must be base64 encoded")
    return decode_base64(text, comma + 1)


def decode_base64(text: str, start: int = 0) -> bytes:
    """Return the bytes of base64 text, which may have line breaks and lack its padding. Raises MediaError.

    The text begins at `start`. It is decoded in pieces, so that other threads run between them.
    """
    if not text.isascii():
        raise MediaError("Invalid base64 value: it has characters beyond ASCII")
    parts: list[bytes] = []
    rest = ""
    for at in range(start, len(text), _STEP):
        rest += "".join(text[at : at + _STEP].split())
        n = max(0, len(rest) - 4) // 4 * 4  # the end may lack its padding
        parts.append(_decoded(rest[:n]))
        rest = rest[n:]
    bare = rest.rstrip("=")
    if not bare and not any(parts):
        raise MediaError("Invalid base64 value: it is empty")
    if len(rest) - len(bare) > 2:
        raise MediaError("Invalid base64 value: it ends with more than two '='")
    parts.append(_decoded(bare + "=" * (-len(bare) % 4)))
    return b"".join(parts)  # without the interpreter's lock, since all are bytes


def _decoded(text: str) -> bytes:
    try:
        return binascii.a2b_base64(text, strict_mode=True)
    except (binascii.Error, ValueError) as error:
        raise MediaError(f"Invalid base64 value: {error}") from None
