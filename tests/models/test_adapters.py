"""LoRA adapters: reading their files, and their effect compared with models whose weights include them."""

from __future__ import annotations

import random
import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type
from gguf.quants import dequantize
from lora_files import make_adapter
from reference import ReferenceModel
from tiny import TINY, make
from tiny_models import make_gemma3, make_llama

from llamado.errors import LlamadoError
from llamado.gguf.errors import GgufError
from llamado.gguf.reader import GGUFFile
from llamado.models import BatchShape, InvalidAdapter, load_adapters, load_model
from llamado.models.memory import MemoryOptions

Array = np.ndarray[Any, Any]
LAYER = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
TOKENS = [1 + i * 37 % 250 for i in range(12)]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    return make_llama(folder / "m.gguf", n_embd=64, n_ff=96, n_vocab=300, wtype="F32", biases=True)


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("tied") / "m.gguf", n_embd=64, n_ff=96, wtype="F32", tied=True)


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_gemma3(tmp_path_factory.mktemp("gemma") / "m.gguf", n_embd=64, n_ff=96, wtype="F32", softcap=20.0)


def values(file: GGUFFile, name: str) -> Array:
    info = file.tensors[name]
    rows = dequantize(file.data(name).reshape(info.ne[1] * info.ne[2], -1), Type[info.type.name]).astype(np.float64)
    return rows.reshape(info.ne[2], info.ne[1], -1) if info.ne[2] > 1 else rows


def merged(path: Path, model: Path, adapters: Sequence[Path], scales: Sequence[float]) -> Path:
    """Write a copy of an F32 model with the adapters added to its weights."""
    shutil.copy(model, path)
    sums: dict[str, Array] = {}
    with GGUFFile.open(model) as file:
        for adapter, scale in zip(adapters, scales, strict=True):
            with GGUFFile.open(adapter) as added:
                alpha = added.metadata.float_("adapter.lora.alpha", 0.0)
                for name in {name.rpartition(".lora_")[0] for name in added.tensors}:
                    a, b = values(added, f"{name}.lora_a"), values(added, f"{name}.lora_b")
                    strength = scale * alpha / b.shape[-1] if alpha else scale
                    product = a @ b.T if name == "token_embd.weight" else b @ a
                    sums[name] = sums.get(name, values(file, name)) + strength * product
        offsets = {name: file.tensors[name].offset for name in sums}
    with open(path, "r+b") as out:
        for name, total in sums.items():
            out.seek(offsets[name])
            out.write(total.astype("<f4").tobytes())
    return path


def check(tmp_path: Path, model: Path, adapters: Sequence[Path], scales: tuple[float, ...]) -> None:
    found = ReferenceModel(model, adapters=adapters).logits(TOKENS, scales=scales, outputs=range(12))
    right = ReferenceModel(merged(tmp_path / "merged.gguf", model, adapters, scales)).logits(TOKENS, outputs=range(12))
    plain = ReferenceModel(model).logits(TOKENS, outputs=range(12))
    assert np.abs(plain - right).max() > 0.1 * right.std(), "the adapters do nothing"
    # The cache holds float16.
    assert np.abs(found - right).max() < 2e-3 * right.std()


@pytest.mark.slow
@pytest.mark.parametrize("scales", [(1.0, 0.0), (0.5, 0.0), (0.0, -2.0), (1.0, 0.5)], ids=str)
@pytest.mark.parametrize("name", ["llama", "gemma"])
def test_adapters_equal_merged_weights(
    tmp_path: Path, request: pytest.FixtureRequest, name: str, scales: tuple[float, float]
) -> None:
    model = request.getfixturevalue(name)
    first = make_adapter(tmp_path / "a.gguf", model, parts=LAYER, size=0.3)
    second = make_adapter(tmp_path / "b.gguf", model, parts=("attn_q", "ffn_up"), rank=3, alpha=None, seed=1)
    check(tmp_path, model, [first, second], scales)


def test_adapters_of_experts(tmp_path: Path) -> None:
    """Each expert has its own pair of matrices."""
    model = make(TINY["qwen3moe"], tmp_path / "m.gguf")
    adapter = make_adapter(tmp_path / "a.gguf", model, parts=("ffn_up_exps", "ffn_down_exps", "attn_q"), size=0.3)
    check(tmp_path, model, [adapter], (0.5,))


@pytest.mark.parametrize("weight", ["token_embd.weight", "output.weight"])
def test_adapters_of_embedding_and_output_matrix(tmp_path: Path, llama: Path, weight: str) -> None:
    adapter = make_adapter(tmp_path / "a.gguf", llama, parts=(), weights=(weight,), size=0.3)
    check(tmp_path, llama, [adapter], (1.0,))


@pytest.mark.parametrize("type", ["F16", "BF16", "Q8_0", "MXFP4"])
def test_types_of_adapters(tmp_path: Path, llama: Path, type: str) -> None:
    adapter = make_adapter(tmp_path / "a.gguf", llama, type=type, rank=32, size=0.3)
    check(tmp_path, llama, [adapter], (1.0,))


def test_the_operations_of_an_adapter(tmp_path: Path, llama: Path) -> None:
    """An adapter adds two products, a scale and a sum; with scale 0 it adds nothing."""
    paths = [make_adapter(tmp_path / f"{i}.gguf", llama, parts=("attn_q",), seed=i) for i in range(2)]
    with GGUFFile.open(llama) as file:
        model = load_model(file)
        adapters = load_adapters(model, paths)
        kv = model.memory(MemoryOptions(n_cells=256))

        def ops(*scales: float) -> list[str]:
            return [node.op.name for node in model.build(BatchShape(2, 1, 256, scales=scales), kv).nodes]

        assert ops() == ops(0.0) == ops(0.0, 0.0)
        one, both = ops(0.0, 1.0), ops(1.0, 1.0)
        added = ["MUL_MAT", "MUL_MAT", "SCALE", "ADD"]
        at = one.index("SCALE") - 2
        assert one[at : at + 4] == added and one == [*ops()[:at], *added, *one[at + 4 :]]
        assert both[at : at + 8] == 2 * added and len(both) == len(ops()) + 16
        # scale × alpha / rank, in float32
        assert adapters[0].strength("blk.0.attn_q.weight", 0.1) == float(np.float32(0.1) * np.float32(16) / 8)
        names = [tensor.name for adapter in adapters for tensor in adapter.tensors]
        assert len(set(names)) == len(names) and all(len(name) < 64 for name in names)
        for adapter in adapters:
            adapter.file.close()


# --- invalid files ----------------------------------------------------------------------------------------------------


def with_tensor(name: str, *shape: int) -> Callable[[gguf.GGUFWriter], None]:
    return lambda writer: writer.add_tensor(name, np.zeros(shape, np.float32))


A, B = "blk.0.attn_q.weight.lora_a", "blk.0.attn_q.weight.lora_b"
Options = dict[str, Any]
WRONG: dict[str, tuple[Options, str]] = {
    "architecture": ({"architecture": "gemma3"}, "'general.architecture' is 'gemma3'; 'llama' is expected"),
    "nothing": ({"parts": ()}, "no tensor"),
    "suffix": ({"edit": with_tensor("blk.0.attn_q.weight", 2, 2)}, "'blk.0.attn_q.weight' is not part of a LoRA"),
    "lonely a": ({"parts": (), "edit": with_tensor(A, 8, 64)}, f"'{B}' is missing"),
    "lonely b": ({"parts": (), "edit": with_tensor(B, 64, 8)}, f"'{A}' is missing"),
    "unknown weight": ({"edit": lambda w: (with_tensor("blk.7.x.weight.lora_a", 8, 64)(w),
                                           with_tensor("blk.7.x.weight.lora_b", 64, 8)(w))}, "another model"),
    "a norm": ({"edit": lambda w: (with_tensor("blk.0.attn_norm.weight.lora_a", 8, 64)(w),
                                   with_tensor("blk.0.attn_norm.weight.lora_b", 1, 8)(w))}, "nothing is multiplied"),
    "columns": ({"parts": (), "edit": lambda w: (with_tensor(A, 8, 65)(w), with_tensor(B, 64, 8)(w))},
                rf"'{A}' has shape \[65, 8\]; \[64, 8\] is expected for a weight of shape \[64, 64\]"),
    "rows": ({"parts": (), "edit": lambda w: (with_tensor(A, 8, 64)(w), with_tensor(B, 63, 8)(w))},
             rf"'{B}' has shape \[8, 63\]; \[8, 64\] is expected"),
    "ranks": ({"parts": (), "edit": lambda w: (with_tensor(A, 8, 64)(w), with_tensor(B, 64, 9)(w))},
              rf"'{B}' has shape \[9, 64\]; \[8, 64\] is expected"),
    "dimensions": ({"parts": (), "edit": lambda w: (with_tensor(A, 2, 8, 64)(w), with_tensor(B, 64, 8)(w))},
                   rf"'{A}' has shape \[64, 8, 2\]"),
    "alpha": ({"alpha": float("nan")}, "alpha' is nan"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_files_that_do_not_fit_are_rejected(tmp_path: Path, llama: Path, case: str) -> None:
    options, message = WRONG[case]
    path = make_adapter(tmp_path / "wrong.gguf", llama, **options)
    with GGUFFile.open(llama) as file:
        model = load_model(file)
        with pytest.raises(InvalidAdapter, match=message) as found:
            load_adapters(model, [path])
        assert str(found.value).startswith(str(path)) and model.adapters == ()


def test_a_model_is_rejected_as_an_adapter(llama: Path) -> None:
    with GGUFFile.open(llama) as file, pytest.raises(InvalidAdapter, match=r"'general.type' .*is expected"):
        load_adapters(load_model(file), [llama])


def test_a_missing_file_is_named(tmp_path: Path, llama: Path) -> None:
    with GGUFFile.open(llama) as file, pytest.raises(GgufError, match=re.escape("none.gguf")):
        load_adapters(load_model(file), [tmp_path / "none.gguf"])


def test_an_adapter_of_a_tied_embedding_is_rejected(tmp_path: Path, tied: Path) -> None:
    path = make_adapter(tmp_path / "a.gguf", tied, weights=("token_embd.weight",))
    with GGUFFile.open(tied) as file, pytest.raises(InvalidAdapter, match="is also the output matrix"):
        load_adapters(load_model(file), [path])


def test_norms_in_an_adapter_are_ignored(tmp_path: Path, llama: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Some adapters contain norms; llama.cpp ignores them too."""
    path = make_adapter(tmp_path / "a.gguf", llama, edit=with_tensor("blk.0.attn_norm.weight", 64))
    with GGUFFile.open(llama) as file:
        (adapter,) = load_adapters(load_model(file), [path])
        assert len(adapter.pairs) == 6 and "blk.0.attn_norm.weight" in caplog.text
        adapter.file.close()


@pytest.mark.slow
def test_damaged_files_raise_named_errors(tmp_path: Path, llama: Path) -> None:
    """Random damage gives a valid adapter or an error that names the file."""
    rng = random.Random(5)
    whole = make_adapter(tmp_path / "a.gguf", llama).read_bytes()
    path = tmp_path / "damaged.gguf"
    refused = 0
    with GGUFFile.open(llama) as file:
        model = load_model(file)
        head = whole.index(b"blk.1.ffn_down.weight.lora_b") + 60
        for _ in range(300):
            data = bytearray(whole)
            for _ in range(rng.randint(1, 3)):
                data[rng.randrange(head)] = rng.randrange(256)
            if rng.random() < 0.1:
                del data[rng.randrange(len(data)) :]
            path.write_bytes(data)
            try:
                for adapter in load_adapters(model, [path]):
                    adapter.file.close()
            except LlamadoError as error:
                refused += 1
                assert "damaged.gguf" in str(error)
    assert refused > 100
