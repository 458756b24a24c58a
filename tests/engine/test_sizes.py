"""Sizes of a model's parts: their sum equals the file, and what the engine allocates on devices."""

from __future__ import annotations

from pathlib import Path

import pytest
from lora_files import make_adapter
from minilm import make_bert
from tiny import TINY, make
from tiny_models import hold_experts, make_gemma3, make_llama

from llamado.engine.forward.device_rows import fingerprint
from llamado.engine.forward.sizes import model_sizes, usual_weights, weight_sizes
from llamado.ggml.role import ModelPart
from llamado.gguf.reader import GGUFFile
from llamado.gguf.types import TensorType
from llamado.models import load_adapters, load_model
from llamado.models.keys import FILE_ROPE, RopeOptions
from llamado.models.memory import MemoryOptions


@pytest.mark.parametrize("tied", [False, True])
def test_sizes_of_parts_add_up_to_the_file(tmp_path: Path, tied: bool) -> None:
    with GGUFFile.open(make_llama(tmp_path / "m.gguf", n_layer=3, tied=tied, freq_factors=True)) as file:
        model = load_model(file)
        sizes = model_sizes(file, model, MemoryOptions(n_cells=256, max_batch=64, type_v=TensorType.F32))
        again = sizes.embedding if tied else 0  # the head's device needs the embedding matrix, too
        shared = file.tensors["rope_freqs.weight"].nbytes
        assert sizes.weights + sizes.embedding + shared == file.nbytes + again
        assert sizes.n_layer == 3 and len(set(sizes.layers)) == 1
        cache = model.memory(MemoryOptions(n_cells=256, type_k=TensorType.F16, type_v=TensorType.F32))
        assert sizes.kv == tuple(map(cache.layer_bytes, range(3)))
        assert sizes.kv_read == sizes.kv
        assert (sizes.hidden, sizes.logits) == (4 * 128, 4 * 320)
        assert sizes.head_compute == 64 * sizes.logits and sizes.compute > 64 * (2 * 256 + sizes.hidden)
        assert sum(size.held for size in sizes.tensors.values()) == sizes.weights
        assert all(size.held == size.read for size in sizes.tensors.values())
        assert sizes.layers_read == sizes.layers
        assert sizes.embedding_read == file.tensors["token_embd.weight"].nbytes // 320  # one row


def test_windows_read_less_of_the_cache(tmp_path: Path) -> None:
    with GGUFFile.open(make_gemma3(tmp_path / "g.gguf", n_layer=2, n_ctx=4096)) as file:
        sizes = model_sizes(file, load_model(file), MemoryOptions(n_cells=4096))
        whole = model_sizes(file, load_model(file), MemoryOptions(n_cells=4096, whole=True))
    windowed, everything = sizes.kv_read
    assert windowed * 1024 == everything * 32
    assert sizes.inputs == 2 * 2 * 1024 + 20  # two masks
    assert whole.kv[0] == whole.kv[1] == sizes.kv[1] and sizes.kv[0] * 4096 == sizes.kv[1] * 1024 < whole.kv[0] * 4096
    assert sizes.compute < whole.compute  # a shorter mask


def test_usual_weight_type_has_the_most_bytes(tmp_path: Path) -> None:
    path = make_llama(tmp_path / "m.gguf", n_embd=256, types={"ffn_": "Q8_0", "token": "F32"})
    with GGUFFile.open(path) as file:
        assert usual_weights(file, load_model(file)) == (TensorType.Q8_0, 256)


def test_usual_weight_type_ignores_the_embedding(tmp_path: Path) -> None:
    """The size of the embedding does not matter, since no device reads it whole."""
    path = make_llama(tmp_path / "m.gguf", n_layer=1, n_vocab=4000, types={"token_embd": "F32", "output.": "F32"})
    with GGUFFile.open(path) as file:
        assert file.tensors["token_embd.weight"].nbytes * 2 > file.nbytes * 0.9
        assert usual_weights(file, load_model(file)) == (TensorType.Q4_0, 128)


def test_mixture_reads_only_active_experts(tmp_path: Path) -> None:
    """One matrix of each layer is declared to hold four experts: the same memory, but a quarter of it is read."""
    with GGUFFile.open(make_llama(tmp_path / "m.gguf", n_layer=2)) as file:
        model = load_model(file)
        plain = model_sizes(file, model, MemoryOptions(n_cells=256))
        hold_experts(model, "ffn_up", 4, 1)
        mixture = model_sizes(file, model, MemoryOptions(n_cells=256))
        unread = file.tensors["blk.0.ffn_up.weight"].nbytes * 3 // 4
    assert (mixture.layers, mixture.weights) == (plain.layers, plain.weights)
    assert mixture.layers_read == tuple(size - unread for size in plain.layers)


def test_tied_embedding_is_held_twice_and_read_as_the_head(tmp_path: Path) -> None:
    with GGUFFile.open(make_llama(tmp_path / "m.gguf", n_layer=1, tied=True)) as file:
        sizes = weight_sizes(file, load_model(file))
        table = file.tensors["token_embd.weight"].nbytes
    by_part = {role.part: size for role, size in sizes.items() if role.name != "output_norm.weight"}
    assert by_part[ModelPart.INPUT] == (table, table // 320)
    assert by_part[ModelPart.OUTPUT] == (table, table)


def test_encoder_classifier_counts_as_the_head(tmp_path: Path) -> None:
    with GGUFFile.open(make_bert(tmp_path / "b.gguf", n_layer=2, n_scores=1)) as file:
        sizes = model_sizes(file, load_model(file), MemoryOptions(n_cells=256))
        head = sum(tensor.nbytes for name, tensor in file.tensors.items() if name.startswith("cls"))
        whole = file.nbytes
    assert sizes.head == head > 0
    assert sizes.weights + sizes.embedding == whole


def test_sizes_include_adapters(tmp_path: Path) -> None:
    path = make_llama(tmp_path / "m.gguf", n_layer=1)
    adapter_path = make_adapter(tmp_path / "l.gguf", path, weights=("token_embd.weight",))
    with GGUFFile.open(path) as file:
        model = load_model(file)
        plain = weight_sizes(file, model)
        (adapter,) = load_adapters(model, [adapter_path])
        added = weight_sizes(file, model)
        adapter.file.close()
    for name, (role,) in model.roles.items():
        held, read = plain[role]
        if name in adapter.pairs:
            a, b = adapter.pairs[name]
            held += a.nbytes + b.nbytes
            read += b.nbytes + (a.nb[1] if name == "token_embd.weight" else a.nbytes)
        assert added[role] == (held, read)


@pytest.mark.parametrize(
    ("changed", "same"), [("output.weight", True), ("output_norm.weight", True), ("blk.1.attn_k.weight", False),
                          ("token_embd.weight", False), ("rope_freqs.weight", False)]
)  # fmt: skip
def test_fingerprint_depends_on_weights_that_affect_cells(tmp_path: Path, changed: str, same: bool) -> None:
    path = make_llama(tmp_path / "m.gguf", freq_factors=True)
    before = _fingerprint(path)
    with GGUFFile.open(path) as file:
        at = file.tensors[changed].offset
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)
    assert (_fingerprint(path) == before) is same


def test_fingerprint_depends_on_a_tied_embedding(tmp_path: Path) -> None:
    tied = [make_llama(tmp_path / f"{seed}.gguf", tied=True, n_layer=1, seed=seed) for seed in (0, 1)]
    assert _fingerprint(tied[0]) != _fingerprint(tied[1])
    data, other = bytearray(tied[0].read_bytes()), tied[1].read_bytes()
    with GGUFFile.open(tied[0]) as file:
        info = file.tensors["token_embd.weight"]
    data[info.offset : info.offset + info.nbytes] = other[info.offset : info.offset + info.nbytes]
    before = _fingerprint(tied[0])
    tied[0].write_bytes(data)
    assert _fingerprint(tied[0]) != before


def test_fingerprint_depends_on_rope_scaling(tmp_path: Path) -> None:
    longrope, plain = (make(TINY[name], tmp_path / name) for name in ("llama-longrope", "llama"))
    limit = TINY["llama-longrope"].keys["rope.scaling.original_context_length"]
    assert _fingerprint(longrope, limit) == _fingerprint(longrope, limit - 1) != _fingerprint(longrope, limit + 1)
    assert _fingerprint(plain, limit) == _fingerprint(plain, 1 << 20)
    assert _fingerprint(plain, rope=RopeOptions(freq_base=5e4)) != _fingerprint(plain)


@pytest.mark.parametrize(("type", "same"), [(TensorType.Q8_0, False), (TensorType.F16, True)])
def test_fingerprint_depends_on_rotation_of_quantized_cells(tmp_path: Path, type: TensorType, same: bool) -> None:
    path = make_llama(tmp_path / "m.gguf", n_head=2)
    assert (_fingerprint(path, type=type, rotated=False) == _fingerprint(path, type=type)) is same


def _fingerprint(
    path: Path,
    n_ctx: int = 512,
    rope: RopeOptions = FILE_ROPE,
    type: TensorType = TensorType.F16,
    rotated: bool = True,
) -> bytes:
    with GGUFFile.open(path) as file:
        model = load_model(file, rope)
        options = MemoryOptions(n_cells=256, type_k=type, type_v=type, n_ctx=n_ctx, rotated=rotated)
        return fingerprint(file, model, model.memory(options))
