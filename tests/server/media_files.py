"""Small pictures and sounds for tests, made here."""

from __future__ import annotations

import base64
import struct
import zlib


def png(width: int = 2, height: int = 3, color: tuple[int, int, int] = (255, 0, 0)) -> bytes:
    """Return a picture of one color."""
    rows = (b"\0" + bytes(color) * width) * height

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


def wav(n_samples: int = 1600, rate: int = 16000) -> bytes:
    """Return a sound of one channel in 16 bits."""
    data = struct.pack("<h", 1000) * n_samples
    head = struct.pack("<IHHIIHH", 16, 1, 1, rate, 2 * rate, 2, 16)
    body = b"WAVEfmt " + head + b"data" + struct.pack("<I", len(data)) + data
    return b"RIFF" + struct.pack("<I", len(body)) + body


def base64_of(data: bytes) -> str:
    return base64.b64encode(data).decode()


def data_uri(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64_of(data)}"
