"""Encoders of pictures of any size: windows, bands, positions, the order of tokens, limits, and invalid files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from projectors import spec
from projectors.glm4v import GLM4V, GLM5V
from projectors.mimovl import HUNYUANVL, MIMOVL, MINIMAX_M3, MUSE_GLIMMER
from projectors.paddleocr import DOTS_OCR, PADDLEOCR
from projectors.qwen_vl import EXAONE45, LING3VL, QWEN2VL, QWEN3VL, QWEN25VL, YOUTUVL
from projectors.spec import TinyProjector

from llamado.devices.cpu.device import CpuDevice
from llamado.ggml.graph import Graph
from llamado.ggml.tensor import Tensor
from llamado.gguf.errors import GgufError
from llamado.gguf.reader import GGUFFile
from llamado.gguf.types import TensorType
from llamado.media.chunks import EncoderInput, Grid, MediaChunk, Piece, tokenize
from llamado.media.media import Media, MediaKind
from llamado.models.encoders.any_size.hunyuanvl import HunyuanGrid
from llamado.models.encoders.encoder import EncoderPass, MediaEncoder
from llamado.models.encoders.grids import PatchGrid
from llamado.models.encoders.parts.bands import Band
from llamado.models.encoders.parts.interpolation import Interpolation
from llamado.models.encoders.parts.transformer import Visible, attend
from llamado.models.encoders.parts.windows import window_order
from llamado.models.encoders.registry import load_encoders
from llamado.models.errors import InvalidModel, UnsupportedModel

DIM, HEADS, KV_HEADS = 8, 2, 1


def media(width: int, height: int, seed: int = 0) -> Media:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    return Media(MediaKind.IMAGE, pixels)


def encoder_of(tiny: TinyProjector, folder: Path, **limits: int) -> MediaEncoder:
    file = GGUFFile.open(spec.make(tiny, folder / "mmproj.gguf"))
    return load_encoders(file, **limits).of(MediaKind.IMAGE)


def chunk_of(encoder: MediaEncoder, picture: Media) -> MediaChunk:
    (chunk,) = (piece for piece in encoder.prepare(picture) if isinstance(piece, MediaChunk))
    return chunk


# --- windows and bands ------------------------------------------------------------------------------------------------


def attention(step: EncoderPass, n: int, visible: Visible, arrays: Mapping[str, Any], sinks: bool) -> NDArray[Any]:
    """Return the attention of `n` random positions: float32 [n, DIM · HEADS]."""
    rng = np.random.default_rng(n)
    shapes = {"q": (HEADS, DIM), "k": (KV_HEADS, DIM), "v": (KV_HEADS, DIM)}
    given = {name: rng.standard_normal((n, *shape)).astype(np.float32) for name, shape in shapes.items()}
    q, k, v = (step.input(name, DIM, shape[0], n) for name, shape in shapes.items())
    sink = step.input("sinks", HEADS) if sinks else None
    given |= {"sinks": np.array([0.5, 2], np.float32)} if sinks else {}
    step.graph.output("y", attend(q, k, v, 0.5, visible, sink))
    return run(step.graph, {**arrays, **given})


def run(graph: Graph, arrays: Mapping[str, NDArray[Any]]) -> NDArray[np.float32]:
    """Return the output of a graph."""
    device, out = CpuDevice(1), graph.outputs["y"]
    device.place([*graph.inputs.values(), out])
    for name, tensor in graph.inputs.items():
        assert arrays[name].nbytes == tensor.nbytes, name
        device.write(tensor, np.ascontiguousarray(arrays[name]).reshape(-1).view(np.uint8))
    device.submit(graph)
    return device.read(out, 0, out.nbytes).result().view(np.float32).reshape(out.ne[1], out.ne[0]).copy()


def masked(n: int, visible: NDArray[np.bool_], sinks: bool = False) -> NDArray[Any]:
    """Return the attention with a mask of all positions."""
    step = EncoderPass(1e-5)
    mask: Tensor = step.input("mask", n, n, type=TensorType.F16)
    arrays = {"mask": np.where(visible, 0, -np.inf).astype(np.float16)}
    return attention(step, n, mask, arrays, sinks)


@pytest.mark.parametrize(
    ("nx", "ny", "side", "groups"),
    [
        (4, 6, 2, ((6, 4),)),
        (5, 7, 2, ((6, 4), (3, 2), (2, 2), (1, 1))),
        (3, 2, 4, ((1, 6),)),
        (7, 4, 4, ((1, 16), (1, 12))),
        (2, 5, 2, ((2, 4), (1, 2))),
    ],
)
def test_windows_of_one_size_follow_one_another(
    nx: int, ny: int, side: int, groups: tuple[tuple[int, int], ...]
) -> None:
    order, windows = window_order(nx, ny, side)
    assert sorted(order) == list(range(nx * ny)) and windows.groups == groups
    rows, columns = np.divmod(order, nx)
    at = 0
    for count, n in groups:
        for _ in range(count):
            places = {*zip(rows[at : at + n] // side, columns[at : at + n] // side, strict=True)}
            assert len(places) == 1  # all cells of one window
            assert (np.diff(order[at : at + n]) > 0).all()
            at += n
    assert at == nx * ny
    window = rows // side * 100 + columns // side
    expected = masked(nx * ny, window[:, None] == window[None])
    np.testing.assert_allclose(attention(EncoderPass(1e-5), nx * ny, windows, {}, False), expected, atol=1e-5)


@pytest.mark.parametrize(
    ("n", "reach", "n_parts", "n_batched"),
    [
        (30, 5, 1, 0),
        (64, 20, 1, 0),
        (70, 20, 2, 0),
        (300, 20, 3, 3),
        (256, 64, 3, 2),
        (500, 100, 3, 3),
        (450, 100, 4, 2),
        (40, 90, 1, 0),
    ],
)
def test_a_band_is_computed_in_blocks(n: int, reach: int, n_parts: int, n_batched: int) -> None:
    band = Band(n, reach)
    parts = band.parts
    assert len(parts) == n_parts and max((part.n_blocks for part in parts), default=0) == max(1, n_batched)
    assert sum(part.n * part.n_blocks for part in parts) == n
    distance = np.abs(np.arange(n)[:, None] - np.arange(n))
    expected = masked(n, distance <= reach, sinks=True)
    step = EncoderPass(1e-5)
    found = attention(step, n, band.of(step), band.arrays(), True)
    np.testing.assert_allclose(found, expected, atol=1e-5)


# --- positions --------------------------------------------------------------------------------------------------------


def test_interpolated_positions() -> None:
    corners = Interpolation.BILINEAR_CORNERS.weights(3, 5)
    np.testing.assert_allclose(corners @ np.arange(3), [0, 0.5, 1, 1.5, 2])
    np.testing.assert_allclose(Interpolation.BILINEAR_CORNERS.weights(3, 1), [[1, 0, 0]])
    np.testing.assert_allclose(Interpolation.BILINEAR.weights(2, 4) @ [0, 1], [0, 0.25, 0.75, 1])
    wider = Interpolation.BILINEAR_WIDER.weights(4, 4) @ np.arange(4)
    np.testing.assert_allclose(wider, (np.arange(4) + 0.5) / 4.1 * 4 - 0.5 + np.array([0.0122, 0, 0, 0]), atol=1e-3)
    for kind in Interpolation:
        for n_in, n_out in ((4, 9), (9, 4), (5, 5)):
            np.testing.assert_allclose(kind.weights(n_in, n_out).sum(1), 1, atol=1e-6, err_msg=str(kind))
        if kind is not Interpolation.BILINEAR_WIDER:
            np.testing.assert_allclose(kind.weights(5, 5), np.eye(5), atol=1e-6, err_msg=str(kind))


def test_positions_of_hunyuan_pictures() -> None:
    grid = HunyuanGrid(nx=2, ny=1, n_before=3)
    assert grid.n_positions == 5
    assert grid.positions(10).T.tolist() == [
        [10, 10, 10, 10], [11, 0, 0, 3], [12, 1, 0, 3], [13, 2, 0, 3], [14, 14, 14, 14],
    ]  # fmt: skip


def test_hunyuan_pictures_are_counted_in_a_prompt() -> None:
    def chunk(kind: MediaKind, layout: HunyuanGrid | Grid | None) -> list[Piece]:
        return ["[", MediaChunk(kind, EncoderInput((), {}), 2, b"", layout), "]"]

    pieces = [
        chunk(MediaKind.IMAGE, HunyuanGrid(1, 1)),
        chunk(MediaKind.AUDIO, None),
        chunk(MediaKind.IMAGE, Grid(2, 1)),
        chunk(MediaKind.IMAGE, HunyuanGrid(1, 1)),
    ]
    encode = lambda text, **_: [ord(text)]  # noqa: E731
    prompt = tokenize("<>" * 4, pieces, encode, ord, lambda given: given, bos=1, eos=2, marker="<>")
    assert [span.chunk.layout for span in prompt.spans] == [
        HunyuanGrid(1, 1, 0), None, Grid(2, 1), HunyuanGrid(1, 1, 2),
    ]  # fmt: skip
    assert [token for token in prompt.tokens if token >= 0] == [1, *[ord("["), ord("]")] * 4, 2]


# --- tokens -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tiny", "texts", "layout", "n_tokens"),
    [
        (QWEN2VL, ("<|vision_start|>", "<|vision_end|>"), Grid(6, 3), 18),
        (QWEN3VL, ("<|vision_start|>", "<|vision_end|>"), Grid(6, 3), 18),
        (YOUTUVL, ("<|vision_start|>", "<|vision_end|>"), Grid(6, 3), 18),
        (EXAONE45, ("<vision>", "</vision>"), Grid(6, 3), 18),
        (GLM5V, ("<|begin_of_image|>", "<|end_of_image|>"), Grid(6, 3), 18),
        (PADDLEOCR, ("<|IMAGE_START|>", "<|IMAGE_END|>"), Grid(6, 3), 18),
        (DOTS_OCR, ("<|img|>", "<|endofimg|>"), Grid(18, 1), 18),
        (MINIMAX_M3, ("]<]start of image[>[", "]<]end of image[>["), Grid(18, 1), 18),
        (HUNYUANVL, ("<｜hy_place▁holder▁no▁100｜>", "<｜hy_place▁holder▁no▁101｜>"), HunyuanGrid(12, 6), 80),
    ],
    ids=lambda given: given.name if isinstance(given, TinyProjector) else "",
)
def test_tokens_of_a_picture(
    tiny: TinyProjector, texts: tuple[str, str], layout: object, n_tokens: int, tmp_path: Path
) -> None:
    before, chunk, behind = encoder_of(tiny, tmp_path).prepare(media(96, 48))
    assert isinstance(chunk, MediaChunk) and (before, behind) == texts
    assert (chunk.layout, chunk.n_tokens, chunk.causal) == (layout, n_tokens, True)


@pytest.mark.parametrize(
    "tiny",
    [QWEN2VL, QWEN3VL, LING3VL, GLM4V, PADDLEOCR, DOTS_OCR, HUNYUANVL, MINIMAX_M3, MUSE_GLIMMER, YOUTUVL],
    ids=lambda tiny: tiny.name,
)
def test_tokens_are_in_rows(tiny: TinyProjector, tmp_path: Path) -> None:
    """Without layers, each token depends on its own pixels only."""
    bare = replace(
        tiny,
        n_layer=0,
        tensors={name: shape for name, shape in tiny.tensors.items() if "deepstack" not in name},
        keys={**tiny.keys, **({"wa_layer_indexes": [0]} if tiny is YOUTUVL else {})},
    )
    file, encoder = spec.encoder_of(spec.make(bare, tmp_path / "mmproj.gguf"))
    one = media(96, 48)
    pixels = one.data.copy()
    pixels[16:24, 64:72] ^= 255  # in the fifth token of the second row, or the ninth of the third
    rows = [
        spec.encode(CpuDevice(1), file, encoder, chunk_of(encoder, picture).input)
        for picture in (one, Media(MediaKind.IMAGE, pixels))
    ]
    changed = [int(i) for i in np.flatnonzero(np.abs(rows[1] - rows[0]).max(1))]
    assert changed == [1 + 2 * 13 + 8 if tiny is HUNYUANVL else 6 + 4]


def test_the_user_limits_tokens_unless_the_file_limits_pixels(tmp_path: Path) -> None:
    picture = media(320, 240)
    for tiny in (QWEN2VL, QWEN25VL, GLM5V, MUSE_GLIMMER, MINIMAX_M3):
        free, limited = (chunk_of(encoder_of(tiny, tmp_path, max_tokens=n), picture) for n in (0, 50))
        assert limited.n_tokens <= 50 < free.n_tokens, tiny.name
        assert free.digest != limited.digest
    for tiny in (EXAONE45, PADDLEOCR, DOTS_OCR, HUNYUANVL, MIMOVL):
        free, limited = (chunk_of(encoder_of(tiny, tmp_path, max_tokens=n), picture) for n in (0, 50))
        assert limited.n_tokens == free.n_tokens > 50, tiny.name


def test_embeddings_of_layers_are_beside_each_other(tmp_path: Path) -> None:
    encoder = encoder_of(QWEN3VL, tmp_path)
    assert encoder.n_embd == 3 * 64
    assert encoder.build(PatchGrid(4, 2)).outputs["embeddings"].ne == (3 * 64, 2, 1, 1)


# --- invalid files ----------------------------------------------------------------------------------------------------

INVALID: list[tuple[TinyProjector, dict[str, Any], dict[str, spec.Shape | None], str]] = [
    (QWEN2VL, {"spatial_merge_size": 3}, {}, "'clip.vision.spatial_merge_size' is 3; 2 is expected"),
    (QWEN2VL, {"image_size": None}, {}, "'clip.vision.image_size' is missing"),
    (QWEN2VL, {}, {"v.patch_embd.weight.1": None}, "'v.patch_embd.weight.1' is missing"),
    (QWEN2VL, {}, {"mm.2.weight": (64, 64)}, "'mm.2.weight' has shape .64, 64.; expected .128, 64."),
    (QWEN25VL, {"n_wa_pattern": None}, {}, "'clip.vision.n_wa_pattern' is missing"),
    (
        QWEN25VL,
        {"patch_size": 57},
        dict.fromkeys(("v.patch_embd.weight", "v.patch_embd.weight.1"), (57, 57, 3, 32)),
        "patches of 57 pixels are too large for windows of 112",
    ),
    (QWEN3VL, {}, {"v.patch_embd.bias": None}, "'v.patch_embd.bias' is missing"),
    (QWEN3VL, {}, {"v.position_embd.weight": (32, 63)}, "'v.position_embd.weight' has shape"),
    (
        QWEN3VL,
        {},
        {"v.deepstack.0.fc2.weight": (128, 32), "v.deepstack.0.fc2.bias": 32},
        "has 32 rows; 64 are expected",
    ),
    (LING3VL, {}, {"mm.input_norm.weight": None}, "'mm.input_norm.weight' is missing"),
    (EXAONE45, {"image_min_pixels": 70000}, {}, "'clip.vision.image_min_pixels' is 70000, and the greatest"),
    (YOUTUVL, {"wa_layer_indexes": None}, {}, "'clip.vision.wa_layer_indexes' is missing"),
    (YOUTUVL, {"window_size": 15}, {}, "patches of 8 pixels are too large for windows of 15"),
    (YOUTUVL, {}, {"v.patch_embd.weight": (190, 32)}, "'v.patch_embd.weight' has shape .190, 32."),
    (GLM4V, {}, {"mm.patch_merger.weight": (3, 2, 32, 48)}, "'mm.patch_merger.weight' has shape"),
    (GLM4V, {}, {"v.patch_embd.bias": None}, "'v.patch_embd.bias' is missing"),
    (GLM5V, {"swiglu_clamp": None}, {}, "'clip.vision.swiglu_clamp' is missing"),
    (DOTS_OCR, {"projector.scale_factor": 1}, {}, "'clip.vision.projector.scale_factor' is 1; 2 is expected"),
    (DOTS_OCR, {}, {"mm.post_norm.weight": None}, "'mm.post_norm.weight' is missing"),
    (MIMOVL, {"wa_pattern_mode": [0, 1]}, {}, "'clip.vision.wa_pattern_mode' has 2 values; 6 are expected"),
    (MIMOVL, {"attention.head_count": 5}, {}, "not divisible by 9 heads"),
    (MIMOVL, {"wa_pattern_mode": [0] * 6}, {}, "a layer with a band has no tensor 'attn_sinks'"),
    (HUNYUANVL, {}, {"v.image_newline": 64}, "'v.image_newline' has shape .64.; expected .96."),
    (MINIMAX_M3, {"attention.head_count": 16}, {}, "heads of 2 elements are too narrow"),
    (MUSE_GLIMMER, {}, {"mm.1.weight": (64, 96)}, "'mm.1.weight' has shape .64, 96.; expected .80, 96."),
]


@pytest.mark.parametrize(("tiny", "keys", "tensors", "message"), INVALID, ids=range(len(INVALID)))
def test_invalid_files(
    tiny: TinyProjector,
    keys: dict[str, Any],
    tensors: dict[str, spec.Shape | None],
    message: str,
    tmp_path: Path,
) -> None:
    new_tensors = {name: shape for name, shape in {**tiny.tensors, **tensors}.items() if shape is not None}
    new_keys = {name: value for name, value in {**tiny.keys, **keys}.items() if value is not None}
    with pytest.raises((GgufError, InvalidModel, UnsupportedModel), match=message):
        encoder_of(replace(tiny, keys=new_keys, tensors=new_tensors), tmp_path)
