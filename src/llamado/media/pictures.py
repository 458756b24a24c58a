"""Decoding of picture files: PNG, JPEG, WebP, GIF and BMP to RGB, within limits.

Pixels are those of stb_image, which llama.cpp uses: alpha is dropped without blending, values of 16 bits lose their
lower 8, color profiles are ignored, and of an animation only the first frame is decoded. Differences:
- A rotation in the Exif data is applied, so that photographs of phones are upright; stb_image ignores it.
- The colors of JPEG files differ by 1 or 2 of 255, since libjpeg-turbo rounds differently.
- A file that ends early is an error; stb_image may fill the rest with gray.
- stb_image has no WebP, but TGA, PSD, PNM and HDR, which are errors here, as are compressed BMP files.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from io import BytesIO
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from llamado.media.errors import MediaError
from llamado.media.media import Media, MediaKind

if TYPE_CHECKING:
    from PIL.Image import Image
    from PIL.ImageFile import ImageFile

ORIENTATION = 0x0112
"""Exif tag of the rotation."""

_WARNINGS = r"PIL\."
_MAX_SCANNED = 2**31
_MAX_READS = 2**18


@dataclass(frozen=True, slots=True)
class PictureLimits:
    """Limits that are checked before pixels are decoded. Decoding takes up to 8 bytes a pixel."""

    max_bytes: int = 32 << 20
    max_pixels: int = 64_000_000


LIMITS = PictureLimits()


def decode_picture(data: bytes, limits: PictureLimits = PictureLimits()) -> Media:  # frozen
    """Decode a picture file. Raises MediaError if its format is unknown, it is damaged, or beyond a limit."""
    if not data:
        raise MediaError("the picture is empty: it has 0 bytes")
    if len(data) > limits.max_bytes:
        raise MediaError(
            f"the picture file has {len(data):,} bytes, more than the limit of {limits.max_bytes:,}: "
            "send a smaller or more compressed one"
        )
    name, opened = _format(data)
    try:
        with opened(_File(data)) as image:
            _check(image, name, data, limits)
            pixels = _upright(_rgb(image), _orientation(image))
    except MediaError:
        raise
    except _bomb():
        raise MediaError(
            f"the {name} picture has more pixels than the limit of {limits.max_pixels:,}: scale it down"
        ) from None
    except MemoryError:
        raise MediaError("there is not enough memory to decode the picture: send a smaller one") from None
    # For damaged files Pillow raises OSError, SyntaxError, ValueError, struct.error, KeyError and others.
    except Exception as error:
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise MediaError(f"the {name} picture is damaged or incomplete ({reason}): send the whole file") from None
    return Media(MediaKind.IMAGE, pixels)


class _File(BytesIO):
    """File with a limited number of reads.

    Pillow reads chunks and comments one by one in Python: millions of empty ones would take many seconds.
    """

    def __init__(self, data: bytes) -> None:
        super().__init__(data)
        self._left = _MAX_READS

    def read(self, size: int | None = -1, /) -> bytes:
        self._left -= 1
        if self._left < 0:
            raise MediaError("the picture file consists of too many parts: save it again")
        return super().read(size)


def _bomb() -> type[Exception]:
    """Return Pillow's error for too many pixels."""
    from PIL.Image import DecompressionBombError

    return DecompressionBombError


def _format(data: bytes) -> tuple[str, Callable[[BytesIO], ImageFile]]:
    """Return the format of a file, and Pillow's class for it. Raises MediaError.

    Pillow itself would also try formats whose decoders are little tested, and that open other files.
    """
    _ignore_warnings()
    if data.startswith(b"\x89PNG\r\n\x1a\n"):
        from PIL.PngImagePlugin import PngImageFile

        return "PNG", PngImageFile
    if data.startswith(b"\xff\xd8\xff"):
        from PIL.JpegImagePlugin import JpegImageFile

        return "JPEG", JpegImageFile
    if data.startswith(b"RIFF") and data[8:12] == b"WEBP":
        from PIL.WebPImagePlugin import WebPImageFile

        return "WebP", WebPImageFile
    if data.startswith((b"GIF87a", b"GIF89a")):
        from PIL.GifImagePlugin import GifImageFile

        return "GIF", GifImageFile
    if data.startswith(b"BM"):
        from PIL.BmpImagePlugin import BmpImageFile

        return "BMP", BmpImageFile
    raise MediaError("the picture is in an unknown format: send PNG, JPEG, WebP, GIF or BMP")


def _ignore_warnings() -> None:
    """Ignore warnings of Pillow's modules in this process.

    They concern contents of files, and warnings.catch_warnings cannot be used in several threads.
    """
    filters = warnings.filters
    if not any(action == "ignore" and getattr(place, "pattern", "") == _WARNINGS for action, _, _, place, _ in filters):
        warnings.filterwarnings("ignore", module=_WARNINGS)


def _check(image: ImageFile, name: str, data: bytes, limits: PictureLimits) -> None:
    """Check what an opened file says of its contents. Raises MediaError."""
    width, height = image.size
    if width * height > limits.max_pixels:
        raise MediaError(
            f"the picture has {width} × {height} pixels, more than the limit of {limits.max_pixels:,}: scale it down"
        )
    # Each scan of a progressive JPEG file visits all pixels, and needs few bytes.
    if name == "JPEG" and (n := data.count(b"\xff\xda")) * width * height > _MAX_SCANNED:
        raise MediaError(f"the JPEG picture of {width} × {height} pixels has {n} scans: save it as baseline JPEG")
    # Pillow decodes run lengths in Python, a byte at a time.
    if name == "BMP" and any(tile[0] != "raw" for tile in image.tile):
        raise MediaError("the BMP picture is compressed, which is not supported: save it as PNG")


def _rgb(image: ImageFile) -> NDArray[np.uint8]:
    """Decode the pixels: uint8 [h, w, 3]."""
    image.load()
    if image.mode.startswith("I"):  # gray of 16 bits
        gray = (np.asarray(image).astype(np.int32) >> 8).astype(np.uint8)
        return np.repeat(gray[:, :, None], 3, axis=2)
    transparent = image.info.pop("transparency", None)  # Pillow would adapt it to RGB
    pixels = np.asarray(image.convert("RGB"))
    if image.format == "GIF" and isinstance(transparent, int):
        pixels = _without_transparent(image, pixels, transparent)
    return pixels


def _without_transparent(image: Image, pixels: NDArray[np.uint8], index: int) -> NDArray[np.uint8]:
    """Return the pixels of a GIF file with those of the transparent palette index black."""
    if image.mode not in ("P", "L"):
        return pixels
    return np.where((np.asarray(image) == index)[:, :, None], np.uint8(0), pixels)


def _orientation(image: Image) -> int:
    """Return the rotation in the Exif data: 1 (none) to 8."""
    try:
        found = image.getexif().get(ORIENTATION)
    except Exception:  # damaged Exif data; see decode_picture
        return 1
    return found if isinstance(found, int) and 1 <= found <= 8 else 1


def _upright(pixels: NDArray[np.uint8], orientation: int) -> NDArray[np.uint8]:
    """Undo a rotation and reflection of the Exif data; contiguous."""
    if orientation >= 5:
        pixels = pixels.transpose(1, 0, 2)
    if orientation in (3, 4, 7, 8):
        pixels = pixels[::-1]
    if orientation in (2, 3, 6, 7):
        pixels = pixels[:, ::-1]
    return np.ascontiguousarray(pixels)
