"""Sizes of a model's parts: they add up to the file and to what the engine asks of devices."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_models import make_gemma3, make_llama

from llamado.engine.forward.sizes import model_sizes, usual_weights
from llamado.gguf.reader import GGUFFile
from llamado.gguf.types import TensorType
from llamado.models import load_model


@pytest.mark.parametrize("tied", [False, True])
def test_parts_add_up_to_the_file(tmp_path: Path, tied: bool) -> None:
    with GGUFFile.open(make_llama(tmp_path / "m.gguf", n_layer=3, tied=tied, freq_factors=True)) as file:
        model = load_model(file)
        sizes = model_sizes(file, model, n_cells=256, max_batch=64, type_v=TensorType.F32)
        again = sizes.embedding if tied else 0  # the head's device needs the embedding's matrix, too
        shared = file.tensors["rope_freqs.weight"].nbytes
        assert sizes.weights + sizes.embedding + shared == file.nbytes + again
        assert sizes.n_layer == 3 and len(set(sizes.layers)) == 1
        cache = model.kv_tensors(256, TensorType.F16, TensorType.F32)
        assert sizes.kv == tuple(k.nbytes + v.nbytes for k, v in zip(cache.k, cache.v, strict=True))
        assert sizes.kv_read == sizes.kv
        assert (sizes.hidden, sizes.logits) == (4 * 128, 4 * 320)
        assert sizes.head_compute == 64 * sizes.logits and sizes.compute > 64 * (2 * 256 + sizes.hidden)
        assert sum(sizes.tensors.values()) == file.nbytes


def test_windows_read_less_of_the_cache(tmp_path: Path) -> None:
    with GGUFFile.open(make_gemma3(tmp_path / "g.gguf", n_layer=2, n_ctx=4096)) as file:
        sizes = model_sizes(file, load_model(file), n_cells=4096)
    windowed, whole = sizes.kv_read
    assert sizes.kv[0] == sizes.kv[1] and windowed * 1024 == whole * 32
    assert sizes.inputs == 2 * 2 * 1024 + 20  # two masks


def test_usual_weights_are_those_of_most_bytes(tmp_path: Path) -> None:
    path = make_llama(tmp_path / "m.gguf", n_embd=256, types={"ffn_": "Q8_0", "token": "F32"})
    with GGUFFile.open(path) as file:
        assert usual_weights(file, load_model(file)) == (TensorType.Q8_0, 256)
