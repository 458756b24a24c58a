"""Damaged picture files: each gives a picture within the limits, or MediaError."""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import islice

import numpy as np
import pytest
from picture_files import chunk, exact, gif, lossy, saved, smooth
from PIL import Image

from llamado.media.errors import MediaError
from llamado.media.pictures import ORIENTATION, PictureLimits, decode_picture

LIMITS = PictureLimits(max_bytes=100_000, max_pixels=5_000)


def files(format: str) -> list[bytes]:
    """Return files of a format, one with Exif data."""
    made = [data for name, (data, _) in (exact() | lossy()).items() if name.partition("-")[0] == format]
    if format in ("png", "jpeg", "webp"):
        exif = Image.Exif()
        exif[ORIENTATION] = 6
        made.append(saved(smooth(), format.upper(), exif=exif))
    if format == "gif":
        made.append(gif((6, 6), (1, 1, 4, 4), bytes(range(4)) * 4))
    return made


def damaged(format: str) -> Iterator[bytes]:
    """Return files with bytes changed, removed, inserted and repeated, most of them near the beginning."""
    rng, sources = np.random.default_rng(0), files(format)
    while True:
        data = bytearray(sources[rng.integers(len(sources))])
        for _ in range(rng.integers(1, 6)):
            at = int(len(data) * rng.random() ** 2)
            n = int(rng.integers(1, 9))
            match rng.integers(6):
                case 0:
                    data[at : at + 1] = bytes([rng.integers(256)])
                case 1:
                    data[at : at + n] = rng.bytes(n)
                case 2:
                    del data[at : at + n]
                case 3:
                    data[at:at] = rng.bytes(n)
                case 4:
                    data[at:at] = data[at : at + 4 * n]
                case 5:
                    data[at : at + 4] = [b"\xff" * 4, b"\0" * 4, b"\x7f\xff\xff\xff", b"\0\0\0\x01"][n % 4]
        yield bytes(data)


def with_checksums(data: bytes) -> bytes:
    """Return a damaged PNG file with right checksums, so that its contents are looked at."""
    found, at = data[:8], 8
    while at + 8 <= len(data):
        n = int.from_bytes(data[at : at + 4], "big")
        if n > len(data) - at - 8:
            break
        found += chunk(data[at + 4 : at + 8], data[at + 8 : at + 8 + n])
        at += 12 + n
    return found + data[at:]


def check(format: str, n: int) -> None:
    n_errors = 0
    for i, data in enumerate(islice(damaged(format), n)):
        if format == "png" and i % 2:
            data = with_checksums(data)
        start = time.monotonic()
        try:
            pixels = decode_picture(data, LIMITS).data
        except MediaError as error:
            n_errors += 1
            assert 0 < len(str(error)) < 400 and "\n" not in str(error)
        else:
            assert pixels.dtype == np.uint8 and pixels.ndim == 3 and pixels.shape[2] == 3
            assert 0 < pixels.size <= 3 * LIMITS.max_pixels
        assert time.monotonic() - start < 60
    assert 0 < n_errors < n  # some are still pictures


@pytest.mark.parametrize("format", ["png", "jpeg", "webp", "gif", "bmp"])
def test_damaged_files(format: str) -> None:
    check(format, 40)


@pytest.mark.full
@pytest.mark.parametrize("format", ["png", "jpeg", "webp", "gif", "bmp"])
def test_many_damaged_files(format: str) -> None:
    check(format, 2000)


def test_noise_behind_each_signature() -> None:
    rng = np.random.default_rng(0)
    for start in (b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff", b"RIFF\x20\0\0\0WEBP", b"GIF89a", b"BM"):
        for _ in range(20):
            with pytest.raises(MediaError):
                decode_picture(start + rng.bytes(int(rng.integers(200))), LIMITS)
