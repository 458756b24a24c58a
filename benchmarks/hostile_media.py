"""Damaged pictures and sounds in the requests of every API, and a small model with encoders for both."""

from __future__ import annotations

import base64
import io
import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
from gguf import GGUFReader, GGUFWriter
from PIL import Image

sys.path.append(str(Path(__file__).parent.parent / "tests"))
from projectors import spec, text
from projectors.llava import MLP
from projectors.sounds import ULTRAVOX

MARKER = "<__media__>"
"""Value of LLAMA_MEDIA_MARKER for the server."""
N_FILES = 2000
_EVERY_BOMB = 100
"""One of so many files is a bomb."""
_BOUNDARY = "7f3c9a"

Upload = tuple[str, bytes, str]
"""Path, body and content type."""


def write_models(folder: Path) -> tuple[Path, Path]:
    """Write a text model and a projector file with encoders of pictures and sounds; return their paths."""
    projector = GGUFWriter(folder / "mmproj.gguf", "clip")
    for tiny in (MLP, ULTRAVOX):
        _copy(GGUFReader(spec.write(tiny, folder / "one.gguf")), tiny, projector)
    projector.write_header_to_file()
    projector.write_kv_data_to_file()
    projector.write_tensors_to_file()
    projector.close()
    return text.write(MLP, folder / "model.gguf"), folder / "mmproj.gguf"


def _copy(source: GGUFReader, tiny: spec.TinyProjector, target: GGUFWriter) -> None:
    """Copy the keys and tensors of a projector file with one encoder."""
    for field in source.fields.values():
        if field.name == "clip.projector_type":
            target.add_string(f"clip.{tiny.kind.value.replace('image', 'vision')}.projector_type", tiny.projector)
        elif field.name.startswith("clip."):
            target.add_key_value(field.name, field.contents(), field.types[0], field.types[-1])
    for tensor in source.tensors:
        target.add_tensor(tensor.name, np.array(tensor.data), raw_dtype=tensor.tensor_type)


def files() -> dict[str, list[bytes]]:
    """Return small valid files of each format."""
    pixels = np.random.default_rng(0).integers(0, 256, (13, 19, 3), np.uint8)
    picture = Image.fromarray(pixels)
    samples = 0.2 * np.sin(np.arange(4000)[:, None] * [0.1, 0.2])
    return {
        "png": [_picture(picture, "PNG"), _picture(picture.quantize(9), "PNG"), _picture(picture.convert("1"), "PNG")],
        "jpeg": [_picture(picture, "JPEG"), _picture(picture, "JPEG", progressive=True)],
        "webp": [_picture(picture, "WEBP"), _picture(picture, "WEBP", lossless=True)],
        "gif": [_picture(picture.quantize(64), "GIF")],
        "bmp": [_picture(picture, "BMP"), _picture(picture.convert("L"), "BMP")],
        "wav": [_sound(samples, "WAV", subtype) for subtype in ("PCM_16", "PCM_U8", "FLOAT", "IMA_ADPCM")],
        "flac": [_sound(samples, "FLAC", "PCM_16")],
        "mp3": [_sound(samples, "MP3", "MPEG_LAYER_III")],
    }


def bombs() -> list[bytes]:
    """Return small files of many pixels, of which some are within the limits, and of many seconds."""
    flat = Image.new("L", (7900, 7900))
    return [
        *(_picture(flat, name) for name in ("PNG", "JPEG", "WEBP", "GIF")),
        _picture(Image.new("1", (60_000, 60_000)), "PNG"),
        _sound(np.zeros((16_000 * 300, 1)), "FLAC", "PCM_16"),
    ]


def _picture(image: Image.Image, format: str, **options: Any) -> bytes:
    out = io.BytesIO()
    image.save(out, format, **options)
    return out.getvalue()


def _sound(samples: np.ndarray[Any, Any], format: str, subtype: str) -> bytes:
    out = io.BytesIO()
    soundfile.write(out, samples, 16_000, format=format, subtype=subtype)
    return out.getvalue()


def damaged(data: bytes, rng: random.Random) -> bytes:
    """Return a file with bytes changed, removed, inserted and repeated, most of them near the beginning."""
    changed = bytearray(data)
    for _ in range(rng.randrange(6)):
        at, n = int(len(changed) * rng.random() ** 2), rng.randrange(1, 9)
        match rng.randrange(6):
            case 0:
                changed[at : at + 1] = rng.randbytes(1)
            case 1:
                changed[at : at + n] = rng.randbytes(n)
            case 2:
                del changed[at : at + n]
            case 3:
                changed[at:at] = rng.randbytes(n)
            case 4:
                changed[at:at] = changed[at : at + 4 * n]
            case 5:
                changed[at : at + 4] = rng.choice([b"\xff" * 4, b"\0" * 4, b"\x7f\xff\xff\xff", b"\0\0\0\x01"])
    return bytes(changed)


def requests(rng: random.Random, n: int = N_FILES) -> Iterator[Upload]:
    """Yield requests with damaged files, and now and then a bomb."""
    made, large = files(), bombs()
    kinds = sorted(made)
    for i in range(n):
        kind = kinds[i % len(kinds)]
        if i % _EVERY_BOMB == _EVERY_BOMB - 1:
            number = i // _EVERY_BOMB
            bomb = large[number % len(large)]
            yield request(bomb, "flac" if bomb.startswith(b"fLaC") else "png", number, rng)
        else:
            yield request(damaged(rng.choice(made[kind]), rng), kind, i // len(kinds), rng)


def request(data: bytes, kind: str, number: int, rng: random.Random) -> Upload:
    """Return a request with a file, in the form of the API with this number."""
    encoded = base64.b64encode(data).decode()
    if rng.random() < 0.1:
        at = rng.randrange(len(encoded) + 1)
        encoded = encoded[:at] + rng.choice(["=", "é", "-", "\n", "\0", "====", " "]) + encoded[at + 1 :]
    is_sound = kind in ("wav", "flac", "mp3")
    uri = f"data:{'audio' if is_sound else 'image'}/{kind};base64,{encoded}"
    match number % 5:
        case 0:
            part = {"type": "image_url", "image_url": {"url": uri}}
            if is_sound:
                part = {"type": "input_audio", "input_audio": {"data": encoded, "format": kind}}
            return _json("/v1/chat/completions", {"max_tokens": 2, "messages": [_user([part, part])]})
        case 1:
            prompt = {"prompt_string": f"a {MARKER} b", "multimodal_data": [encoded] * rng.choice([1, 1, 1, 0, 2])}
            return _json("/completion", {"n_predict": 2, "prompt": prompt})
        case 2:
            source = {"type": "base64", "media_type": f"image/{kind}", "data": encoded}
            return _json("/v1/messages", {"max_tokens": 2, "messages": [_user([{"type": "image", "source": source}])]})
        case 3:
            message = {"role": "user", "content": "what?", "images": [encoded]}
            return _json("/api/chat", {"model": "x", "stream": False, "messages": [message]} | _TWO)
        case _:
            head = f'Content-Disposition: form-data; name="file"; filename="a.{kind}"\r\n\r\n'.encode()
            line = f"--{_BOUNDARY}".encode()
            body = b"%s\r\n%s%s\r\n%s--\r\n" % (line, head, data, line)
            return "/v1/audio/transcriptions", body, f"multipart/form-data; boundary={_BOUNDARY}"


_TWO = {"options": {"num_predict": 2}}


def _user(content: list[dict[str, Any]]) -> dict[str, Any]:
    return {"role": "user", "content": content}


def _json(path: str, body: dict[str, Any]) -> Upload:
    return path, json.dumps(body).encode(), "application/json"
