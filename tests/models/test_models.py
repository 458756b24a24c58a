"""Hyper-parameters, weights and forward passes of the architectures."""

from __future__ import annotations

import math
import struct
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
from reference import ReferenceModel
from tiny import TINY, make
from tiny_models import make_gemma3, make_llama

from llamado.errors import LlamadoError
from llamado.ggml import Op, RopeMode
from llamado.ggml.tensor import Tensor
from llamado.gguf.header import Header, TensorInfo
from llamado.gguf.metadata import Metadata, StringArray, Value
from llamado.gguf.reader import GGUFFile
from llamado.gguf.types import TensorType as T
from llamado.models import BatchShape, InvalidModel, Model, UnsupportedModel, load_model
from llamado.models.hparams import Gating
from llamado.models.keys import FILE_ROPE, RopeOptions
from llamado.models.memory import MemoryOptions

Array = np.ndarray[Any, Any]
MAKERS = [make_llama, make_gemma3]


def load(path: Path, rope: RopeOptions = FILE_ROPE) -> Model:
    with GGUFFile.open(path) as file:
        return load_model(file, rope)


def load_changed(
    path: Path,
    values: Mapping[str, Value] = MappingProxyType({}),
    *,
    without: Sequence[str] = (),
    tensors: Mapping[str, tuple[int, ...]] = MappingProxyType({}),
    rope: RopeOptions = FILE_ROPE,
) -> Model:
    """Load a model from a file's header with other metadata and tensors, and without those named."""
    with GGUFFile.open(path) as file:
        header = file.header
    added = {n: TensorInfo(n, T.F32, (*ne, 1, 1, 1)[:4], 0, 4 * math.prod(ne), 0) for n, ne in tensors.items()}
    metadata = {key: value for key, value in {**header.metadata, **values}.items() if key not in without}
    table = {name: info for name, info in {**header.tensors, **added}.items() if name not in without}
    return load_model(replace(header, metadata=Metadata(metadata), tensors=table), rope)


# --- hyper-parameters -------------------------------------------------------------------------------------------------


def test_hparams_of_smollm2(smollm2_path: Path) -> None:
    hp = load(smollm2_path).hparams
    assert (hp.n_layer, hp.n_embd, hp.n_head[0], hp.n_head_kv[0], hp.head_dim_k) == (30, 576, 9, 3, 64)
    assert (hp.n_ff[0], hp.n_vocab, hp.n_ctx_train, hp.n_swa) == (1536, 49152, 8192, 0)
    assert (hp.rope.mode, hp.rope.n_dims, hp.rope.freq_base) == (RopeMode.NORMAL, 64, 100000.0)
    assert (hp.attention_scale, hp.embedding_scale) == (0.125, 1.0)


def test_hparams_of_gemma3(gemma3_path: Path) -> None:
    hp = load(gemma3_path).hparams
    assert (hp.n_layer, hp.n_embd, hp.n_head[0], hp.n_head_kv[0], hp.head_dim_k) == (18, 640, 4, 1, 256)
    assert (hp.n_swa, [i for i in range(18) if not hp.is_swa(i)]) == (512, [5, 11, 17])
    assert (hp.rope.mode, hp.rope.freq_base) == (RopeMode.NEOX, 1e6)
    assert hp.rope_swa is not None and (hp.rope_swa.freq_base, hp.rope_swa.freq_scale) == (1e4, 1.0)
    assert (hp.attention_scale, hp.embedding_scale) == (0.0625, float(np.float32(np.sqrt(640))))


def test_a_tied_output_matrix_is_the_embedding(tmp_path: Path) -> None:
    shape = BatchShape(1, 1, 256)
    for tied in (True, False):
        model = load(make_llama(tmp_path / "model.gguf", tied=tied))
        head = model.build(shape, model.memory(MemoryOptions(n_cells=256))).outputs["logits"].src[0]
        assert head is model.weights["token_embd.weight" if tied else "output.weight"]


ROPE = {
    # key of the file, or option of the user: (value, index in ROPE's op_params, parameter)
    "rope.scaling.original_context_length": (333, 4, 333),
    "rope.freq_base": (7777.0, 5, 7777.0),
    "rope.scaling.factor": (8.0, 6, 0.125),
    "rope.scaling.attn_factor": (1.5, 8, 1.5),
    "n_ctx_orig": (333, 4, 333),
    "freq_base": (7777.0, 5, 7777.0),
    "freq_scale": (0.125, 6, 0.125),
    "ext_factor": (0.5, 7, 0.5),
    "beta_fast": (16.0, 9, 16.0),
    "beta_slow": (2.0, 10, 2.0),
}


def ropes(model: Model) -> list[tuple[int | float, ...]]:
    """Return the op_params of all rotations, <5 i32, 6 f32>: queries and keys of each layer."""
    graph = model.build(BatchShape(1, 1, 256), model.memory(MemoryOptions(n_cells=256)))
    return [struct.unpack_from("<5i6f", node.op_params) for node in graph.nodes if node.op == Op.ROPE]


@pytest.mark.parametrize("key", ROPE)
def test_each_yarn_value_sets_one_parameter_of_rope(tmp_path: Path, key: str) -> None:
    value, place, found = ROPE[key]
    plain = make_llama(tmp_path / "a.gguf", rope_scaling=("yarn", 4.0))
    of_file = key.startswith("rope.")
    changed = load_changed(plain, {f"llama.{key}": value}) if of_file else load(plain, RopeOptions(**{key: value}))
    before, after = ropes(load(plain)), ropes(changed)
    assert len(before) == len(after) == 4
    for old, new in zip(before, after, strict=True):
        assert new[place] == found != old[place]
        assert [i for i in range(11) if new[i] != old[i]] == [place]


@pytest.mark.parametrize("name", ["ext_factor", "attn_factor", "beta_fast", "beta_slow"])
def test_yarn_keys_that_llama_cpp_ignores_have_no_effect(tmp_path: Path, name: str) -> None:
    plain = make_llama(tmp_path / "a.gguf", rope_scaling=("yarn", 4.0))
    assert ropes(load_changed(plain, {f"llama.rope.scaling.yarn_{name}": 0.25})) == ropes(load(plain))


@pytest.mark.parametrize(
    ("scaling", "options", "expected"),
    [
        ("linear", FILE_ROPE, (0.25, 0.0, 1.0)),
        ("yarn", FILE_ROPE, (0.25, 1.0, 1.0)),
        ("none", FILE_ROPE, (1.0, 0.0, 1.0)),
        ("yarn", RopeOptions(ext_factor=0.0), (0.25, 0.0, 1.0)),  # plain interpolation
        ("yarn", RopeOptions(ext_factor=-1.0), (0.25, 1.0, 1.0)),  # not given, as in llama.cpp
        ("yarn", RopeOptions("none", freq_scale=0.5), (1.0, 0.0, 1.0)),
    ],
)
def test_rope_scaling(tmp_path: Path, scaling: str, options: RopeOptions, expected: tuple[float, ...]) -> None:
    """Frequency scale, ext_factor and attn_factor."""
    path = make_llama(tmp_path / "m.gguf", rope_scaling=(scaling, 4.0))
    assert {rope[6:9] for rope in ropes(load(path, options))} == {expected}


def test_attention_factors_of_user_and_file_multiply(tmp_path: Path) -> None:
    """llama-context.cpp multiplies the user's factor by the model's `rope_attn_factor`, but not with YaRN."""
    plain = make_llama(tmp_path / "a.gguf")
    assert {rope[8] for rope in ropes(load(plain))} == {1.0}
    changed = {"llama.rope.scaling.attn_factor": 3.0}
    assert {rope[8] for rope in ropes(load_changed(plain, changed, rope=RopeOptions(attn_factor=0.5)))} == {1.5}
    yarn = RopeOptions("yarn", attn_factor=0.5)
    assert {rope[8] for rope in ropes(load_changed(plain, changed, rope=yarn))} == {3.0}


def test_a_user_s_yarn_scale_changes_the_training_context(tmp_path: Path) -> None:
    plain = make_llama(tmp_path / "a.gguf", n_ctx=512)
    for options, n_ctx in (
        (RopeOptions("yarn", freq_scale=0.25), 2048),
        (RopeOptions("yarn", freq_scale=0.25, n_ctx_orig=100), 400),
        (RopeOptions("yarn"), 512),  # no scale
        (RopeOptions("linear", freq_scale=0.25), 512),
    ):
        assert load(plain, options).hparams.n_ctx_train == n_ctx
    stretched = make_llama(tmp_path / "b.gguf", n_ctx=512, rope_scaling=("yarn", 4.0))
    assert load(stretched).hparams.n_ctx_train == 512
    assert load(stretched, RopeOptions(freq_scale=0.25)).hparams.n_ctx_train == 512


@pytest.mark.parametrize("name", ["gemma2", "gemma3"])
def test_window_layers_keep_the_file_s_base_and_scale(tmp_path: Path, name: str) -> None:
    """The user's values apply to other layers only (llama_model::get_rope_freq_base)."""
    path = make(TINY[name], tmp_path / "a.gguf")
    options = RopeOptions(freq_base=7777.0, freq_scale=0.5, ext_factor=0.25)
    hp, plain = load(path, options).hparams, load(path).hparams
    assert hp.rope_swa is not None and plain.rope_swa is not None
    assert (hp.rope.freq_base, hp.rope.freq_scale, hp.rope.ext_factor) == (7777.0, 0.5, 0.25)
    assert (hp.rope_swa.freq_base, hp.rope_swa.freq_scale) == (plain.rope_swa.freq_base, plain.rope_swa.freq_scale)
    assert hp.rope_swa.ext_factor == 0.25


@pytest.mark.parametrize(
    "options",
    [
        RopeOptions(freq_base=1.0),
        RopeOptions(freq_scale=1e-9),
        RopeOptions(n_ctx_orig=-5),
        RopeOptions(ext_factor=math.inf),
        RopeOptions(attn_factor=0.0),
        RopeOptions(beta_slow=0.0),
        RopeOptions(beta_fast=math.nan),
    ],
)
def test_invalid_rope_options_are_rejected(tmp_path: Path, options: RopeOptions) -> None:
    with pytest.raises(InvalidModel, match=r"rotary embedding: .* expected"):
        load(make_llama(tmp_path / "a.gguf"), options)


@pytest.mark.parametrize("name", ["llama-longrope", "phi3-longrope"])
def test_longrope_factors_depend_on_the_context_of_a_sequence(tmp_path: Path, name: str) -> None:
    model = load(make(TINY[name], tmp_path / "a.gguf"))
    short, long = (model.weights[f"rope_factors_{which}.weight"] for which in ("short", "long"))
    limit = TINY[name].keys["rope.scaling.original_context_length"]
    for n_ctx, expected in ((limit - 1, short), (limit, short), (limit + 1, long), (0, long)):
        graph = model.build(BatchShape(1, 1, 256), model.memory(MemoryOptions(n_cells=1024, n_ctx=n_ctx)))
        factors = [node.src[2] for node in graph.nodes if node.op == Op.ROPE]
        assert factors == [expected] * (2 * model.hparams.n_layer)
    assert {rope[6:9] for rope in ropes(model)} == {(1.0, 0.0, np.float32(1.19))}


def test_gemma3_scales_the_rope_of_global_layers_only(tmp_path: Path) -> None:
    scaling = {"gemma3.rope.scaling.type": "linear", "gemma3.rope.scaling.factor": 8.0}
    model = load_changed(make_gemma3(tmp_path / "a.gguf", n_layer=4, swa_period=2), scaling)
    assert [model.hparams.is_swa(i) for i in range(4)] == [True, False, True, False]
    window, whole = (10000.0, 1.0), (1000000.0, 0.125)
    assert [rope[5:7] for rope in ropes(model)] == [window, window, whole, whole] * 2


@pytest.mark.parametrize(("n_layer", "width"), [(2, 16), (61, 16), (62, 8), (63, 16)])
def test_gemma3_27b_scales_queries_by_width_per_head(tmp_path: Path, n_layer: int, width: int) -> None:
    """Its heads have 128 elements, but width / heads is 168 (gemma/config.py, 27b-v3)."""
    path = make_gemma3(tmp_path / "m.gguf", n_layer=n_layer, n_embd=32, n_head=4, head_dim=16, n_ff=32, wtype="F16")
    model = load(path)
    expected = float(np.float32(1) / np.sqrt(np.float32(width)))
    assert model.hparams.attention_scale == expected
    graph = model.build(BatchShape(1, 1, 256), model.memory(MemoryOptions(n_cells=256)))
    attended = [node.src[0] for node in graph.nodes if node.op == Op.FLASH_ATTN_EXT]
    assert len(attended) == n_layer
    scales = {struct.unpack_from("<f", node.op_params)[0] for node in graph.nodes if node.op == Op.SCALE}
    assert np.float32(expected) in {np.float32(s) for s in scales}
    # The queries are scaled, so the factor of attention is 1.
    assert {struct.unpack_from("<f", n.op_params)[0] for n in graph.nodes if n.op == Op.FLASH_ATTN_EXT} == {1.0}


def test_frequency_factors_apply_to_queries_and_keys(tmp_path: Path) -> None:
    model = load(make_llama(tmp_path / "m.gguf", freq_factors=True))
    graph = model.build(BatchShape(1, 1, 256), model.memory(MemoryOptions(n_cells=256)))
    ropes = [node for node in graph.nodes if node.op == Op.ROPE]
    assert len(ropes) == 4
    assert all(node.src[2] is model.weights["rope_freqs.weight"] for node in ropes)


def test_sizes_may_differ_by_layer(tmp_path: Path) -> None:
    """Arrays instead of numbers, with equal elements here."""
    plain = make_llama(tmp_path / "a.gguf")
    arrays = {"llama.attention.head_count_kv": np.array([2, 2]), "llama.feed_forward_length": np.array([256, 256])}
    assert load_changed(plain, arrays).hparams == load(plain).hparams


def test_the_sliding_window_pattern_may_be_a_list(tmp_path: Path) -> None:
    pattern = {"gemma3.attention.sliding_window_pattern": np.array([False, True])}
    assert load_changed(make_gemma3(tmp_path / "a.gguf"), pattern).hparams.swa_layers == (False, True)


def test_gemma3_without_a_window_has_one_mask(tmp_path: Path) -> None:
    model = load_changed(make_gemma3(tmp_path / "a.gguf"), {"gemma3.attention.sliding_window": 0})
    graph = model.build(BatchShape(1, 1, 256), model.memory(MemoryOptions(n_cells=256)))
    assert "mask_swa" not in graph.inputs and "mask" in graph.inputs


def test_gemma3_accepts_ollama_s_names_of_the_rope_bases(tmp_path: Path) -> None:
    bases = {"gemma3.rope.global.freq_base": 1e6, "gemma3.rope.local.freq_base": 5000.0}
    hp = load_changed(make_gemma3(tmp_path / "a.gguf"), bases, without=["gemma3.rope.freq_base"]).hparams
    assert hp.rope_swa is not None
    assert (hp.rope.freq_base, hp.rope_swa.freq_base) == (1e6, 5000.0)


def test_granite_s_layers_name_the_parts_of_embeddings_that_are_added(tmp_path: Path) -> None:
    """Part 0 is the embedding itself, so the last of two further parts is number 2."""
    path, key = make(TINY["granite"], tmp_path / "m.gguf"), "granite.deepstack_mapping"
    model = load_changed(path, {key: np.array([-1, 2, -1, 1], np.int32)})
    assert (model.n_deepstack, model.deepstack) == (2, {1: 2, 3: 1})
    with pytest.raises(InvalidModel, match=f"'{key}' is .*; numbers up to 2 are expected"):
        load_changed(path, {key: np.array([-1, 3, -1, 1], np.int32)})


def test_cohere_2_s_mixtures_with_full_attention_have_no_positions(tmp_path: Path) -> None:
    """Only dense layers, here the first, rotate queries and keys that attend to everything."""
    full = {"cohere2moe.attention.sliding_window_pattern": np.zeros(3, np.bool_)}
    assert len(ropes(load_changed(make(TINY["cohere2moe"], tmp_path / "m.gguf"), full))) == 2


def test_olmo_3_extends_the_context_of_layers_without_a_window_only(tmp_path: Path) -> None:
    factor = {"olmo2.rope.scaling.attn_factor": 1.25}
    model = load_changed(make(TINY["olmo2-windows"], tmp_path / "m.gguf"), factor)
    assert [model.hparams.is_swa(i) for i in range(5)] == [True, True, True, False, True]
    window, whole = (1.0, 0.0, 1.0), (0.25, 1.0, 1.25)
    assert [rope[6:9] for rope in ropes(model)] == [window] * 6 + [whole] * 2 + [window] * 2


def test_smallthinker_ignores_the_file_s_scale_of_expert_weights(tmp_path: Path) -> None:
    keys = {"smallthinker.expert_weights_scale": 2.5, "smallthinker.expert_weights_norm": False}
    experts = load_changed(make(TINY["smallthinker"], tmp_path / "m.gguf"), keys).hparams.experts
    assert experts is not None and (experts.scale, experts.normalized) == (1.0, True)


# --- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "value", "error", "message"),
    [
        ("general.architecture", "glm4moelite", UnsupportedModel, "'glm4moelite' is not supported.*deepseek2"),
        ("llama.rope.scaling.type", "dynamic", UnsupportedModel, "'llama.rope.scaling.type' is 'dynamic'"),
        ("llama.attention.head_count_kv", 3, InvalidModel, "'llama.attention.head_count_kv'.*divisor"),
        ("llama.attention.head_count", 0, InvalidModel, "'llama.attention.head_count'"),
        ("llama.rope.dimension_count", 16, InvalidModel, "'llama.rope.dimension_count' is 16; 32 is expected"),
        ("llama.attention.layer_norm_rms_epsilon", float("nan"), InvalidModel, "layer_norm_rms_epsilon"),
        ("llama.attention.value_length", 64, InvalidModel, r"'blk.0.attn_v.weight' has .*expected \[128, 128\]"),
        ("llama.block_count", "two", LlamadoError, "'llama.block_count'.*integer"),
        ("llama.attention.head_count_kv", np.array([2, 2, 2]), LlamadoError, "'llama.attention.head_count_kv'"),
        ("llama.block_count", 3, InvalidModel, r"'blk.2.attn_norm.weight' is missing; expected shape \[128\]"),
        ("llama.block_count", 1, UnsupportedModel, "does not use the tensors blk.1"),
        ("tokenizer.ggml.tokens", StringArray.of(["a", "b"]), InvalidModel, "320 rows.*names 2 tokens"),
    ],
)
def test_errors_name_the_key(tmp_path: Path, key: str, value: Value, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        load_changed(make_llama(tmp_path / "m.gguf"), {key: value})


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"without": ["llama.embedding_length"]}, LlamadoError, "'llama.embedding_length' is missing"),
        ({"without": ["token_embd.weight"]}, InvalidModel, "'token_embd.weight' is missing"),
        ({"without": ["blk.1.ffn_up.weight"]}, InvalidModel, r"'blk.1.ffn_up.weight' .* shape \[128, 256\]"),
        ({"tensors": {"blk.0.attn_k.weight": (128, 65)}}, InvalidModel, r"has shape \[128, 65\]; expected \[128, 64\]"),
        ({"tensors": {"blk.0.attn_q_norm.weight": (32,)}}, UnsupportedModel, "does not use .*blk.0.attn_q_norm.weight"),
    ],
)
def test_errors_name_the_tensor(tmp_path: Path, change: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        load_changed(make_llama(tmp_path / "m.gguf"), **change)


def test_a_matrix_may_have_a_scale(tmp_path: Path) -> None:
    """NVFP4 files have them. Their scales of activations (`input_scale`) are unused."""
    scales = {f"blk.{i}.{name}.scale": (1,) for i in range(2) for name in ("attn_q", "ffn_down", "attn_output")}
    path = make_llama(tmp_path / "m.gguf")
    model = load_changed(path, tensors={**scales, "blk.0.attn_q.input_scale": (1,)})
    graph = model.build(BatchShape(1, 1, 256), model.memory(MemoryOptions(n_cells=256)))
    products = {node.src[1]: node.src[0] for node in graph.nodes if node.op == Op.MUL}
    for name in scales:
        product = products[model.weights[name]]
        assert product is not None and product.src[0] is model.weights[name.replace(".scale", ".weight")]


def test_cache_types_must_fit_the_heads(tmp_path: Path) -> None:
    model = load(make_llama(tmp_path / "m.gguf", n_embd=96, n_head=6))
    with pytest.raises(UnsupportedModel, match="these have 16 elements"):
        model.memory(MemoryOptions(n_cells=256, type_k=T.Q8_0, type_v=T.F16))
    with pytest.raises(
        UnsupportedModel,
        match="Q4_K is not supported; supported are F32, F16, BF16, Q8_0, Q4_0, Q4_1, ",
    ):
        model.memory(MemoryOptions(n_cells=256, type_k=T.F16, type_v=T.Q4_K))


@pytest.mark.parametrize(("n_tokens", "n_outputs", "n_kv"), [(0, 0, 256), (2, 3, 256), (2, -1, 256), (2, 1, 0)])
def test_invalid_batch_shapes_are_rejected(n_tokens: int, n_outputs: int, n_kv: int) -> None:
    with pytest.raises(ValueError, match="not a batch"):
        BatchShape(n_tokens, n_outputs, n_kv)


@pytest.mark.parametrize(("n_tokens", "n_outputs", "n_kv", "n_seqs"), [(1, 0, 1, 0), (1, 1, 1, 1), (6, 6, 256, 3)])
def test_smallest_and_largest_batch_shapes(n_tokens: int, n_outputs: int, n_kv: int, n_seqs: int) -> None:
    assert BatchShape(n_tokens, n_outputs, n_kv, n_seqs=n_seqs).n_kv == n_kv
    with pytest.raises(ValueError, match="unequal length"):
        BatchShape(n_tokens, n_outputs, n_kv, n_seqs=n_seqs + 4)


def test_attention_beyond_the_cache_is_rejected(tmp_path: Path) -> None:
    model = load(make_llama(tmp_path / "m.gguf"))
    with pytest.raises(ValueError, match="512 cells of a cache of 256"):
        model.build(BatchShape(1, 1, 512), model.memory(MemoryOptions(n_cells=256)))


# --- graphs -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", MAKERS)
def test_inputs_and_outputs(tmp_path: Path, make: Callable[..., Path]) -> None:
    model = load(make(tmp_path / "m.gguf"))
    n_vocab = model.hparams.n_vocab
    graph = model.build(BatchShape(5, 2, 256), model.memory(MemoryOptions(n_cells=512)))
    described = {name: (t.type, t.ne[:2]) for name, t in graph.inputs.items()}
    expected = {
        "tokens": (T.I32, (5, 1)),
        "positions": (T.I32, (5, 1)),
        "cells": (T.I64, (5, 1)),
        "mask": (T.F16, (256, 5)),
        "out_rows": (T.I32, (2, 1)),
    }
    if model.hparams.n_swa:
        expected["mask_swa"] = (T.F16, (256, 5))
    assert described == expected
    assert {name: t.ne for name, t in graph.outputs.items()} == {"logits": (n_vocab, 2, 1, 1)}


@pytest.mark.parametrize("make", MAKERS)
def test_a_batch_without_outputs_only_writes_the_caches(tmp_path: Path, make: Callable[..., Path]) -> None:
    model = load(make(tmp_path / "m.gguf"))
    kv = model.memory(MemoryOptions(n_cells=256))
    graph = model.build(BatchShape(5, 0, 256), kv)
    assert graph.outputs == {} and "out_rows" not in graph.inputs
    writes = [node for node in graph.nodes if node.op == Op.SET_ROWS]
    assert {node.view_src for node in writes} == {*kv.tensors}
    assert graph.nodes[-1] is writes[-1]
    assert not any("blk.1.ffn" in leaf.name or "output" in leaf.name.split(".")[0] for leaf in graph.leafs)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["falcon-h1", "granitehybrid", "kimi-linear", "lfm2", "llama4", "mamba2", "minimax-01", "qwen3next"]
)
def test_a_batch_without_outputs_computes_only_what_the_caches_need(tmp_path: Path, name: str) -> None:
    model = load(make(TINY[name], tmp_path / "m.gguf"))
    memory = model.memory(MemoryOptions(n_cells=256, n_sequences=2))
    graph = model.build(BatchShape(5, 0, 256, n_seqs=1), memory)
    needed: set[Tensor] = set()
    waiting = [node for node in graph.nodes if node.view_src in memory.tensors and node.op in (Op.SET_ROWS, Op.CPY)]
    assert waiting and graph.outputs == {}
    while waiting:
        tensor = waiting.pop()
        if tensor not in needed:
            needed.add(tensor)
            waiting += [source for source in (*tensor.src, tensor.view_src) if source is not None]
    assert [node.name for node in graph.nodes if node not in needed] == []


def test_building_a_graph_takes_few_calls_per_node(smollm2_path: Path) -> None:
    """Building delays the first token of each new shape. Calls measure its cost without a clock."""
    model = load(smollm2_path)
    kv = model.memory(MemoryOptions(n_cells=1024))
    calls = 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        graph = model.build(BatchShape(8, 1, 256), kv)
    finally:
        sys.setprofile(None)
    assert len(graph.nodes) == 936
    assert calls < 16 * len(graph.nodes)


# --- numbers ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_tokens_beyond_the_windows_have_no_effect(tmp_path: Path) -> None:
    """With windowed layers only, the reach is layers × window."""
    path = make_gemma3(tmp_path / "m.gguf", n_swa=8, swa_period=0, n_layer=2)
    tokens = np.random.default_rng(0).integers(6, 200, 40).tolist()
    base = ReferenceModel(path).logits(tokens)
    far, near = list(tokens), list(tokens)
    far[39 - 15] = 300
    near[39 - 14] = 300
    np.testing.assert_array_equal(ReferenceModel(path).logits(far), base)
    assert np.abs(ReferenceModel(path).logits(near) - base).max() > 1e-6


def test_softcap_limits_logits(tmp_path: Path) -> None:
    tokens = [7, 8, 9]
    free = ReferenceModel(make_gemma3(tmp_path / "a.gguf")).logits(tokens)
    capped = ReferenceModel(make_gemma3(tmp_path / "b.gguf", softcap=2.0)).logits(tokens)
    np.testing.assert_allclose(capped, 2 * np.tanh(free / 2), rtol=1e-4, atol=1e-5)


SMALL_BLOCKS = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "IQ4_NL")
SUPER_BLOCKS = ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS", "TQ1_0", "TQ2_0", "Q1_0", "NVFP4")


@pytest.mark.parametrize("wtype", [*SMALL_BLOCKS, *SUPER_BLOCKS])
def test_every_weight_type_gives_finite_logits(tmp_path: Path, wtype: str) -> None:
    sizes = {"n_embd": 256, "n_ff": 512} if wtype in SUPER_BLOCKS else {}
    logits = ReferenceModel(make_llama(tmp_path / "m.gguf", wtype=wtype, **sizes)).logits([5, 6, 7])
    assert np.isfinite(logits).all() and logits.std() > 0.5


def test_the_file_s_epsilon_is_a_parameter_of_the_norm(smollm2_path: Path) -> None:
    model = load(smollm2_path)
    graph = model.build(BatchShape(1, 1, 256), model.memory(MemoryOptions(n_cells=256)))
    norm = next(node for node in graph.nodes if node.op == Op.RMS_NORM)
    assert norm.op_params[:4] == struct.pack("<f", 1e-5)


@pytest.mark.parametrize(
    ("changes", "gating"),
    [
        ({}, Gating.SIGMOID),
        ({"n_vocab": 154_881}, Gating.SOFTMAX),
        ({"n_layer": 47}, Gating.SOFTMAX),
        ({"n_layer": 49}, Gating.SIGMOID),
        ({"keys": {"expert_gating_func": 1}}, Gating.SOFTMAX),
    ],
    ids=str,
)
def test_glm_flash_is_recognized_by_layers_and_vocabulary(changes: dict[str, Any], gating: Gating) -> None:
    """Its files do not give the gating function. One of the blocks is for multi-token prediction."""
    tiny = TINY["deepseek2-glm-4.7-flash"]
    tiny = replace(tiny, **{**changes, "keys": {**tiny.keys, **changes.get("keys", {})}})
    keys = {f"deepseek2.{key}": value for key, value in {**tiny.keys, "context_length": 64}.items()}
    keys |= {"general.architecture": "deepseek2", "deepseek2.block_count": tiny.n_layer}
    tensors = {
        name: TensorInfo(name, T.F32, (*ne, 1, 1, 1)[:4], 0, 4 * math.prod(ne), 0) for name, ne in tiny.shapes().items()
    }
    experts = load_model(Header("it", Metadata(keys), tensors)).hparams.experts
    assert experts is not None and experts.gating is gating


def test_pairs_of_a_fourth_position_do_not_rotate_in_text(tmp_path: Path) -> None:
    sections = {"hunyuan_vl.rope.dimension_sections": np.array([2, 3, 1, 2], np.int32)}
    rope = load_changed(make(TINY["hunyuan_vl"], tmp_path / "m.gguf"), sections).hparams.rope
    assert rope.mode is RopeMode.NEOX and rope.n_dims == 32
    assert rope.fixed_pairs == (6, 7, 14, 15)  # the sections repeat
    assert rope.sections is not None and rope.sections.lengths == (2, 3, 1, 2)


@pytest.mark.parametrize("wish", [0.0, 0.25])
def test_the_user_overrides_the_yarn_keys_of_grok(tmp_path: Path, wish: float) -> None:
    """0 turns YaRN off; it is not the same as no wish."""
    path = make(TINY["grok-two"], tmp_path / "m.gguf")
    assert load(path).hparams.rope.ext_factor == pytest.approx(0.7)
    assert load(path, RopeOptions(ext_factor=wish)).hparams.rope.ext_factor == wish
