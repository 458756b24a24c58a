"""Small projectors on this device and in the real mtmd: the tokens of a prompt, their positions, and the embeddings."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from mtmd import Mtmd
from projectors import every, spec, text
from projectors.spec import TinyProjector

from llamado.devices.cpu.device import CpuDevice
from llamado.gguf.reader import GGUFFile
from llamado.media.chunks import MediaChunk, tokenize
from llamado.media.media import Media, MediaKind
from llamado.models.encoders.registry import load_encoders
from llamado.text.tokenizer.tokenizer import load_tokenizer

pytestmark = pytest.mark.interop

PROJECTORS = every().values()
SIZES = [(144, 272), (64, 64), (41, 100)]
"""Heights and widths of pictures: of odd numbers of tokens, of the table of positions, and one that is resized."""
TILED = {"step3vl": [(64, 64), (520, 1100)], "deepseekocr": [(700, 1500)], "deepseekocr2": [(500, 800)]}
"""Pictures that become several tiles, instead of the others."""


def picture(height: int, width: int) -> Media:
    """Return a picture with large areas and some noise."""
    rng = np.random.default_rng(height * 1000 + width)
    y, x = np.mgrid[:height, :width]
    waves = np.stack([np.sin(x / 9 + i) + np.cos(y / (5 + i)) for i in range(3)], 2) * 50 + 128
    return Media(MediaKind.IMAGE, np.clip(waves + rng.normal(0, 30, waves.shape), 0, 255).astype(np.uint8))


@pytest.mark.parametrize(
    ("name", "size", "limits"),
    [
        ("lfm2", (1100, 1500), {}),
        ("lfm2", (500, 300), {"min_tokens": 80, "max_tokens": 90}),
        ("lfm2", (60, 60), {"min_tokens": 80}),
        ("idefics3", (70, 90), {"max_tokens": 16}),
        ("idefics3", (40, 30), {"min_tokens": 30, "max_tokens": 60}),
        ("internvl", (90, 400), {}),
        ("llama4", (400, 70), {}),
        ("minicpmv4_6", (20, 300), {}),
        ("granite4_vision", (20, 300), {}),
    ],
)
def test_pictures_are_cut_as_by_mtmd(
    peer_bin: Path, tmp_path: Path, name: str, size: tuple[int, int], limits: dict[str, int]
) -> None:
    tiny = every()[name]
    path, model = spec.make(tiny, tmp_path / "mmproj.gguf"), text.make(tiny, tmp_path / "text.gguf")
    media = picture(*size)
    with Mtmd(peer_bin, path, model, **limits) as mtmd:
        theirs = mtmd.chunks("<__media__>", [media.data], encode=False, add_special=False)
    encoder = load_encoders(GGUFFile.open(path), **limits)
    tokenizer = load_tokenizer(GGUFFile.open(model).metadata)
    ours = tokenize("<__media__>", [media], tokenizer.encode, tokenizer.find, encoder.prepare, bos=None, eos=None)
    spans = {span.start: span.chunk.n_tokens for span in ours.spans}
    at = 0
    for chunk in theirs:
        if chunk.kind == "text":
            assert ours.tokens[at : at + chunk.n_tokens] == chunk.tokens
        else:
            assert spans.pop(at) == chunk.n_tokens
        at += chunk.n_tokens
    assert at == len(ours.tokens) and not spans


@pytest.mark.parametrize("name", ["resampler", "resampler-old", "minicpmv4_6", "idefics3", "lfm2", "step3vl"])
def test_tokens_of_a_vocabulary_with_space_prefixes(peer_bin: Path, tmp_path: Path, name: str) -> None:
    tiny, media = every()[name], picture(520, 1100)
    path = spec.make(tiny, tmp_path / "mmproj.gguf")
    model = text.make(tiny, tmp_path / "text.gguf", spaces=True)
    with Mtmd(peer_bin, path, model) as mtmd:
        theirs = mtmd.chunks("a <__media__> b", [media.data], encode=False)
    encoder, tokenizer = load_encoders(GGUFFile.open(path)), load_tokenizer(GGUFFile.open(model).metadata)
    ours = tokenize(
        "a <__media__> b", [media], tokenizer.encode, tokenizer.find, encoder.prepare, bos=tokenizer.bos, eos=None
    )
    expected = [token for chunk in theirs for token in (chunk.tokens or [-1] * chunk.n_tokens)]
    assert [max(token, -1) for token in ours.tokens] == expected


@pytest.mark.parametrize("wtype", ["F32", *(pytest.param(name, marks=pytest.mark.full) for name in ("F16", "Q8_0"))])
@pytest.mark.parametrize("tiny", PROJECTORS, ids=lambda tiny: tiny.name)
def test_prompts_and_embeddings_are_those_of_mtmd(
    peer_bin: Path, tmp_path: Path, tiny: TinyProjector, wtype: str
) -> None:
    path, model = spec.make(tiny, tmp_path / "mmproj.gguf", wtype=wtype), text.make(tiny, tmp_path / "text.gguf")
    pictures = [picture(*size) for size in TILED.get(tiny.projector, SIZES)]
    prompt = "see <__media__> and" * len(pictures)
    with Mtmd(peer_bin, path, model) as mtmd:
        theirs = mtmd.chunks(prompt, [media.data for media in pictures])
    file, encoder = spec.encoder_of(path, tokens=tiny.tokens)
    tokenizer = load_tokenizer(GGUFFile.open(model).metadata)
    ours = tokenize(prompt, pictures, tokenizer.encode, tokenizer.find, encoder.prepare, bos=tokenizer.bos, eos=None)
    device, at, spans = CpuDevice(2), 0, iter(ours.spans)
    for chunk in theirs:
        if chunk.kind == "text":
            assert ours.tokens[at : at + chunk.n_tokens] == chunk.tokens
        else:
            span = next(spans)
            given = span.chunk
            assert (span.start, given.n_tokens, given.causal) == (at, chunk.n_tokens, chunk.causal)
            layout = given.layout
            if chunk.positions is not None and layout is not None and tiny.text in text.SECTIONS:
                assert layout.n_positions == chunk.n_positions
                np.testing.assert_array_equal(layout.positions(0)[[0, 2, 1, 3]].T, chunk.positions)
            assert chunk.embeddings is not None
            rows = spec.encode(device, file, encoder, given.input)
            assert rows.shape == chunk.embeddings.shape
            assert np.isfinite(rows).all()
            is_finite = np.isfinite(chunk.embeddings).all(1)
            assert is_finite.sum() >= len(rows) - 1  # in one run of ten, one row of pixtral is not a number there
            rows, expected = rows[is_finite], chunk.embeddings[is_finite]
            sizes, expected_sizes = np.linalg.norm(rows, axis=1), np.linalg.norm(expected, axis=1)
            cosines = (rows * expected).sum(1) / (sizes * expected_sizes)
            # Activations are rounded to 8 bits for quantized weights, in blocks of other sizes there. Both results are
            # further from that of floats than from each other.
            assert cosines.min() > (0.997 if wtype == "Q8_0" else 0.9999)
            np.testing.assert_allclose(sizes / expected_sizes, 1, atol=5e-2 if wtype == "Q8_0" else 2e-3)
        at += chunk.n_tokens
    assert at == len(ours.tokens) and next(spans, None) is None


@pytest.mark.parametrize("name", ["adapter", "granite4_vision", "idefics3", "llama4", "resampler"])
def test_files_with_quantized_weights(peer_bin: Path, tmp_path: Path, name: str) -> None:
    tiny, media = every()[name], picture(64, 64)
    path, model = spec.make(tiny, tmp_path / "mmproj.gguf", wtype="Q8_0"), text.make(tiny, tmp_path / "text.gguf")
    with Mtmd(peer_bin, path, model) as mtmd:
        theirs = [chunk.embeddings for chunk in mtmd.chunks("<__media__>", [media.data]) if chunk.nx]
    file, encoder = spec.encoder_of(path)
    device = CpuDevice(2)
    ours = [piece for piece in encoder.prepare(media) if isinstance(piece, MediaChunk)]
    for chunk, expected in zip(ours, theirs, strict=True):
        assert expected is not None
        rows = spec.encode(device, file, encoder, chunk.input)
        cosines = (rows * expected).sum(1) / np.linalg.norm(rows, axis=1) / np.linalg.norm(expected, axis=1)
        # llama.cpp and this device round activations differently.
        assert cosines.min() > 0.998
