"""Access to the real mtmd, checked with a small Gemma 3 projector: chunks, prepared pixels, positions, embeddings."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import gguf
import numpy as np
import pytest
from mtmd import Mtmd
from tiny_models import make_gemma3

pytestmark = pytest.mark.interop

SIDE, PATCH, WIDTH, TEXT_WIDTH = 56, 14, 32, 128


def write_projector(path: Path) -> Path:
    """Write a projector of one layer, whose pictures become 4 tokens of 2 × 2 patches."""
    rng = np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, "clip")
    writer.add_bool("clip.has_vision_encoder", True)
    writer.add_string("clip.projector_type", "gemma3")
    writer.add_bool("clip.use_gelu", True)
    sizes = {
        "image_size": SIDE, "patch_size": PATCH, "embedding_length": WIDTH, "feed_forward_length": 64, "block_count": 1,
        "projection_dim": TEXT_WIDTH, "attention.head_count": 2, "projector.scale_factor": 2,
    }  # fmt: skip
    for key, value in sizes.items():
        writer.add_uint32(f"clip.vision.{key}", value)
    writer.add_float32("clip.vision.attention.layer_norm_epsilon", 1e-6)
    for key in ("mean", "std"):
        writer.add_array(f"clip.vision.image_{key}", [0.5, 0.5, 0.5])
    shapes: dict[str, tuple[int, ...]] = {
        "v.patch_embd.weight": (WIDTH, 3, PATCH, PATCH), "v.patch_embd.bias": (WIDTH,),
        "v.position_embd.weight": (16, WIDTH), "v.post_ln.weight": (WIDTH,), "v.post_ln.bias": (WIDTH,),
        "mm.input_projection.weight": (WIDTH, TEXT_WIDTH), "mm.soft_emb_norm.weight": (WIDTH,),
    }  # fmt: skip
    for name in ("attn_q", "attn_k", "attn_v", "attn_out", "ln1", "ln2", "ffn_up", "ffn_down"):
        n_in, n_out = {"ffn_up": (WIDTH, 64), "ffn_down": (64, WIDTH)}.get(name, (WIDTH, WIDTH))
        shapes[f"v.blk.0.{name}.weight"] = (WIDTH,) if name.startswith("ln") else (n_out, n_in)
        shapes[f"v.blk.0.{name}.bias"] = (n_out,)
    for name, shape in shapes.items():
        writer.add_tensor(name, rng.normal(0, 0.2, shape).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def mtmd(peer_bin: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mtmd]:
    folder = tmp_path_factory.mktemp("mtmd")
    model = make_gemma3(folder / "text.gguf", n_embd=TEXT_WIDTH)
    with Mtmd(peer_bin, write_projector(folder / "mmproj.gguf"), model, record=lambda name: name == "node_0") as opened:
        yield opened


def test_chunks_of_a_prompt_with_a_picture(mtmd: Mtmd) -> None:
    picture = np.random.default_rng(1).integers(0, 256, (SIDE, SIDE, 3), np.uint8)
    before, image, after = mtmd.chunks("hello <__media__> world", [picture])
    assert (before.kind, image.kind, after.kind) == ("text", "image", "text")
    assert before.tokens[0] == 2 and before.n_tokens == len(before.tokens)
    assert (image.n_tokens, image.n_positions, image.nx, image.ny, image.causal) == (4, 4, 4, 1, False)
    assert image.positions is not None and image.positions.tolist() == [[i] * 4 for i in range(4)]
    np.testing.assert_array_equal(image.pixels, (picture.astype(np.float32) / np.float32(255) - 0.5) / 0.5)
    assert image.embeddings is not None and image.embeddings.shape == (4, TEXT_WIDTH)
    assert np.isfinite(image.embeddings).all() and image.embeddings.std() > 0.01


def test_other_pictures_have_other_embeddings(mtmd: Mtmd) -> None:
    pictures = np.random.default_rng(2).integers(0, 256, (2, 30, 90, 3), np.uint8)
    found = [chunk for chunk in mtmd.chunks("<__media__><__media__><__media__>", [*pictures, pictures[0]]) if chunk.nx]
    a, b, again = (chunk.embeddings for chunk in found)
    assert a is not None and b is not None and again is not None
    assert np.array_equal(a, again) and not np.allclose(a, b)
    assert [[name for name, _ in chunk.tensors] for chunk in found] == [["node_0"]] * 3  # patches, float16
    assert found[0].tensors[0][1].shape == (4, 4, 3 * PATCH * PATCH)


def test_a_prompt_without_its_picture_is_an_error(mtmd: Mtmd) -> None:
    with pytest.raises(ValueError, match=r"does not match number of bitmaps|exceeds number of bitmaps"):
        mtmd.chunks("<__media__>")


def test_a_missing_file_is_an_error(peer_bin: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"cannot load none\.gguf"):
        Mtmd(peer_bin, tmp_path / "none.gguf", make_gemma3(tmp_path / "text.gguf"))
