"""Small picture files in each format and mode, made by Pillow and by hand."""

from __future__ import annotations

import io
import struct
import zlib
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

SIZE = WIDTH, HEIGHT = 19, 13


def noise(channels: int = 3, *, seed: int = 0) -> NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, (HEIGHT, WIDTH, channels), np.uint8)


def smooth() -> NDArray[np.uint8]:
    """Return a picture that JPEG keeps."""
    y, x = np.mgrid[:HEIGHT, :WIDTH]
    return np.stack([x * 13, y * 19, 0 * x + 90], axis=2).astype(np.uint8)


def saved(pixels: NDArray[np.uint8] | Image.Image, format: str, **options: Any) -> bytes:
    """Return the bytes of a file."""
    image = pixels if isinstance(pixels, Image.Image) else Image.fromarray(pixels)
    out = io.BytesIO()
    image.save(out, format, **options)
    return out.getvalue()


def palette(n: int = 64) -> Image.Image:
    """Return noise of up to `n` colors."""
    return Image.fromarray(noise()).quantize(n)


def chunk(kind: bytes, data: bytes) -> bytes:
    """Return a chunk of a PNG file."""
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(width: int, height: int, depth: int, color: int, rows: bytes, *before: bytes) -> bytes:
    """Return a PNG file of uncompressed `rows`, with a byte 0 before each; `before`: chunks before the pixels."""
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, color, 0, 0, 0))
    pixels = chunk(b"IDAT", zlib.compress(rows))
    return b"\x89PNG\r\n\x1a\n" + header + b"".join(before) + pixels + chunk(b"IEND", b"")


def png16(color: int, values: NDArray[np.uint16]) -> bytes:
    """Return a PNG file with 16 bits a color, [h, w, channels]."""
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in values)
    return png(values.shape[1], values.shape[0], 16, color, rows)


def gif(screen: tuple[int, int], frame: tuple[int, int, int, int], indices: bytes, *, background: int = 0) -> bytes:
    """Return a GIF file of one frame (left, top, width, height) of palette indices below 4, without compression.

    The colors are (10, 20, 30), (40, 50, 60), (70, 80, 90) and (100, 110, 120); index 3 is transparent.
    """
    colors = bytes(range(10, 130, 10))
    control = b"\x21\xf9\x04\x01\0\0\x03\0"
    bits, n = 0, 0
    for code in [4, *(item for index in indices for item in (index, 4)), 5]:  # clears the table after each color
        bits |= code << n
        n += 3
    codes = bits.to_bytes(-(-n // 8), "little")
    assert len(codes) < 256
    screen_bytes = struct.pack("<HHBBB", *screen, 0x80 | 1, background, 0)
    frame_bytes = b"," + struct.pack("<HHHHB", *frame, 0)
    return b"GIF89a" + screen_bytes + colors + control + frame_bytes + b"\x02" + bytes([len(codes)]) + codes + b"\0;"


def exact() -> dict[str, tuple[bytes, NDArray[np.uint8]]]:
    """Return files by name, with the pixels that both stb_image and llamado decode."""
    rgb, rgba, gray = noise(), noise(4), noise()[:, :, 0]
    grays = np.repeat(gray[:, :, None], 3, axis=2)
    deep = np.random.default_rng(1).integers(0, 65536, (5, 7, 4), np.uint16)
    high = (deep >> 8).astype(np.uint8)
    colors, few = palette(), palette(9)
    black_and_white = Image.fromarray(gray).convert("1")
    two = np.asarray(black_and_white.convert("RGB"))
    indexed, indexed_few = np.asarray(colors.convert("RGB")), np.asarray(few.convert("RGB"))
    next_frame = Image.fromarray(noise(seed=3)).quantize(64)
    return {
        "png-rgb": (saved(rgb, "PNG"), rgb),
        "png-rgba": (saved(rgba, "PNG"), rgba[:, :, :3]),
        "png-gray": (saved(gray, "PNG"), grays),
        "png-gray-alpha": (saved(Image.fromarray(noise(2)), "PNG"), np.repeat(noise(2)[:, :, :1], 3, axis=2)),
        "png-1-bit": (saved(black_and_white, "PNG"), two),
        "png-palette": (saved(colors, "PNG"), indexed),
        "png-palette-4-bits": (saved(few, "PNG", bits=4), indexed_few),
        "png-palette-alpha": (saved(colors, "PNG", transparency=bytes(range(64))), indexed),
        "png-palette-transparent": (saved(colors, "PNG", transparency=5), indexed),
        "png-rgb-transparent": (saved(rgb, "PNG", transparency=tuple(map(int, rgb[0, 0]))), rgb),
        "png-gray-transparent": (saved(gray, "PNG", transparency=int(gray[0, 0])), grays),
        "png-16-bits-gray": (png16(0, deep[:, :, :1]), np.repeat(high[:, :, :1], 3, axis=2)),
        "png-16-bits-gray-alpha": (png16(4, deep[:, :, :2]), np.repeat(high[:, :, :1], 3, axis=2)),
        "png-16-bits-rgb": (png16(2, deep[:, :, :3]), high[:, :, :3]),
        "png-16-bits-rgba": (png16(6, deep), high[:, :, :3]),
        "png-1x1": (saved(rgb[:1, :1], "PNG"), rgb[:1, :1]),
        "png-animated": (saved(Image.fromarray(rgb), "PNG", save_all=True, append_images=[next_frame]), rgb),
        "bmp-rgb": (saved(rgb, "BMP"), rgb),
        "bmp-rgba": (saved(rgba, "BMP"), rgba[:, :, :3]),
        "bmp-gray": (saved(gray, "BMP"), grays),
        "bmp-palette": (saved(colors, "BMP"), indexed),
        "bmp-1-bit": (saved(black_and_white, "BMP"), two),
        "gif": (saved(colors, "GIF"), indexed),
        "gif-gray": (saved(gray, "GIF"), grays),
        "gif-animated": (saved(colors, "GIF", save_all=True, append_images=[next_frame]), indexed),
        "gif-transparent": (gif((2, 2), (0, 0, 2, 2), bytes([0, 1, 2, 3])), small([10, 40, 70, 0])),
        "gif-1x1": (gif((1, 1), (0, 0, 1, 1), bytes([1])), small([40])),
    }


def small(reds: list[int]) -> NDArray[np.uint8]:
    """Return a square picture of the colors of `gif`, which are given by their red; 0: black."""
    side = round(len(reds) ** 0.5)
    colors = [(red, red + 10, red + 20) if red else (0, 0, 0) for red in reds]
    return np.array(colors, np.uint8).reshape(side, side, 3)


def lossy() -> dict[str, tuple[bytes, NDArray[np.uint8]]]:
    """Return files by name, whose pixels are nearly those of the picture."""
    gray = smooth()[:, :, 0]
    grays = np.repeat(gray[:, :, None], 3, axis=2)
    return {
        "jpeg": (saved(smooth(), "JPEG", quality=95, subsampling=0), smooth()),
        "jpeg-gray": (saved(gray, "JPEG", quality=95), grays),
        "jpeg-progressive": (saved(smooth(), "JPEG", quality=95, subsampling=0, progressive=True), smooth()),
        "jpeg-cmyk": (saved(Image.fromarray(smooth()).convert("CMYK"), "JPEG", quality=95), smooth()),
        "webp": (saved(smooth(), "WEBP", quality=100), smooth()),
        "webp-lossless": (saved(noise(), "WEBP", lossless=True), noise()),
        "webp-alpha": (saved(noise(4), "WEBP", lossless=True, exact=True), noise(4)[:, :, :3]),
        "webp-animated": (
            saved(Image.fromarray(noise()), "WEBP", lossless=True, save_all=True, append_images=[palette()]),
            noise(),
        ),
    }
