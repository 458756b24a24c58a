"""Decode a picture or sound of any supported format."""

from __future__ import annotations

from llamado.media.media import Media, MediaKind
from llamado.media.pictures import decode_picture
from llamado.media.sounds import decode_sound, is_sound


def kind_of(data: bytes) -> MediaKind:
    """Return AUDIO if the first bytes are those of a sound, else IMAGE: the decoder of pictures rejects other files."""
    return MediaKind.AUDIO if is_sound(data) else MediaKind.IMAGE


def decode(data: bytes, kind: MediaKind, rate: int = 0) -> Media:
    """Decode a file of one kind, a sound to `rate` samples a second. Raises MediaError."""
    return decode_sound(data, rate) if kind is MediaKind.AUDIO else decode_picture(data)
