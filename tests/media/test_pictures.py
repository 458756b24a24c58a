"""Decoding of picture files: pixels of each format and mode, limits, rotation, and damaged files."""

from __future__ import annotations

import struct
import subprocess
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO

import numpy as np
import pytest
from numpy.typing import NDArray
from picture_files import chunk, exact, gif, lossy, noise, palette, png, saved, small, smooth
from PIL import Image
from PIL.ImageOps import exif_transpose

from llamado.media import pictures
from llamado.media.errors import MediaError
from llamado.media.media import MediaKind
from llamado.media.pictures import ORIENTATION, PictureLimits, decode_picture

EXACT, LOSSY = exact(), lossy()


def decoded(data: bytes) -> NDArray[np.uint8]:
    pixels: NDArray[np.uint8] = decode_picture(data).data
    return pixels


@pytest.mark.parametrize("name", EXACT)
def test_pixels(name: str) -> None:
    data, pixels = EXACT[name]
    found = decode_picture(data)
    assert found.kind is MediaKind.IMAGE and found.data.dtype == np.uint8 and found.data.flags.c_contiguous
    np.testing.assert_array_equal(found.data, pixels)


@pytest.mark.parametrize("name", LOSSY)
def test_nearly_the_pixels(name: str) -> None:
    data, pixels = LOSSY[name]
    most = 0 if {"lossless", "alpha", "animated"} & {*name.split("-")} else 10
    assert np.abs(decoded(data).astype(int) - pixels).max() <= most


def test_equal_pixels_have_equal_digests() -> None:
    assert decode_picture(saved(noise(), "PNG")).digest == decode_picture(saved(noise(), "BMP")).digest
    assert decode_picture(saved(noise(), "PNG")).digest != decode_picture(saved(noise(seed=1), "PNG")).digest


@pytest.mark.parametrize("orientation", [*range(1, 9), 0, 9])
def test_exif_rotation(orientation: int) -> None:
    exif = Image.Exif()
    exif[ORIENTATION] = orientation
    data = saved(noise(), "PNG", exif=exif)
    with Image.open(BytesIO(data)) as image:
        expected = np.asarray(exif_transpose(image))
    found = decoded(data)
    np.testing.assert_array_equal(found, expected)
    assert found.flags.c_contiguous


def test_photographs_are_upright() -> None:
    exif = Image.Exif()
    exif[ORIENTATION] = 6
    for format in ("JPEG", "WEBP"):
        upright = decoded(saved(smooth(), format, quality=95, exif=exif)).astype(int)
        assert np.abs(upright - np.rot90(smooth(), -1)).max() < 40 and upright.shape == (19, 13, 3)


def test_damaged_exif_data_is_ignored() -> None:
    for exif in (b"Exif\0\0garbage", b"Exif\0\0MM\0*\xff\xff\xff\xff garbage"):
        np.testing.assert_array_equal(decoded(saved(noise(), "PNG", exif=exif)), noise())


def test_the_first_frame_of_a_small_gif_animation_is_on_black() -> None:
    data = gif((3, 3), (1, 1, 2, 2), bytes([0, 1, 2, 3]), background=2)
    np.testing.assert_array_equal(decoded(data), small([0, 0, 0, 0, 10, 40, 0, 70, 0]))


LIMITS = PictureLimits(max_bytes=10_000, max_pixels=1_000)


def test_too_many_bytes() -> None:
    with pytest.raises(MediaError, match=r"has 10,001 bytes, more than the limit of 10,000: send a smaller"):
        decode_picture(bytes(10_001), LIMITS)


@pytest.mark.parametrize("format", ["PNG", "JPEG", "WEBP", "GIF", "BMP"])
def test_too_many_pixels(format: str) -> None:
    data = saved(np.zeros((40, 26, 3), np.uint8), format)
    with pytest.raises(MediaError, match="has 26 × 40 pixels, more than the limit of 1,000: scale it down"):
        decode_picture(data, LIMITS)
    assert decode_picture(data, PictureLimits(max_pixels=1040)).data.shape == (40, 26, 3)


def test_a_decompression_bomb_is_rejected_by_its_header() -> None:
    bomb = png(60_000, 60_000, 8, 2, b"")
    with pytest.raises(MediaError, match="has 60000 × 60000 pixels"):
        decode_picture(bomb)


def test_a_gif_frame_beyond_the_screen_counts() -> None:
    with pytest.raises(MediaError, match="the GIF picture has more pixels than the limit of 64,000,000: scale it down"):
        decode_picture(gif((1, 1), (0, 0, 65_000, 65_000), bytes([1])))


def test_a_webp_canvas_is_limited_before_it_is_allocated() -> None:
    data = bytearray(LOSSY["webp-animated"][0])
    at = data.index(b"VP8X") + 12
    data[at : at + 6] = 2 * (60_000 - 1).to_bytes(3, "little")
    with pytest.raises(MediaError, match=r"than the limit of 64,000,000: scale it down|damaged"):
        decode_picture(bytes(data))


def test_millions_of_parts_are_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pictures, "_MAX_READS", 1000)
    for data, before, part in (
        (EXACT["png-rgb"][0], b"IDAT", chunk(b"abCd", b"")),
        (EXACT["gif-transparent"][0], b"\x21\xf9\x04", b"\x21\xfe\x01a\0"),
        (LOSSY["jpeg"][0], b"\xff\xdb", b"\xff\xfe\0\x02"),
    ):
        at = data.index(before) - (4 if before == b"IDAT" else 0)
        decode_picture(data[:at] + 10 * part + data[at:])
        with pytest.raises(MediaError, match="the picture file consists of too many parts: save it again"):
            decode_picture(data[:at] + 1000 * part + data[at:])


def test_a_jpeg_file_of_many_scans_is_rejected() -> None:
    data = saved(np.zeros((64, 64, 3), np.uint8), "JPEG", progressive=True)
    scan = data.rindex(b"\xff\xda")
    many = data[:scan] + (2**31 // 64**2 + 1) * b"\xff\xda" + data[scan:]
    with pytest.raises(MediaError, match=r"of 64 × 64 pixels has \d+ scans: save it as baseline JPEG"):
        decode_picture(many)


@pytest.mark.parametrize("size", [(0, 5), (5, 0)])
def test_no_pixels(size: tuple[int, int]) -> None:
    with pytest.raises(MediaError, match="PNG picture is damaged"):
        decode_picture(png(*size, 8, 2, b""))


def test_no_bytes() -> None:
    with pytest.raises(MediaError, match="the picture is empty: it has 0 bytes"):
        decode_picture(b"")


@pytest.mark.parametrize("format", ["TIFF", "PPM", "TGA", "ICO", "PCX", "JPEG2000"])
def test_other_formats_are_unknown(format: str) -> None:
    with pytest.raises(MediaError, match="unknown format: send PNG, JPEG, WebP, GIF or BMP"):
        decode_picture(saved(noise(), format))


def test_text_is_no_picture() -> None:
    with pytest.raises(MediaError, match="unknown format"):
        decode_picture(b"%!PS-Adobe-3.0 EPSF-3.0\n/etc/passwd")


def test_compressed_bmp_files_are_rejected() -> None:
    data = bytearray(saved(palette(), "BMP"))
    struct.pack_into("<I", data, 30, 1)  # run lengths
    with pytest.raises(MediaError, match="BMP picture is compressed, which is not supported: save it as PNG"):
        decode_picture(bytes(data))


@pytest.mark.parametrize("name", ["png-rgb", "jpeg", "jpeg-progressive", "webp-lossless", "gif", "bmp-rgb"])
def test_incomplete_files(name: str) -> None:
    data = (EXACT | LOSSY)[name][0]
    for n in (len(data) // 3, len(data) * 2 // 3):
        with pytest.raises(MediaError, match=r"picture is damaged or incomplete|unknown format"):
            decode_picture(data[:n])


def test_a_wrong_checksum_is_an_error() -> None:
    data = bytearray(EXACT["png-rgb"][0])
    data[30] ^= 1  # of the header
    with pytest.raises(MediaError, match="PNG picture is damaged or incomplete"):
        decode_picture(bytes(data))


def test_no_warnings() -> None:
    exif = b"Exif\0\0II*\0\x08\0\0\0\x02\0\x12\x01\x03\0\xff\0\0\0\xff\xff\xff\xff"
    animation = chunk(b"acTL", struct.pack(">II", 0, 0))
    files = [
        png(60_000, 2_000, 8, 2, b""),  # a bomb by Pillow's limit
        saved(palette(), "PNG", transparency=bytes(64)),
        saved(noise(), "PNG", exif=exif),
        png(1, 1, 8, 2, b"\0abc", animation),
        gif((1, 1), (0, 0, 12_000, 9_000), bytes([1])),
    ]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for data in files:
            try:
                decode_picture(data)
            except MediaError:
                pass
    assert not caught


@pytest.mark.slow
def test_pillow_is_imported_by_the_first_picture() -> None:
    code = "import sys, llamado.media.pictures, llamado.media.preprocessing; print('PIL' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_several_threads() -> None:
    files = [*EXACT.values()] * 3
    with ThreadPoolExecutor(8) as pool:
        for found, (_, pixels) in zip(pool.map(decoded, (data for data, _ in files)), files, strict=True):
            np.testing.assert_array_equal(found, pixels)
