"""Encoders of pictures: parts of a picture, the order of patches, interpolated positions, and invalid files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from projectors import every, spec, text
from projectors.granite import GRANITE4_VISION
from projectors.llava import ADAPTER, COGVLM, FEATURES, LDP, MLP, TILED
from projectors.minicpmv import MINICPMV46, RESAMPLER
from projectors.spec import TinyProjector
from projectors.tiled import IDEFICS3, INTERNVL, LFM2, LLAMA4, NEMOTRON_V2_VL, PHI4

from llamado.ggml.ops import Op
from llamado.gguf.errors import GgufError
from llamado.gguf.reader import GGUFFile
from llamado.media.chunks import EncoderInput, MediaChunk, Piece, TokenText, tokenize
from llamado.media.errors import MediaError
from llamado.media.media import Media, MediaKind
from llamado.media.preprocessing import PreparedPicture
from llamado.models.encoders.encoder import MediaEncoder
from llamado.models.encoders.pictures import VitEncoder
from llamado.models.encoders.registry import load_encoders
from llamado.models.encoders.texts import PictureTexts
from llamado.models.encoders.tiled import internvl
from llamado.models.encoders.tiled.granite4 import Granite4VisionEncoder, unpad
from llamado.models.encoders.tiled.llama4 import Llama4Encoder
from llamado.models.encoders.tiled.minicpmv import buckets
from llamado.models.encoders.tiled.minicpmv46 import MiniCpmV46Encoder
from llamado.models.errors import InvalidModel, UnsupportedModel
from llamado.text.tokenizer.tokenizer import load_tokenizer


def media(width: int, height: int, seed: int = 0) -> Media:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    return Media(MediaKind.IMAGE, pixels)


def encoder_of(tiny: TinyProjector, folder: Path, **limits: int) -> MediaEncoder:
    file = GGUFFile.open(spec.make(tiny, folder / "mmproj.gguf"))
    return load_encoders(file, **limits).of(MediaKind.IMAGE)


def chunks(pieces: list[Piece]) -> list[MediaChunk]:
    return [piece for piece in pieces if isinstance(piece, MediaChunk)]


def brief(pieces: list[Piece]) -> list[str | int]:
    return [piece.n_tokens if isinstance(piece, MediaChunk) else spec.text_of(piece) for piece in pieces]


def chunk_named(name: str) -> MediaChunk:
    return MediaChunk(MediaKind.IMAGE, EncoderInput((), {}), 1, name.encode())


def test_texts_are_around_a_picture_its_tiles_and_its_overview() -> None:
    texts = PictureTexts(
        *("<all>", "</all>", (TokenText("<whole>"),), (TokenText("</whole>"),), (TokenText("<tiles>"),)),
        *((TokenText("</tiles>"),), (TokenText("<tile>"),), "<{row} {column}>", (TokenText("</tile>"),)),
        (TokenText("|"),),
    )
    image = np.zeros((4, 4, 3), np.float32)

    def parts(prepared: PreparedPicture, texts: PictureTexts = texts) -> str:
        pieces = texts.arrange(prepared, lambda image, name: chunk_named(name))
        return " ".join(
            piece.digest.decode() if isinstance(piece, MediaChunk) else spec.text_of(piece) for piece in pieces
        )

    tiled = PreparedPicture((image,) * 4, image, columns=2, rows=2)
    rows = "<tile> <1 1> 0 0 </tile> <tile> <1 2> 0 1 </tile> | <tile> <2 1> 1 0 </tile> <tile> <2 2> 1 1 </tile>"
    assert parts(tiled) == f"<all> <tiles> {rows} </tiles> <whole> overview </whole> </all>"
    first = texts._replace(is_overview_first=True)
    assert parts(tiled, first) == f"<all> <whole> overview </whole> <tiles> {rows} </tiles> </all>"
    assert parts(PreparedPicture(overview=image)) == "<all> <whole> overview </whole> </all>"
    assert parts(PreparedPicture((image,))) == "<all> 0 </all>"


@pytest.mark.parametrize("name", ["idefics3", "minicpmv4_6", "resampler", "resampler-old"])
def test_tokens_around_tiles_are_looked_up(name: str, tmp_path: Path) -> None:
    tiny = every()[name]
    encoder = encoder_of(tiny, tmp_path)
    tokenizer = load_tokenizer(GGUFFile.open(text.make(tiny, tmp_path / "text.gguf", spaces=True)).metadata)
    space, end = tokenizer.n_vocab - 1, tokenizer.find("\n")
    assert tokenizer.encode("\n") == [space, end]
    pieces = encoder.prepare(media(60, 60))
    prompt = tokenize(
        "<__media__>", [None], tokenizer.encode, tokenizer.find, lambda _: pieces, bos=None, eos=None
    )  # fmt: skip
    assert end in prompt.tokens and space not in prompt.tokens
    expected = [tokenizer.find(piece.text) for piece in pieces if isinstance(piece, TokenText)]
    found = iter(prompt.tokens)
    assert all(token in found for token in expected)  # in this order
    assert {piece for piece in pieces if isinstance(piece, TokenText)} <= {*encoder.required_tokens}


def test_a_token_that_the_vocabulary_lacks_is_an_error(tmp_path: Path) -> None:
    pieces = encoder_of(RESAMPLER, tmp_path).prepare(media(60, 60))
    with pytest.raises(MediaError, match="the vocabulary has no token '<slice>'"):
        tokenize(
            "<__media__>",
            [None],
            lambda text, **_: [1],
            lambda text: None if text == "<slice>" else 2,
            lambda _: pieces,
            bos=None,
            eos=None,
        )


def test_large_pictures_have_tiles(tmp_path: Path) -> None:
    assert brief(encoder_of(LFM2, tmp_path).prepare(media(200, 160))) == ["<|image_start|>", 72, "<|image_end|>"]
    pieces = encoder_of(LFM2, tmp_path).prepare(media(1100, 600))
    assert brief(pieces) == [
        *("<|image_start|>", "<|img_row_1_col_1|>", 256, "<|img_row_1_col_2|>", 256, "<|img_thumbnail|>"),
        *(231, "<|image_end|>"),
    ]
    assert brief(encoder_of(INTERNVL, tmp_path).prepare(media(32, 20))) == ["<img>", 16, "</img>"]
    assert brief(encoder_of(INTERNVL, tmp_path).prepare(media(64, 32))) == ["<img>", 16, 16, 16, "</img>"]
    assert brief(encoder_of(MLP, tmp_path).prepare(media(64, 32))) == [64]
    assert brief(encoder_of(TILED, tmp_path).prepare(media(64, 32))) == [64, 64, 64]


def test_parts_of_pictures_have_digests_of_their_own(tmp_path: Path) -> None:
    encoder, picture = encoder_of(IDEFICS3, tmp_path), media(90, 60)
    found = [chunk.digest for chunk in chunks(encoder.prepare(picture))]
    assert len(set(found)) == len(found) > 2
    assert found == [chunk.digest for chunk in chunks(encoder.prepare(picture))]
    others = chunks(encoder.prepare(media(90, 60, seed=1)))
    limited = chunks(encoder_of(IDEFICS3, tmp_path, max_tokens=16).prepare(picture))
    assert not {chunk.digest for chunk in [*others, *limited]} & set(found)


def test_the_user_limits_the_tokens_of_a_picture(tmp_path: Path) -> None:
    picture = media(640, 480)
    free, few = (encoder_of(LFM2, tmp_path, max_tokens=n).prepare(picture) for n in (0, 70))
    assert sum(chunk.n_tokens for chunk in chunks(free)) == 234
    assert brief(few)[-2:] == [63, "<|image_end|>"]
    with pytest.raises(InvalidModel, match="at least 102400 and at most 71680 pixels"):
        encoder_of(LFM2, tmp_path, min_tokens=100, max_tokens=70)


def test_interpolated_positions_are_those_of_the_grid(tmp_path: Path) -> None:
    encoder = encoder_of(PHI4, tmp_path)
    assert isinstance(encoder, VitEncoder)
    own = encoder.input(np.zeros((32, 32, 3), np.float32))
    assert own.shape == (8, 8) and own.arrays.keys() == {"patches", "order"}
    other = encoder.input(np.zeros((16, 24, 3), np.float32))
    assert other.shape == (6, 4)
    weights = other.arrays["x_weights"], other.arrays["y_weights"]
    assert [each.shape for each in weights] == [(6, 8), (4, 8)]
    assert all(np.allclose(each.sum(1), 1) for each in weights)
    # A coarser grid has the means of more than two positions.
    assert [np.count_nonzero(each, axis=1).max() for each in weights] == [3, 4]


def places(encoder: VitEncoder, nx: int, ny: int) -> list[list[int]]:
    """Return the patches of each token."""
    order: NDArray[np.int32] = encoder.order(nx, ny)
    return order.reshape(-1, encoder.merge**2).tolist()


def test_patches_of_a_token_are_neighbors(tmp_path: Path) -> None:
    plain, llama4 = encoder_of(INTERNVL, tmp_path), encoder_of(LLAMA4, tmp_path)
    assert isinstance(plain, VitEncoder) and isinstance(llama4, Llama4Encoder)
    assert places(plain, 4, 4) == [[0, 1, 4, 5], [2, 3, 6, 7], [8, 9, 12, 13], [10, 11, 14, 15]]
    assert places(llama4, 4, 4) == [[0, 1, 4, 5], [8, 9, 12, 13], [2, 3, 6, 7], [10, 11, 14, 15]]
    minicpm = encoder_of(MINICPMV46, tmp_path)
    assert isinstance(minicpm, MiniCpmV46Encoder)
    assert places(minicpm, 8, 4) == [
        [0, 1, 8, 9, 2, 3, 10, 11, 16, 17, 24, 25, 18, 19, 26, 27],
        [4, 5, 12, 13, 6, 7, 14, 15, 20, 21, 28, 29, 22, 23, 30, 31],
    ]


def test_the_largest_internvl_has_rms_norms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def norms() -> int:
        graph = encoder_of(INTERNVL, tmp_path).build((64,))
        return sum(node.op is Op.RMS_NORM for node in graph.nodes)

    assert norms() == 0
    monkeypatch.setattr(internvl, "WIDTH_WITH_RMS_NORMS", 32)
    monkeypatch.setattr(internvl, "LAYERS_WITH_RMS_NORMS", 2)
    assert norms() == 4


def test_pictures_of_internvl_have_up_to_12_tiles(tmp_path: Path) -> None:
    encoder = encoder_of(INTERNVL, tmp_path)
    for n, tiles in ((1, 0), (11, 11), (12, 12), (13, 12)):
        parts = chunks(encoder.prepare(media(n * 32, 32)))
        assert len(parts) == tiles + 1, n


def test_positions_of_llama_4_are_counted_from_1(tmp_path: Path) -> None:
    encoder = encoder_of(LLAMA4, tmp_path)
    assert isinstance(encoder, Llama4Encoder)
    arrays = encoder.input(np.zeros((32, 32, 3), np.float32)).arrays
    order, rows, columns = (arrays[name] for name in ("order", "rows", "columns"))
    assert (rows[-1], columns[-1], order[-1]) == (0, 0, 64)
    np.testing.assert_array_equal((rows[:-1] - 1) * 8 + columns[:-1] - 1, order[:-1])


def test_patches_share_the_positions_of_a_table_of_70() -> None:
    assert buckets(np.arange(3, dtype=np.int32), 3).tolist() == [0, 23, 46]
    assert buckets(np.arange(140, dtype=np.int32), 140).tolist() == [i // 2 for i in range(140)]


def test_margins_of_granite_pictures_have_no_tokens(tmp_path: Path) -> None:
    assert unpad(8, 4, 200, 100) == (0, 0, 8, 4)
    assert unpad(8, 8, 200, 100) == (0, 2, 8, 4)
    assert unpad(8, 8, 100, 300) == (3, 0, 2, 8)
    encoder = encoder_of(GRANITE4_VISION, tmp_path)
    assert isinstance(encoder, Granite4VisionEncoder)
    (chunk,) = chunks(encoder.prepare(media(90, 30)))
    # An overview of 4 × 4 tokens, and 4 lines of 12 tokens and an end.
    assert chunk.n_tokens == 16 + 4 * 13
    tokens = chunk.input.arrays["tokens"]
    assert tokens[16:].reshape(4, 13)[:, -1].tolist() == [64] * 4
    assert sorted(np.delete(tokens[16:].reshape(4, 13), -1, axis=1).reshape(-1)) == list(range(16, 64))
    (narrow,) = chunks(encoder.prepare(media(64, 20)))
    lines = narrow.input.arrays["tokens"][16:].reshape(2, 9)
    assert lines[:, :4].tolist() == [[18, 19, 22, 23], [24, 25, 28, 29]]
    # Windows of 2 × 2 tokens follow one another.
    assert tokens[:16].reshape(4, 4).tolist() == [[0, 1, 4, 5], [2, 3, 6, 7], [8, 9, 12, 13], [10, 11, 14, 15]]


def changed(tiny: TinyProjector, keys: Mapping[str, Any], tensors: Mapping[str, spec.Shape | None]) -> TinyProjector:
    """Return a small projector with other keys and tensors; None: without it."""
    new_tensors = {name: shape for name, shape in {**tiny.tensors, **tensors}.items() if shape is not None}
    new_keys = {name: value for name, value in {**tiny.keys, **keys}.items() if value is not None}
    return replace(tiny, keys=new_keys, tensors=new_tensors)


INVALID: list[tuple[TinyProjector, dict[str, Any], dict[str, spec.Shape | None], str]] = [
    (IDEFICS3, {"projector.scale_factor": 3}, {}, "8 patches a side .* not divisible into squares of 3"),
    (IDEFICS3, {"image_size": 3}, {}, "0 patches a side"),
    (IDEFICS3, {}, {"v.position_embd.weight": (32, 63)}, "63 positions; 64 are expected"),
    (IDEFICS3, {"preproc_image_size": 1100}, {}, "too many tiles of 32 pixels"),
    (IDEFICS3, {}, {"mm.model.fc.weight": (500, 64)}, "shape .500, 64.; expected .512, 64."),
    (IDEFICS3, {}, {"mm.model.fc.weight": None}, "'mm.model.fc.weight' is missing"),
    (LFM2, {"projector.scale_factor": 3}, {}, "tiles of 512 pixels with tokens of 48"),
    (LFM2, {}, {"v.position_embd.weight": (32, 35)}, "35 positions; 36 are expected"),
    (PHI4, {"image_min_pixels": 5000}, {}, "at least 5000 and at most 2500 pixels"),
    (PHI4, {"image_max_pixels": None}, {}, "'clip.vision.image_max_pixels' is missing"),
    (INTERNVL, {"preproc_min_tiles": 5, "preproc_max_tiles": 4}, {}, "'clip.vision.preproc_min_tiles' is 5"),
    (INTERNVL, {}, {"v.class_embd": None}, "'v.class_embd' is missing"),
    (NEMOTRON_V2_VL, {}, {"v.class_embd": (31, 3)}, "'v.class_embd' has shape"),
    (COGVLM, {}, {"v.boi": 63}, "'v.boi' has shape .63.; expected .64."),
    (TILED, {"image_grid_pinpoints": [64, 64, 32]}, {}, "3 values; pairs are expected"),
    (TILED, {"image_grid_pinpoints": [64, 40]}, {}, "a side of 40; multiples of the image size, 32"),
    (TILED, {"image_grid_pinpoints": [64, 0]}, {}, "a side of 0"),
    (TILED, {"image_grid_pinpoints": [3200, 3200]}, {}, "10000 tiles; at most 1024"),
    (FEATURES, {"feature_layer": [0, 4]}, {}, "no layer 4 of 3"),
    (LDP, {"image_size": 32}, {"v.position_embd.weight": (32, 65)}, "8 patches a side; 24 are supported"),
    (ADAPTER, {}, {"v.class_embd": 32, "v.position_embd.weight": (32, 65)}, "a class embedding"),
    (RESAMPLER, {"clip.minicpmv_version": np.int32(7)}, {}, "'clip.minicpmv_version' is 7; 2, 3, 4"),
    (RESAMPLER, {}, {"resampler.proj.weight": (64, 64)}, "64, is not a multiple of 128"),
    (RESAMPLER, {}, {"v.position_embd.weight": (32, 64)}, "64 positions; 4900 are expected"),
    (MINICPMV46, {"projector.scale_factor": 3}, {}, "'clip.vision.projector.scale_factor' is 3; 2 and 4"),
    (MINICPMV46, {"wa_layer_indexes": [3]}, {}, "no layer 3 of 3"),
    (GRANITE4_VISION, {"feature_layer": [4, 0, 1]}, {}, r"\[4, 0, 1\], of 4 layers"),
    (GRANITE4_VISION, {"projector.spatial_offsets": [0]}, {}, "1 spatial offsets for 3 layers"),
    (GRANITE4_VISION, {"projector.window_side": 3}, {}, "windows of 3 patches, with 2 queries, in 8 a side"),
    (GRANITE4_VISION, {"projector.query_side": 1}, {}, "spatial offsets with 1 queries for 4 patches"),
    (GRANITE4_VISION, {"projection_dim": 32}, {}, "'clip.vision.projection_dim' is 32"),
    (GRANITE4_VISION, {"image_grid_pinpoints": None}, {}, "'clip.vision.image_grid_pinpoints' is missing"),
]


@pytest.mark.parametrize(("tiny", "keys", "tensors", "message"), INVALID, ids=range(len(INVALID)))
def test_invalid_files(
    tiny: TinyProjector,
    keys: dict[str, Any],
    tensors: dict[str, spec.Shape | None],
    message: str,
    tmp_path: Path,
) -> None:
    with pytest.raises((GgufError, InvalidModel, UnsupportedModel), match=message):
        encoder_of(changed(tiny, keys, tensors), tmp_path)
