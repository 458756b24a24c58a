"""Encoders of Pixtral, Gemma 4, Kimi and DeepSeek V4: order of tokens, texts, limits, experts, and invalid files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from projectors import spec
from projectors.convnext import YASA2
from projectors.deepseek4 import DEEPSEEK4V
from projectors.deepseek_ocr import DEEPSEEKOCR
from projectors.dots3note import DOTS3NOTE
from projectors.gemma4 import GEMMA4UV, GEMMA4V
from projectors.graphs import run
from projectors.kimi import KIMIK25, KIMIVL
from projectors.mobilenet import GEMMA3NV
from projectors.pixtral import LIGHTONOCR, MISTRAL3, PIXTRAL
from projectors.spec import TinyProjector
from projectors.step3 import STEP3VL

from llamado.gguf.reader import GGUFFile
from llamado.media.chunks import Grid, MediaChunk, Piece, tokenize
from llamado.media.errors import MediaError
from llamado.media.media import Media, MediaKind
from llamado.models.encoders.any_size.deepseek4 import Block
from llamado.models.encoders.encoder import EncoderPass, MediaEncoder
from llamado.models.encoders.parts.clamped import ClampedPass, Limits
from llamado.models.encoders.parts.experts import EncoderExperts
from llamado.models.encoders.registry import load_encoders
from llamado.models.errors import InvalidModel


def media(width: int, height: int) -> Media:
    return Media(MediaKind.IMAGE, np.random.default_rng(0).integers(0, 256, (height, width, 3), np.uint8))


def encoder_of(tiny: TinyProjector, folder: Path, *tokens: str, **limits: int) -> MediaEncoder:
    file = GGUFFile.open(spec.make(tiny, folder / f"{tiny.name}.gguf"))
    return load_encoders(file, has_token=tokens.__contains__, **limits).of(MediaKind.IMAGE)


def chunk_of(encoder: MediaEncoder, picture: Media) -> MediaChunk:
    (chunk,) = (piece for piece in encoder.prepare(picture) if isinstance(piece, MediaChunk))
    return chunk


def texts_of(pieces: list[Piece]) -> list[str]:
    return ["*" if isinstance(piece, MediaChunk) else spec.text_of(piece) for piece in pieces if piece]


# --- order and texts --------------------------------------------------------------------------------------------------


def test_a_learned_row_ends_each_row_of_tokens_but_the_last(tmp_path: Path) -> None:
    chunk = chunk_of(encoder_of(MISTRAL3, tmp_path), media(32, 16))
    np.testing.assert_array_equal(chunk.input.arrays["layout"], [0, 1, 2, 3, 8, 4, 5, 6, 7])
    assert chunk.n_tokens == 9 and chunk.layout == Grid(9, 1)
    # Squares of four patches are neighbors.
    np.testing.assert_array_equal(chunk.input.arrays["rows"][:8], [0, 0, 1, 1, 0, 0, 1, 1])
    np.testing.assert_array_equal(chunk.input.arrays["columns"][:8], [0, 1, 0, 1, 2, 3, 2, 3])


@pytest.mark.parametrize(
    ("tiny", "tokens", "texts"),
    [
        (PIXTRAL, (), ["*", "[IMG_END]"]),
        (LIGHTONOCR, (), ["<|im_start|>", "*", "<|im_end|>"]),
        (GEMMA4V, (), ["<|image>", "*", "<image|>"]),
        (GEMMA4UV, (), ["<|image>", "*", "<image|>"]),
        (KIMIVL, (), ["<|media_start|>", "*", "<|media_end|>"]),
        (KIMIK25, (), ["<|media_begin|>", "*", "<|media_end|>"]),
        (KIMIK25, ("<|begin_of_image|>",), ["<|begin_of_image|>", "*", "<|end_of_image|>"]),
        (DOTS3NOTE, (), ["<|img|>", "*", "<|endofimg|>"]),
        (YASA2, (), ["<image>", "*", "</image>"]),
    ],
    ids=lambda value: value.name if isinstance(value, TinyProjector) else None,
)
def test_texts_around_a_picture(tmp_path: Path, tiny: TinyProjector, tokens: tuple[str, ...], texts: list[str]) -> None:
    assert texts_of(encoder_of(tiny, tmp_path, *tokens).prepare(media(48, 40))) == texts


def test_tiles_of_step3_stand_in_rows_before_the_whole_picture(tmp_path: Path) -> None:
    encoder = encoder_of(STEP3VL, tmp_path)
    texts = texts_of(encoder.prepare(media(1000, 1000)))
    tile, row_end = ["<patch_start>", "*", "<patch_end>"], ["<patch_newline>"]
    assert texts == [*tile, *tile, *row_end, *tile, *tile, "<im_start>", "*", "<im_end>"]
    (chunk,) = (piece for piece in encoder.prepare(media(50, 50)) if isinstance(piece, MediaChunk))
    assert chunk.input.shape == (8, 8) and chunk.n_tokens == 4 and chunk.layout == Grid(2, 2)


def test_the_user_limits_tokens(tmp_path: Path) -> None:
    picture = media(200, 200)
    for tiny, free in ((PIXTRAL, 1055), (MISTRAL3, 649), (LIGHTONOCR, 64), (KIMIVL, 625), (GEMMA4V, 289), (YASA2, 64)):
        assert chunk_of(encoder_of(tiny, tmp_path), picture).n_tokens == free
    for tiny, limited in ((PIXTRAL, 109), (MISTRAL3, 109), (KIMIVL, 100), (GEMMA4V, 100), (GEMMA4UV, 100)):
        assert chunk_of(encoder_of(tiny, tmp_path, max_tokens=100), picture).n_tokens == limited
    assert chunk_of(encoder_of(GEMMA4UV, tmp_path, min_tokens=1000), picture).n_tokens == 1024


def test_both_limits_of_pixels_replace_those_of_kimi_k25(tmp_path: Path) -> None:
    picture = media(200, 200)
    for keys, n_tokens in (
        ({}, 625),
        ({"image_max_pixels": 4096}, 625),
        ({"image_min_pixels": 64}, 625),
        ({"image_min_pixels": 64, "image_max_pixels": 4096}, 64),
    ):
        tiny = replace(KIMIK25, keys={**KIMIK25.keys, **keys})
        assert chunk_of(encoder_of(tiny, tmp_path), picture).n_tokens == n_tokens, keys


# --- DeepSeek V4 ------------------------------------------------------------------------------------------------------


def test_pairs_of_rows_alternate_in_a_block() -> None:
    start, end, row_end, pad = 6, 7, 8, 9
    assert Block(2, 3, 1).layout().tolist() == [
        *(pad, start),
        *(0, 2, 1, 3, row_end, row_end),
        *(4, pad, 5, pad, row_end, pad),
        end,
    ]
    start, end, row_end, pad = 4, 5, 6, 7
    assert Block(2, 2, 0).layout().tolist() == [start, 0, 2, 1, 3, row_end, row_end, pad, pad, end]


@pytest.mark.parametrize("bos", [None, 1])
def test_the_first_row_of_a_block_begins_at_a_multiple_of_4(tmp_path: Path, bos: int | None) -> None:
    encoder = encoder_of(DEEPSEEK4V, tmp_path)
    digests = set()

    def encode(text: str, **_: Any) -> list[int]:
        return [ord(letter) for letter in text]

    for n in range(6):
        found = tokenize("x" * n + "<__media__>", [media(40, 40)], encode, ord, encoder.prepare, bos=bos, eos=None)
        (span,) = found.spans
        n_before = span.chunk.input.shape[2]
        assert (n + n_before + 1) % 4 == 0 and 0 <= n_before < 4
        assert span.start == n + (bos is not None) and span.chunk.n_tokens == len(span.chunk.input.arrays["layout"])
        digests.add(span.chunk.digest)
    assert len(digests) == 4 and not span.chunk.causal


# --- Gemma 4 ----------------------------------------------------------------------------------------------------------


def test_matrices_limit_their_input_and_output() -> None:
    step = ClampedPass(1e-6, {"w": Limits(-1.0, 0.5, -0.25, 2.0)})
    w, x = step.input("w", 2, 2), step.input("x", 2, 3)
    rows = np.array([[1, 0], [-3, 4], [0.25, -0.5]], np.float32)
    weight = np.array([[1, 1], [1, -4]], np.float32)
    expected = np.clip(np.clip(rows, -1, 0.5) @ weight.T, -0.25, 2)
    np.testing.assert_allclose(run(step, step.mul_mat(w, x, "y"), {"w": weight, "x": rows}), expected)


@pytest.mark.parametrize(("width", "causal"), [(1536, True), (2560, True), (64, False)])
def test_small_models_see_pictures_causally(tmp_path: Path, width: int, causal: bool) -> None:
    tensors = {**GEMMA4V.tensors, "mm.input_projection.weight": (32, width)}
    assert encoder_of(replace(GEMMA4V, tensors=tensors, n_embd=width), tmp_path).causal is causal


@pytest.mark.parametrize("tiny", [GEMMA4V, GEMMA4UV], ids=lambda tiny: tiny.name)
def test_a_picture_has_no_more_patches_a_side_than_positions(tmp_path: Path, tiny: TinyProjector) -> None:
    tensors = {**tiny.tensors, "v.position_embd.weight": (32, 8, 2)}
    encoder = encoder_of(replace(tiny, tensors=tensors), tmp_path)
    with pytest.raises(MediaError, match="a side has at most 8"):
        encoder.prepare(media(200, 200))


# --- experts ----------------------------------------------------------------------------------------------------------


def test_the_bias_chooses_experts_and_does_not_weigh_them() -> None:
    n, n_ff, n_experts, n_used, rows = 8, 16, 5, 2, 7
    rng = np.random.default_rng(0)
    shapes = {"router": (n, n_experts), "gate": (n, n_ff, n_experts), "up": (n, n_ff, n_experts)}
    shapes |= {"down": (n_ff, n, n_experts), "bias": (n_experts,), "x": (n, rows)}
    arrays: dict[str, NDArray[Any]] = {
        name: rng.standard_normal(shape[::-1]).astype(np.float32) for name, shape in shapes.items()
    }
    step = EncoderPass(1e-6)
    given = {name: step.input(name, *shape) for name, shape in shapes.items()}
    x = given.pop("x")
    found = run(step, EncoderExperts(**given, n_used=n_used)(step, x, "0"), arrays)
    shares = 1 / (1 + np.exp(-arrays["x"] @ arrays["router"].T))
    expected = np.zeros((rows, n))
    for i, row in enumerate(arrays["x"]):
        chosen = np.argsort(-(shares[i] + arrays["bias"]))[:n_used]
        for expert in chosen:
            gate = arrays["gate"][expert] @ row
            h = gate / (1 + np.exp(-gate)) * (arrays["up"][expert] @ row)
            expected[i] += shares[i, expert] / shares[i, chosen].sum() * (arrays["down"][expert] @ h)
    np.testing.assert_allclose(found, expected, atol=1e-4)


# --- invalid files ----------------------------------------------------------------------------------------------------


def without(tiny: TinyProjector, name: str) -> TinyProjector:
    return replace(tiny, tensors={key: shape for key, shape in tiny.tensors.items() if key != name})


@pytest.mark.parametrize(
    ("tiny", "name"),
    [
        (PIXTRAL, "v.token_embd.img_break"),
        (MISTRAL3, "mm.input_norm.weight"),
        (KIMIVL, "mm.input_norm.bias"),
        (GEMMA4V, "v.position_embd.weight"),
        (GEMMA4UV, "v.patch_norm.3.bias"),
        (STEP3VL, "mm.model.fc.weight"),
        (DEEPSEEKOCR, "v.image_newline"),
        (DEEPSEEKOCR, "v.sam.blk.1.attn.pos_h.weight"),
        (DEEPSEEK4V, "v.token_embd.img_pad"),
        (YASA2, "v.stage.1.blk.0.pw2.weight"),
        (GEMMA3NV, "v.blk.2.1.attn.output.proj.weight"),
        (DOTS3NOTE, "mm.post_norm.weight"),
    ],
    ids=lambda value: value.name if isinstance(value, TinyProjector) else value,
)
def test_a_missing_tensor_is_named(tmp_path: Path, tiny: TinyProjector, name: str) -> None:
    with pytest.raises(InvalidModel, match=name.replace(".", r"\.")):
        encoder_of(without(tiny, name), tmp_path)


@pytest.mark.parametrize(
    ("tiny", "keys", "message"),
    [
        (STEP3VL, {"projector.scale_factor": 2}, "scale_factor' is not 4"),
        (YASA2, {"image_size": 32}, "do(es)? not become one of 8 × 8"),
        (YASA2, {"image_size": 100}, "do(es)? not become one of 8 × 8"),
        (GEMMA3NV, {"image_size": 320}, "do not become one of 16"),
        (KIMIK25, {"image_min_pixels": 900, "image_max_pixels": 100}, "image_min_pixels' is 900"),
        (DEEPSEEKOCR, {"embedding_length": 64}, "shape"),
    ],
    ids=lambda value: value.name if isinstance(value, TinyProjector) else "",
)
def test_sizes_that_do_not_fit_are_refused(
    tmp_path: Path, tiny: TinyProjector, keys: dict[str, int], message: str
) -> None:
    with pytest.raises(InvalidModel, match=message):
        encoder_of(replace(tiny, keys={**tiny.keys, **keys}), tmp_path)


def test_limits_of_matrices_are_numbers(tmp_path: Path) -> None:
    limits = {"attn_q.input_min": 2}
    with pytest.raises(InvalidModel, match=r"attn_q\.input_min' is not a number"):
        encoder_of(replace(GEMMA4V, layers={0: limits}), tmp_path)
