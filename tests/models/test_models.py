"""Hyper-parameters, weights and forward passes of the architectures."""

from __future__ import annotations

import math
import struct
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFWriter
from reference import ReferenceModel
from tiny import TINY, make
from tiny_models import make_gemma3, make_llama

from llamado.errors import LlamadoError
from llamado.ggml import Op, RopeMode
from llamado.gguf.header import Header, TensorInfo
from llamado.gguf.metadata import Metadata, StringArray
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


def rewrite(source: Path, target: Path, change: Callable[[dict[str, Any], dict[str, Any]], None]) -> Path:
    """A copy of a model file after `change(metadata, tensors)`; tensors are (bytes, type, ne)."""
    with GGUFFile.open(source) as file:
        metadata: dict[str, Any] = dict(file.metadata)
        tensors: dict[str, Any] = {n: (file.data(n).copy(), t.type, t.ne) for n, t in file.tensors.items()}
    change(metadata, tensors)
    writer = GGUFWriter(target, metadata.pop("general.architecture"))
    for key, value in metadata.items():
        match value:
            case bool():
                writer.add_bool(key, value)
            case int():
                writer.add_uint32(key, value)
            case float():
                writer.add_float32(key, value)
            case str():
                writer.add_string(key, value)
            case StringArray():
                writer.add_array(key, list(value))
            case _:
                writer.add_array(key, value.tolist() if isinstance(value, np.ndarray) else value)
    for name, (data, type, ne) in tensors.items():
        rows = data.reshape(*[n for n in ne[:0:-1] if n > 1], -1)
        writer.add_tensor(name, rows.view(np.float32) if type == T.F32 else rows, raw_dtype=type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


# --- hyper-parameters -------------------------------------------------------------------------------------------------


def test_smollm2(smollm2_path: Path) -> None:
    hp = load(smollm2_path).hparams
    assert (hp.n_layer, hp.n_embd, hp.n_head[0], hp.n_head_kv[0], hp.head_dim_k) == (30, 576, 9, 3, 64)
    assert (hp.n_ff[0], hp.n_vocab, hp.n_ctx_train, hp.n_swa) == (1536, 49152, 8192, 0)
    assert (hp.rope.mode, hp.rope.n_dims, hp.rope.freq_base) == (RopeMode.NORMAL, 64, 100000.0)
    assert (hp.attention_scale, hp.embedding_scale) == (0.125, 1.0)


def test_gemma3(gemma3_path: Path) -> None:
    hp = load(gemma3_path).hparams
    assert (hp.n_layer, hp.n_embd, hp.n_head[0], hp.n_head_kv[0], hp.head_dim_k) == (18, 640, 4, 1, 256)
    assert (hp.n_swa, [i for i in range(18) if not hp.is_swa(i)]) == (512, [5, 11, 17])
    assert (hp.rope.mode, hp.rope.freq_base) == (RopeMode.NEOX, 1e6)
    assert hp.rope_swa is not None and (hp.rope_swa.freq_base, hp.rope_swa.freq_scale) == (1e4, 1.0)
    assert (hp.attention_scale, hp.embedding_scale) == (0.0625, float(np.float32(np.sqrt(640))))


def test_the_head_shares_the_embedding_when_there_is_no_other(tmp_path: Path) -> None:
    shape = BatchShape(1, 1, 256)
    for tied in (True, False):
        model = load(make_llama(tmp_path / "model.gguf", tied=tied))
        head = model.build(shape, model.memory(MemoryOptions(n_cells=256))).outputs["logits"].src[0]
        assert head is model.weights["token_embd.weight" if tied else "output.weight"]


def test_rope_scaling(tmp_path: Path) -> None:
    linear = load(make_llama(tmp_path / "l.gguf", rope_scaling=("linear", 4.0))).hparams.rope
    assert (linear.freq_scale, linear.ext_factor, linear.attn_factor) == (0.25, 0.0, 1.0)
    yarn = load(make_llama(tmp_path / "y.gguf", rope_scaling=("yarn", 4.0))).hparams.rope
    assert (yarn.freq_scale, yarn.ext_factor, yarn.attn_factor, yarn.n_ctx_orig) == (0.25, 1.0, 1.0, 512)
    none = load(make_llama(tmp_path / "n.gguf", rope_scaling=("none", 4.0))).hparams.rope
    assert none.freq_scale == 1.0


ROPE = {
    # key of the file, or option of the user: (value, place in ROPE's op_params, what is there)
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
    """op_params of the rotations: <5 i32, 6 f32>, those of a layer's queries and keys after another."""
    graph = model.build(BatchShape(1, 1, 256), model.memory(MemoryOptions(n_cells=256)))
    return [struct.unpack_from("<5i6f", node.op_params) for node in graph.nodes if node.op == Op.ROPE]


@pytest.mark.parametrize("key", ROPE)
def test_each_value_of_yarn_reaches_the_rotation_and_nothing_else(tmp_path: Path, key: str) -> None:
    value, place, found = ROPE[key]
    plain = make_llama(tmp_path / "a.gguf", rope_scaling=("yarn", 4.0))
    if key.startswith("rope."):
        changed = load(rewrite(plain, tmp_path / "b.gguf", _put(f"llama.{key}", value)))
    else:
        changed = load(plain, RopeOptions(**{key: value}))
    before, after = ropes(load(plain)), ropes(changed)
    assert len(before) == len(after) == 4
    for old, new in zip(before, after, strict=True):
        assert new[place] == found != old[place]
        assert [i for i in range(11) if new[i] != old[i]] == [place]


@pytest.mark.parametrize("name", ["ext_factor", "attn_factor", "beta_fast", "beta_slow"])
def test_what_llama_cpp_does_not_read_of_a_file_changes_nothing(tmp_path: Path, name: str) -> None:
    plain = make_llama(tmp_path / "a.gguf", rope_scaling=("yarn", 4.0))
    changed = rewrite(plain, tmp_path / "b.gguf", _put(f"llama.rope.scaling.yarn_{name}", 0.25))
    assert ropes(load(changed)) == ropes(load(plain))


def test_yarn_that_is_turned_off_is_not_one_without_a_value(tmp_path: Path) -> None:
    """An `ext_factor` of 0 leaves plain interpolation; below 0 it is llama.cpp's sign for not given."""
    plain = make_llama(tmp_path / "a.gguf", rope_scaling=("yarn", 4.0))
    for value, found in ((0.0, 0.0), (-1.0, 1.0)):
        assert {rope[6:9] for rope in ropes(load(plain, RopeOptions(ext_factor=value)))} == {(0.25, found, 1.0)}


def test_factors_of_attention_multiply(tmp_path: Path) -> None:
    """llama-context.cpp: what the user gives is multiplied by the model's `rope_attn_factor`, but not with YaRN."""
    plain = make_llama(tmp_path / "a.gguf")
    assert {rope[8] for rope in ropes(load(plain))} == {1.0}
    changed = rewrite(plain, tmp_path / "b.gguf", _put("llama.rope.scaling.attn_factor", 3.0))
    assert {rope[8] for rope in ropes(load(changed, RopeOptions(attn_factor=0.5)))} == {1.5}
    assert {rope[8] for rope in ropes(load(changed, RopeOptions("yarn", attn_factor=0.5)))} == {3.0}


def test_a_scaling_of_none_forgets_all_stretching(tmp_path: Path) -> None:
    plain = make_llama(tmp_path / "a.gguf", rope_scaling=("yarn", 4.0))
    assert {rope[6:9] for rope in ropes(load(plain, RopeOptions("none", freq_scale=0.5)))} == {(1.0, 0.0, 1.0)}


def test_another_stretch_by_yarn_is_another_context(tmp_path: Path) -> None:
    plain = make_llama(tmp_path / "a.gguf", n_ctx=512)
    for options, n_ctx in (
        (RopeOptions("yarn", freq_scale=0.25), 2048),
        (RopeOptions("yarn", freq_scale=0.25, n_ctx_orig=100), 400),
        (RopeOptions("yarn"), 512),  # no stretch
        (RopeOptions("linear", freq_scale=0.25), 512),
    ):
        assert load(plain, options).hparams.n_ctx_train == n_ctx
    stretched = make_llama(tmp_path / "b.gguf", n_ctx=512, rope_scaling=("yarn", 4.0))
    assert load(stretched).hparams.n_ctx_train == 512
    assert load(stretched, RopeOptions(freq_scale=0.25)).hparams.n_ctx_train == 512


@pytest.mark.parametrize("name", ["gemma2", "gemma3"])
def test_a_users_base_and_stretch_are_not_for_windows(tmp_path: Path, name: str) -> None:
    """llama_model::get_rope_freq_base: layers with a window keep the file's."""
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
def test_impossible_wishes_are_refused(tmp_path: Path, options: RopeOptions) -> None:
    with pytest.raises(InvalidModel, match=r"rotary embedding: .* expected"):
        load(make_llama(tmp_path / "a.gguf"), options)


@pytest.mark.parametrize("name", ["llama-longrope", "phi3-longrope"])
def test_longrope_goes_by_the_context_of_a_sequence(tmp_path: Path, name: str) -> None:
    model = load(make(TINY[name], tmp_path / "a.gguf"))
    short, long = (model.weights[f"rope_factors_{which}.weight"] for which in ("short", "long"))
    limit = TINY[name].keys["rope.scaling.original_context_length"]
    for n_ctx, expected in ((limit - 1, short), (limit, short), (limit + 1, long), (0, long)):
        graph = model.build(BatchShape(1, 1, 256), model.memory(MemoryOptions(n_cells=1024, n_ctx=n_ctx)))
        factors = [node.src[2] for node in graph.nodes if node.op == Op.ROPE]
        assert factors == [expected] * (2 * model.hparams.n_layer)
    assert {rope[6:9] for rope in ropes(model)} == {(1.0, 0.0, np.float32(1.19))}


def test_gemma3_stretches_the_layers_without_a_window_alone(tmp_path: Path) -> None:
    def change(metadata: dict[str, Any], tensors: dict[str, Any]) -> None:
        metadata["gemma3.rope.scaling.type"] = "linear"
        metadata["gemma3.rope.scaling.factor"] = 8.0

    model = load(rewrite(make_gemma3(tmp_path / "a.gguf", n_layer=4, swa_period=2), tmp_path / "b.gguf", change))
    assert [model.hparams.is_swa(i) for i in range(4)] == [True, False, True, False]
    window, whole = (10000.0, 1.0), (1000000.0, 0.125)
    assert [rope[5:7] for rope in ropes(model)] == [window, window, whole, whole] * 2


@pytest.mark.parametrize(("n_layer", "width"), [(2, 16), (61, 16), (62, 8), (63, 16)])
def test_gemma3_of_62_layers_scales_by_the_width_of_a_head(tmp_path: Path, n_layer: int, width: int) -> None:
    """The 27B model alone: its heads have 128 elements and a 32nd of its width has 168 (gemma/config.py, 27b-v3)."""
    path = make_gemma3(tmp_path / "m.gguf", n_layer=n_layer, n_embd=32, n_head=4, head_dim=16, n_ff=32, wtype="F16")
    model = load(path)
    expected = float(np.float32(1) / np.sqrt(np.float32(width)))
    assert model.hparams.attention_scale == expected
    graph = model.build(BatchShape(1, 1, 256), model.memory(MemoryOptions(n_cells=256)))
    attended = [node.src[0] for node in graph.nodes if node.op == Op.FLASH_ATTN_EXT]
    assert len(attended) == n_layer
    scales = {struct.unpack_from("<f", node.op_params)[0] for node in graph.nodes if node.op == Op.SCALE}
    assert np.float32(expected) in {np.float32(s) for s in scales}
    # The attention's own factor is 1: queries come scaled.
    assert {struct.unpack_from("<f", n.op_params)[0] for n in graph.nodes if n.op == Op.FLASH_ATTN_EXT} == {1.0}


def test_frequency_factors_reach_queries_and_keys(tmp_path: Path) -> None:
    model = load(make_llama(tmp_path / "m.gguf", freq_factors=True))
    graph = model.build(BatchShape(1, 1, 256), model.memory(MemoryOptions(n_cells=256)))
    ropes = [node for node in graph.nodes if node.op == Op.ROPE]
    assert len(ropes) == 4
    assert all(node.src[2] is model.weights["rope_freqs.weight"] for node in ropes)


def test_sizes_may_differ_by_layer(tmp_path: Path) -> None:
    """Arrays instead of numbers: two layers that happen to be alike here."""

    def change(metadata: dict[str, Any], tensors: dict[str, Any]) -> None:
        metadata["llama.attention.head_count_kv"] = [2, 2]
        metadata["llama.feed_forward_length"] = [256, 256]

    plain = make_llama(tmp_path / "a.gguf")
    arrays = rewrite(plain, tmp_path / "b.gguf", change)
    assert load(arrays).hparams == load(plain).hparams


def test_swa_pattern_as_a_list(tmp_path: Path) -> None:
    def change(metadata: dict[str, Any], tensors: dict[str, Any]) -> None:
        metadata["gemma3.attention.sliding_window_pattern"] = [False, True]

    path = rewrite(make_gemma3(tmp_path / "a.gguf"), tmp_path / "b.gguf", change)
    assert load(path).hparams.swa_layers == (False, True)


@pytest.mark.slow
def test_gemma3_without_a_window_sees_everything(tmp_path: Path) -> None:
    def change(metadata: dict[str, Any], tensors: dict[str, Any]) -> None:
        metadata["gemma3.attention.sliding_window"] = 0

    model = load(rewrite(make_gemma3(tmp_path / "a.gguf"), tmp_path / "b.gguf", change))
    graph = model.build(BatchShape(1, 1, 256), model.memory(MemoryOptions(n_cells=256)))
    assert "mask_swa" not in graph.inputs and "mask" in graph.inputs


def test_gemma3_with_ollamas_names_of_the_rope_bases(tmp_path: Path) -> None:
    def change(metadata: dict[str, Any], tensors: dict[str, Any]) -> None:
        metadata["gemma3.rope.global.freq_base"] = metadata.pop("gemma3.rope.freq_base")
        metadata["gemma3.rope.local.freq_base"] = 5000.0

    hp = load(rewrite(make_gemma3(tmp_path / "a.gguf"), tmp_path / "b.gguf", change)).hparams
    assert hp.rope_swa is not None
    assert (hp.rope.freq_base, hp.rope_swa.freq_base) == (1e6, 5000.0)


# --- what is wrong has a name -----------------------------------------------------------------------------------------


def _drop(*names: str) -> Callable[[dict[str, Any], dict[str, Any]], None]:
    def change(metadata: dict[str, Any], tensors: dict[str, Any]) -> None:
        for name in names:
            (metadata if name in metadata else tensors).pop(name)

    return change


def _put(key: str, value: Any) -> Callable[[dict[str, Any], dict[str, Any]], None]:
    return lambda metadata, tensors: metadata.__setitem__(key, value)


def _tensor(name: str, *ne: int) -> Callable[[dict[str, Any], dict[str, Any]], None]:
    data = np.zeros(int(np.prod(ne)) * 4, np.uint8)
    return lambda metadata, tensors: tensors.__setitem__(name, (data, T.F32, (*ne, 1, 1, 1)[:4]))


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        (_put("general.architecture", "glm4moelite"), UnsupportedModel, "'glm4moelite' is not supported.*deepseek2"),
        (_put("llama.rope.scaling.type", "dynamic"), UnsupportedModel, "'llama.rope.scaling.type' is 'dynamic'"),
        (_put("llama.attention.head_count_kv", 3), InvalidModel, "'llama.attention.head_count_kv'.*divisor"),
        (_put("llama.attention.head_count", 0), InvalidModel, "'llama.attention.head_count'"),
        (_put("llama.rope.dimension_count", 16), InvalidModel, "'llama.rope.dimension_count' is 16; 32 is expected"),
        (_put("llama.attention.layer_norm_rms_epsilon", float("nan")), InvalidModel, "layer_norm_rms_epsilon"),
        (_put("llama.attention.value_length", 64), InvalidModel, r"'blk.0.attn_v.weight' has .*expected \[128, 128\]"),
        (_put("llama.block_count", "two"), LlamadoError, "'llama.block_count'.*integer"),
        (_put("llama.attention.head_count_kv", [2, 2, 2]), LlamadoError, "'llama.attention.head_count_kv'"),
        (_drop("llama.embedding_length"), LlamadoError, "'llama.embedding_length' is missing"),
        (_put("llama.block_count", 3), InvalidModel, r"'blk.2.attn_norm.weight' is missing; expected shape \[128\]"),
        (_put("llama.block_count", 1), UnsupportedModel, "does not use the tensors blk.1"),
        (_drop("token_embd.weight"), InvalidModel, "'token_embd.weight' is missing"),
        (_drop("blk.1.ffn_up.weight"), InvalidModel, r"'blk.1.ffn_up.weight' is missing; expected shape \[128, 256\]"),
        (
            _tensor("blk.0.attn_k.weight", 128, 65),
            InvalidModel,
            r"'blk.0.attn_k.weight' has shape \[128, 65\]; expected \[128, 64\]",
        ),
        (
            _tensor("blk.0.attn_q_norm.weight", 32),
            UnsupportedModel,
            "does not use the tensors blk.0.attn_q_norm.weight",
        ),
        (_put("tokenizer.ggml.tokens", ["a", "b"]), InvalidModel, "320 rows.*names 2 tokens"),
    ],
)
def test_faults_name_the_key_or_tensor(
    tmp_path: Path, change: Callable[[dict[str, Any], dict[str, Any]], None], error: type[Exception], says: str
) -> None:
    path = rewrite(make_llama(tmp_path / "good.gguf"), tmp_path / "bad.gguf", change)
    with pytest.raises(error, match=says):
        load(path)


def test_matrices_may_have_a_factor(tmp_path: Path) -> None:
    """As in NVFP4 files, which have scales of activations besides that nobody computes with."""

    def halve(_: dict[str, Any], tensors: dict[str, Any]) -> None:
        for name in ("blk.0.attn_q", "blk.1.ffn_down", "blk.1.attn_output"):
            data, type, ne = tensors[f"{name}.weight"]
            tensors[f"{name}.weight"] = (data.view(np.float32) / 2).view(np.uint8), type, ne
            tensors[f"{name}.scale"] = np.array([2], np.float32).view(np.uint8), T.F32, (1, 1, 1, 1)
            tensors[f"{name}.input_scale"] = np.array([7], np.float32).view(np.uint8), T.F32, (1, 1, 1, 1)

    whole = make_llama(tmp_path / "whole.gguf", wtype="F32")
    scaled = rewrite(whole, tmp_path / "scaled.gguf", halve)
    right, found = (ReferenceModel(path).logits([5, 6, 7]) for path in (whole, scaled))
    assert load(scaled).weights["blk.0.attn_q.scale"].ne == (1, 1, 1, 1)
    np.testing.assert_array_equal(found, right)


def test_a_cache_type_must_fit(tmp_path: Path) -> None:
    model = load(make_llama(tmp_path / "m.gguf", n_embd=96, n_head=6))
    with pytest.raises(UnsupportedModel, match="these have 16 elements"):
        model.memory(MemoryOptions(n_cells=256, type_k=T.Q8_0, type_v=T.F16))
    with pytest.raises(
        UnsupportedModel,
        match="Q4_K is not supported; supported are F32, F16, BF16, Q8_0, Q4_0, Q4_1, ",
    ):
        model.memory(MemoryOptions(n_cells=256, type_k=T.F16, type_v=T.Q4_K))


@pytest.mark.parametrize(("n_tokens", "n_outputs", "n_kv"), [(0, 0, 256), (2, 3, 256), (2, -1, 256), (2, 1, 0)])
def test_impossible_batches(n_tokens: int, n_outputs: int, n_kv: int) -> None:
    with pytest.raises(ValueError, match="not a batch"):
        BatchShape(n_tokens, n_outputs, n_kv)


def test_more_cells_than_the_cache_has(tmp_path: Path) -> None:
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
def test_a_batch_without_outputs_writes_every_cache_and_nothing_more(tmp_path: Path, make: Callable[..., Path]) -> None:
    model = load(make(tmp_path / "m.gguf"))
    kv = model.memory(MemoryOptions(n_cells=256))
    graph = model.build(BatchShape(5, 0, 256), kv)
    assert graph.outputs == {} and "out_rows" not in graph.inputs
    writes = [node for node in graph.nodes if node.op == Op.SET_ROWS]
    assert {node.view_src for node in writes} == {*kv.tensors}
    assert graph.nodes[-1] is writes[-1]
    assert not any("blk.1.ffn" in leaf.name or "output" in leaf.name.split(".")[0] for leaf in graph.leafs)


def test_a_graph_costs_a_few_calls_for_each_node(smollm2_path: Path) -> None:
    """Building is on the way to each new shape's first token; calls are what it takes, counted without a clock."""
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
@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("type_kv", [T.F32, T.F16, T.BF16, T.Q8_0])
def test_a_prompt_in_chunks_gives_what_it_gives_whole(tmp_path: Path, make: Callable[..., Path], type_kv: T) -> None:
    path = make(tmp_path / "m.gguf")
    tokens = np.random.default_rng(0).integers(3, 200, 50).tolist()
    whole = ReferenceModel(path, type_k=type_kv, type_v=type_kv).logits(tokens)
    model = ReferenceModel(path, type_k=type_kv, type_v=type_kv)
    assert model.logits(tokens[:30], outputs=[]).shape == (0, model.model.hparams.n_vocab)
    model.logits(tokens[30:49], positions=range(30, 49), outputs=[3])
    last = model.logits(tokens[49:], positions=[49])
    np.testing.assert_allclose(last, whole, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("make", MAKERS)
def test_sequences_of_a_batch_do_not_see_each_other(tmp_path: Path, make: Callable[..., Path]) -> None:
    path = make(tmp_path / "m.gguf")
    a, b = [10, 11, 12, 13], [20, 21, 22]
    alone = [ReferenceModel(path).logits(tokens)[0] for tokens in (a, b)]
    model = ReferenceModel(path, n_cells=512)
    together = model.logits(
        a + b, positions=[*range(4), *range(3)], starts=[0] * 4 + [256] * 3, outputs=[3, 6], n_kv=512
    )
    np.testing.assert_allclose(together, alone, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_the_window_hides_what_is_far(tmp_path: Path) -> None:
    """With windowed layers only, tokens further back than layers × window cannot matter; within they do."""
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


@pytest.mark.parametrize("wtype", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "IQ4_NL"])
def test_every_small_type_makes_a_model(tmp_path: Path, wtype: str) -> None:
    logits = ReferenceModel(make_llama(tmp_path / "m.gguf", wtype=wtype)).logits([5, 6, 7])
    assert np.isfinite(logits).all() and logits.std() > 0.5


@pytest.mark.parametrize("wtype", ["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS", "TQ1_0", "TQ2_0", "Q1_0", "NVFP4"])
def test_every_super_block_type_makes_a_model(tmp_path: Path, wtype: str) -> None:
    path = make_llama(tmp_path / "m.gguf", wtype=wtype, n_embd=256, n_ff=512)
    logits = ReferenceModel(path).logits([5, 6, 7])
    assert np.isfinite(logits).all() and logits.std() > 0.5


def _tokens(path: Path, pieces: list[str]) -> list[int]:
    with GGUFFile.open(path) as file:
        vocabulary = file.metadata.strings("tokenizer.ggml.tokens").raw_list()
    return [vocabulary.index(piece.encode()) for piece in pieces]


@pytest.mark.slow
def test_smollm2_knows_the_capital_of_france(smollm2_path: Path) -> None:
    prompt = _tokens(smollm2_path, ["The", "Ġcapital", "Ġof", "ĠFrance", "Ġis"])
    paris, stop = _tokens(smollm2_path, ["ĠParis", "."])
    logits = ReferenceModel(smollm2_path, dtype=np.float32).logits([*prompt, paris], outputs=[4, 5])
    assert logits.argmax(axis=1).tolist() == [paris, stop]


@pytest.mark.slow
def test_gemma3_goes_on_as_llama_cpp_does(gemma3_path: Path) -> None:
    prompt = _tokens(gemma3_path, ["<bos>", "The", "▁capital", "▁of", "▁France", "▁is"])
    the, capital = _tokens(gemma3_path, ["▁the", "▁capital"])
    logits = ReferenceModel(gemma3_path, dtype=np.float32).logits([*prompt, the], outputs=[5, 6])
    assert logits.argmax(axis=1).tolist() == [the, capital]


def test_epsilon_reaches_the_norm_as_stored(smollm2_path: Path) -> None:
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
def test_glm_flash_is_told_by_its_layers_and_its_vocabulary(changes: dict[str, Any], gating: Gating) -> None:
    """Its files do not say how experts are weighted. One block of them predicts tokens beyond the next."""
    tiny = TINY["deepseek2-glm-4.7-flash"]
    tiny = replace(tiny, **{**changes, "keys": {**tiny.keys, **changes.get("keys", {})}})
    keys = {f"deepseek2.{key}": value for key, value in {**tiny.keys, "context_length": 64}.items()}
    keys |= {"general.architecture": "deepseek2", "deepseek2.block_count": tiny.n_layer}
    tensors = {
        name: TensorInfo(name, T.F32, (*ne, 1, 1, 1)[:4], 0, 4 * math.prod(ne), 0) for name, ne in tiny.shapes().items()
    }
    experts = load_model(Header("it", Metadata(keys), tensors)).hparams.experts
    assert experts is not None and experts.gating is gating
