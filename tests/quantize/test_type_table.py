"""Types of all tensors in each kind of file, as digests; tests/interop/test_quantize.py compares with llama-quantize.

`PYTHONPATH=tests python tests/quantize/test_type_table.py` prints the digests anew.
"""

from __future__ import annotations

import hashlib

import pytest

from llamado.gguf.types import TensorType as T
from llamado.quantize.errors import QuantizeError
from llamado.quantize.file_types import FILE_TYPES, FileType, find_file_type
from llamado.quantize.mixture import ModelShape, TypeMixture, TypeOptions, needs_imatrix

SHAPES = {
    "plain": ModelShape("llama", 16, 8, 8, 0),
    "tied": ModelShape("llama", 9, 8, 4, 0),
    "grouped": ModelShape("llama", 18, 8, 2, 0),
    "70b": ModelShape("llama", 80, 64, 8, 0),
    "80 layers": ModelShape("llama", 80, 40, 40, 0),
    "72b": ModelShape("qwen2", 80, 64, 64, 0),
    "falcon": ModelShape("falcon", 32, 64, 8, 0),
    "8 experts": ModelShape("llama", 32, 32, 8, 8),
    "4 experts": ModelShape("qwen2moe", 16, 16, 16, 4),
    "60 experts": ModelShape("bailingmoe3", 8, 16, 16, 60),
    "narrow": ModelShape("llama", 8, 8, 8, 0),
    "no heads": ModelShape("glm5-next", 8, 0, 0, 0),
}

DIGESTS = {
    "Q1_0": "9ad1c9d854e9", "Q2_0": "074b23ba4ea1", "Q4_0": "f312d3eae067", "Q4_1": "e19132d78c29",
    "MXFP4_MOE": "ea6bbc0fc42f", "Q5_0": "0dd7c66c874b", "Q5_1": "c5a3b1523bb5", "IQ2_XXS": "cea53ba6df48",
    "IQ2_XS": "06b2ae3b3f4c", "IQ2_S": "8b1af32093ba", "IQ2_M": "55f493ee6102", "IQ1_S": "4251e81ab9c0",
    "IQ1_M": "52d383db647f", "TQ1_0": "05cede07c78b", "TQ2_0": "4b470662c3ef", "Q2_K": "8e803f7414e6",
    "Q2_K_S": "76fae97e7c88", "IQ3_XXS": "873aae81831b", "IQ3_S": "7782adbeb035", "IQ3_M": "f843154764c1",
    "Q3_K": "80c95a5f3ae8", "IQ3_XS": "afe6b0ea0e82", "Q3_K_S": "573e6e49c8b5", "Q3_K_M": "80c95a5f3ae8",
    "Q3_K_L": "b001dbb3f8d2", "IQ4_NL": "3a3bf5aceafb", "IQ4_XS": "7d15d4dac8fa", "Q4_K": "04923cb0e297",
    "Q4_K_S": "2ed26ace5833", "Q4_K_M": "04923cb0e297", "Q5_K": "c854b10cb03c", "Q5_K_S": "5730f473e317",
    "Q5_K_M": "c854b10cb03c", "Q6_K": "971edcd2202c", "Q8_0": "238786dd7308", "F16": "5abe65487016",
    "BF16": "5c44ddfe3fd6", "F32": "fa4573bcc3b2",
}  # fmt: skip


def tensors(shape: str) -> dict[str, tuple[int, ...]]:
    """Return names and sizes of a model's matrices. Layers are in the files' order, so that 10 follows 9."""
    n, experts = (96 if shape == "narrow" else 256), SHAPES[shape].n_experts
    found: dict[str, tuple[int, ...]] = {"token_embd.weight": (n, 512, 1, 1)}
    if shape != "tied":
        found["output.weight"] = (n, 512, 1, 1)
    attention = ["attn_k", "attn_output", "attn_q", "attn_v"]
    if shape == "falcon":
        attention = ["attn_output", "attn_qkv"]
    elif shape == "no heads":
        attention += ["attn_kv_a_mqa", "attn_kv_b", "attn_q_a", "attn_q_b", "nextn.eh_proj", "indexer.proj", "ssm_f_a"]
    matrices = ("down", "gate", "up")
    if SHAPES[shape].n_layers == 80:  # the number of layers affects one tensor
        attention, matrices = ["attn_v"], ()
    kind = "_exps" if experts else ""
    for layer in range(SHAPES[shape].n_layers):
        for part in attention:
            found[f"blk.{layer}.{part}.weight"] = (n, n, 1, 1)
        for part in matrices:
            found[f"blk.{layer}.ffn_{part}{kind}.weight"] = (n, 512, experts or 1, 1)
    return found


def table(kind: FileType) -> str:
    """Return the digest of the types of all tensors of all shapes, with and without an importance matrix."""
    lines = []
    for shape, properties in SHAPES.items():
        names = tensors(shape)
        for has_imatrix in (False, True):
            mixture = TypeMixture(kind, properties, TypeOptions(), list(names), has_imatrix)
            for name, ne in names.items():
                type_ = "-"
                if mixture.is_quantized(name, 3 if ne[2] > 1 else 2):
                    try:
                        type_ = mixture.type_of(name, ne).name
                    except QuantizeError as error:
                        type_ = type(error).__name__
                lines.append(f"{shape} {has_imatrix} {name} {type_}")
            lines.append(f"{shape} {has_imatrix} {mixture.fallbacks}")
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:12]


@pytest.mark.parametrize("kind", FILE_TYPES, ids=lambda kind: kind.name)
def test_the_types_of_all_tensors(kind: FileType) -> None:
    assert table(kind) == DIGESTS[kind.name]


def test_useless_tensors_need_an_importance_matrix() -> None:
    kinds = {name: find_file_type(name) for name in ("Q2_K", "Q2_K_S", "IQ3_XXS")}
    weight = "blk.0.ffn_up.weight"
    few = {type_.name for type_ in T if needs_imatrix(weight, type_, kinds["Q2_K"])}  # type: ignore[arg-type]
    assert few == {"IQ3_XXS", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ1_M", "IQ1_S"}
    assert needs_imatrix(weight, T.Q2_K, kinds["Q2_K_S"])  # type: ignore[arg-type]
    for name in ("output.weight", "token_embd.weight", "per_layer_token_embd.weight"):
        assert not needs_imatrix(name, T.IQ3_XXS, kinds["IQ3_XXS"])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "n_dims", "is_quantized"),
    [
        ("blk.0.attn_q.weight", 2, True),
        ("blk.0.attn_q.weight", 1, False),
        ("blk.0.attn_q.bias", 2, False),
        ("output.weight", 2, False),
        ("position_embd.weight", 2, False),
        ("token_types.weight", 2, False),
        ("blk.0.ffn_gate_inp.weight", 2, False),
        ("blk.0.attn_rel_b.weight", 2, False),
        ("blk.0.time_mix_w1.weight", 2, False),
    ],
)
def test_small_and_sensitive_tensors_stay(name: str, n_dims: int, is_quantized: bool) -> None:
    kind = FILE_TYPES[0]
    mixture = TypeMixture(kind, SHAPES["plain"], TypeOptions(keep_output=True), [name], has_imatrix=False)
    assert mixture.is_quantized(name, n_dims) is is_quantized


def test_a_layer_that_the_model_does_not_have_is_an_error() -> None:
    kind = find_file_type("Q4_K_M")
    assert kind is not None
    for name in ("ffn_down_exps.weight", "blk.32.ffn_down_exps.weight"):
        mixture = TypeMixture(kind, SHAPES["8 experts"], TypeOptions(), [name], has_imatrix=False)
        with pytest.raises(QuantizeError, match="none of the 32 layers"):
            mixture.type_of(name, (256, 256, 8, 1))


if __name__ == "__main__":
    for one in FILE_TYPES:
        print(f'    "{one.name}": "{table(one)}",')
