"""Pictures and sounds as text: base64, and `data:` URIs (RFC 2397)."""

from __future__ import annotations

import binascii

from llamado.media.errors import MediaError

_STEP = 1 << 20
"""Characters decoded at once, a multiple of 4: longer calls would hold the interpreter's lock for tens of
milliseconds."""
_SPACE = " \t\r\n"
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
    head, comma, data = text.partition(",")
    if not comma:
        raise MediaError("Invalid uri-encoded base64 value: a data URI needs a comma before the data")
    if not head.lower().startswith(_TYPES):
        raise MediaError(f"Invalid uri format: {head[:_SHOWN]}; expected data:image/… or data:audio/…")
    if not head.lower().endswith(";base64"):
        raise MediaError("uri must be base64 encoded")
    return decode_base64(data)


def decode_base64(text: str) -> bytes:
    """Return the bytes of base64 text, which may have line breaks and lack its padding. Raises MediaError."""
    if not text.isascii():
        raise MediaError("Invalid base64 value: it has characters beyond ASCII")
    if any(space in text for space in _SPACE):
        text = "".join(text.split())
    bare = text.rstrip("=")
    if not bare:
        raise MediaError("Invalid base64 value: it is empty")
    if len(text) - len(bare) > 2:
        raise MediaError("Invalid base64 value: it ends with more than two '='")
    whole = bare + "=" * (-len(bare) % 4)
    try:
        return b"".join(
            binascii.a2b_base64(whole[i : i + _STEP], strict_mode=True) for i in range(0, len(whole), _STEP)
        )
    except (binascii.Error, ValueError) as error:
        raise MediaError(f"Invalid base64 value: {error}") from None
