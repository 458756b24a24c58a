"""SAM's attention and windows, and the layouts of DeepSeek-OCR's tiles."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from projectors import spec
from projectors.deepseek_ocr import DEEPSEEKOCR, DEEPSEEKOCR2
from projectors.graphs import run

from llamado.media.chunks import MediaChunk
from llamado.media.errors import MediaError
from llamado.media.media import Media, MediaKind
from llamado.models.encoders.encoder import EncoderPass
from llamado.models.encoders.parts.interpolation import Interpolation
from llamado.models.encoders.tiled.deepseek_ocr import DeepSeekOcr1Encoder, DeepSeekOcr2Encoder
from llamado.models.encoders.tiled.sam import Area, SamAttention, SamShape, _windows
from llamado.models.forward import Linear

DIM, HEADS = 8, 2
N = DIM * HEADS


def attention(x: NDArray[Any], qkv: NDArray[Any], biases: list[NDArray[Any]], side: int) -> NDArray[Any]:
    """Return the attention of a square, with the biases of all pairs in one matrix."""
    q, k, v = (part.reshape(-1, HEADS, DIM).transpose(1, 0, 2) for part in np.split(x @ qkv.T, 3, axis=1))
    at = np.arange(side)
    distances = at[:, None] - at[None] + side - 1
    columns, rows = (table[distances] for table in biases)  # [query, key, dim]
    grid = q.reshape(HEADS, side, side, DIM)
    by_column = np.einsum("hyxd,xkd->hyxk", grid, columns)[:, :, :, None, :]
    by_row = np.einsum("hyxd,ykd->hyxk", grid, rows)[:, :, :, :, None]
    scores = q @ k.transpose(0, 2, 1) * DIM**-0.5 + (by_column + by_row).reshape(HEADS, side * side, -1)
    weights = np.exp(scores - scores.max(2, keepdims=True))
    return (weights / weights.sum(2, keepdims=True) @ v).transpose(1, 0, 2).reshape(-1, N)


@pytest.mark.parametrize(("side", "n_table"), [(3, 5), (4, 7), (4, 21)])
def test_biases_in_queries_and_keys_are_those_of_a_matrix(side: int, n_table: int) -> None:
    rng = np.random.default_rng(side)
    x = rng.standard_normal((2, side * side, N)).astype(np.float32)
    qkv, tables = rng.standard_normal((3 * N, N)).astype(np.float32) * 0.3, rng.standard_normal((2, n_table, DIM))
    step = EncoderPass(1e-6)
    names = "columns", "rows"
    w, out = step.input("qkv", N, 3 * N), step.input("out", N, N)
    parts = [step.input(f"table_{name}", DIM, n_table) for name in names]
    layer, area = SamAttention(Linear(w), Linear(out), *parts, HEADS), Area("a", side, 2)
    arrays: dict[str, NDArray[Any]] = {"x": x, "qkv": qkv, "out": np.eye(N, dtype=np.float32)}
    arrays |= {f"table_{name}": table.astype(np.float32) for name, table in zip(names, tables, strict=True)}
    arrays |= area.arrays() | layer.arrays(area)
    found = run(step, layer(step, step.input("x", N, 2 * side * side), area, "y"), arrays)
    stretched = [Interpolation.BILINEAR.weights(n_table, 2 * side - 1) @ table for table in tables]
    expected = np.concatenate([attention(one, qkv, stretched, side) for one in x])
    np.testing.assert_allclose(found, expected, atol=3e-3)


def test_windows_hold_each_patch_once_and_padding() -> None:
    shape = SamShape(5, 2)
    found = _windows(shape, 2)
    to, back = found["to_windows"], found["from_windows"]
    np.testing.assert_array_equal(to[back], np.arange(50))
    assert len(to) == 2 * 9 * 4 and np.count_nonzero(to == 50) == len(to) - 50
    np.testing.assert_array_equal(to[:8], [0, 1, 5, 6, 2, 3, 7, 8])
    np.testing.assert_array_equal(to[8:12], [4, 50, 9, 50])  # the picture has an odd number of columns
    np.testing.assert_array_equal(to[36:40], [25, 26, 30, 31])  # the second picture


def ocr_encoder(folder: Path) -> DeepSeekOcr1Encoder:
    _, encoder = spec.encoder_of(spec.make(DEEPSEEKOCR, folder / "mmproj.gguf"))
    assert isinstance(encoder, DeepSeekOcr1Encoder)
    return encoder


def test_rows_of_tiles_alternate_and_end_with_a_learned_row(tmp_path: Path) -> None:
    encoder = ocr_encoder(tmp_path)
    layout = encoder.arrays(SamShape(8, 3), is_overview=False)["layout"]  # three tiles of 2 x 2 results
    np.testing.assert_array_equal(layout, [0, 1, 4, 5, 8, 9, 12, 2, 3, 6, 7, 10, 11, 12])
    overview = encoder.arrays(SamShape(8), is_overview=True)["layout"]
    np.testing.assert_array_equal(overview, [0, 1, 4, 2, 3, 4, 5])
    assert encoder.n_tokens(SamShape(8, 3), is_overview=False) == 14
    assert encoder.n_tokens(SamShape(8), is_overview=True) == 7


@pytest.mark.slow
def test_tiles_come_before_the_whole_picture(tmp_path: Path) -> None:
    picture = Media(MediaKind.IMAGE, np.zeros((1300, 700, 3), np.uint8))
    pieces = ocr_encoder(tmp_path).prepare(picture)
    chunks = [piece for piece in pieces if isinstance(piece, MediaChunk)]
    assert [chunk.input.shape for chunk in chunks] == [(40, 1, 0), (40, 1, 0), (64, 1, 1)] and pieces[-1] == "\n"
    assert len({chunk.digest for chunk in chunks}) == 3


def test_queries_see_the_picture_and_earlier_queries(tmp_path: Path) -> None:
    _, encoder = spec.encoder_of(spec.make(DEEPSEEKOCR2, tmp_path / "mmproj.gguf"))
    assert isinstance(encoder, DeepSeekOcr2Encoder)
    mask = encoder.arrays(SamShape(48), is_overview=False)["mask"]
    n = 144
    assert not mask[:, :n].any()
    assert np.isneginf(mask[:n, n:]).all()
    np.testing.assert_array_equal(mask[n:, n:] == 0, np.tri(n, dtype=bool))
    with pytest.raises(MediaError, match="no queries for pictures of 64 pixels"):
        encoder.arrays(SamShape(4), is_overview=True)


@pytest.mark.parametrize("size", [(0, 0), (60, 60), (64, 128)])
def test_tiles_are_squares_of_whole_patches(tmp_path: Path, size: tuple[int, int]) -> None:
    with pytest.raises(MediaError, match="are not made of squares of 64"):
        ocr_encoder(tmp_path).input([np.zeros((*size, 3), np.float32)], is_overview=False)
