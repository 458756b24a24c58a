"""Golden rows: some numbers of the embeddings that the real mtmd computes with the small projectors.

`golden/NAME.json` has the chunks of one picture: the tokens of texts, and of images the number of tokens and some
numbers of some rows.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamado.devices.cpu.device import CpuDevice
from llamado.gguf.reader import GGUFFile
from llamado.media.chunks import MediaChunk, tokenize
from llamado.media.media import Media, MediaKind
from llamado.text.tokenizer.tokenizer import load_tokenizer
from projectors import spec, text
from projectors.spec import TinyProjector

FOLDER = Path(__file__).parent / "golden"
SIZE = 40, 100
SIZES = {"deepseekocr": (300, 660), "deepseekocr2": (300, 800)}
"""Heights and widths of the picture; the others are cut into tiles."""
N_NUMBERS = 6

Chunk = dict[str, Any]


def path_of(name: str) -> Path:
    """Return the file of a small projector."""
    return FOLDER / f"{name}.json"


def picture(name: str) -> Media:
    """Return the picture for a projector: colors that change slowly to the right and below, and noise."""
    height, width = SIZES.get(name, SIZE)
    y, x = np.mgrid[:height, :width]
    colors = np.stack([x * 2, y * 5, x + y], axis=2) + np.random.default_rng(0).integers(0, 40, (height, width, 3))
    return Media(MediaKind.IMAGE, np.clip(colors, 0, 255).astype(np.uint8))


def image_chunk(rows: NDArray[np.float32]) -> Chunk:
    """Return what is kept of an image: its number of tokens, and numbers of the first, a middle and the last row."""
    n, places = len(rows), np.linspace(0, rows.shape[1] - 1, N_NUMBERS).astype(int)
    return {"n_tokens": n, "rows": {str(i): rows[i, places].round(5).tolist() for i in (0, n // 3, n - 1)}}


def ours(tiny: TinyProjector, folder: Path, wtype: str = "F32") -> list[Chunk]:
    """Return the chunks that this device computes with weights of a type."""
    file, encoder = spec.encoder_of(spec.make(tiny, folder / "mmproj.gguf", wtype=wtype), tokens=tiny.tokens)
    tokenizer = load_tokenizer(GGUFFile.open(text.make(tiny, folder / "text.gguf")).metadata)
    prompt = tokenize(
        "<__media__>", [picture(tiny.name)], tokenizer.encode, tokenizer.find, encoder.prepare, bos=None, eos=None
    )
    device, at, found = CpuDevice(1), 0, []

    def of(chunk: MediaChunk) -> Chunk:
        return image_chunk(spec.encode(device, file, encoder, chunk.input))

    for span in prompt.spans:
        if span.start > at:
            found.append({"tokens": prompt.tokens[at : span.start]})
        found.append(of(span.chunk))
        at = span.stop
    if at < len(prompt.tokens):
        found.append({"tokens": prompt.tokens[at:]})
    return found


def read(name: str) -> list[Chunk]:
    """Return the golden chunks of a small projector."""
    found: list[Chunk] = json.loads(path_of(name).read_text())
    return found


def write(name: str, chunks: list[Chunk]) -> None:
    """Write the golden chunks of a small projector, one a line."""
    FOLDER.mkdir(exist_ok=True)
    path_of(name).write_text("[\n" + ",\n".join(map(json.dumps, chunks)) + "\n]\n")
