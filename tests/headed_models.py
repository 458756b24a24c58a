"""Small models with draft heads. A prediction block has the layer's weights, so it predicts the model's own tokens."""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tiny import TINY, make
from tiny.llama import ATTENTION, GATED, HEAD, KEYS, N_EMBD
from tiny.spec import Shape, Tiny

LLAMA = {**ATTENTION, **GATED}
_OF_BLOCKS = re.compile(r"blk\.\d+\.")
CHANGES: dict[str, dict[str, Any]] = {
    "deepseek32": {"attention.indexer.top_k": 512},
    "glm-dsa": {"attention.indexer.top_k": 512, "attention.indexer.types": [1]},
    "cohere2moe": {"attention.sliding_window_pattern": [True, True]},
    "mimo2": {"attention.sliding_window_pattern": [True, True], "attention.head_count_kv": [4, 4]},
    "step35": {
        "swiglu_clamp_exp": 0.0,
        "swiglu_clamp_shexp": 0.0,
        "attention.sliding_window_pattern": [True, True],
    },
}
"""Changed keys: features that prediction blocks lack are disabled, as llama.cpp requires."""


def _own_random(name: str) -> np.random.Generator:
    """Return a random generator that is the same for a tensor in all layers."""
    return np.random.default_rng(zlib.crc32(_OF_BLOCKS.sub("", name).encode()))


def _adds(name: str) -> bool:
    """Return True if a matrix computes the output of a block."""
    return any(part in name for part in ("attn_output", "ssm_out", "ffn_down"))


@dataclass(frozen=True)
class HeadedModel(Tiny):
    """A small model with prediction blocks.

    `sway` is the weight of hidden states in the block's input (0: none). With `repeats`, the block reads only
    hidden states and adds nothing, so it repeats the model's prediction. With `alone`, the file lacks the layer; with
    `quiet`, layers before the last add nothing.
    """

    sway: float = 0.0
    repeats: bool = False
    alone: bool = False
    quiet: bool = False

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """See Tiny."""
        return {name: n for name, n in super().shapes().items() if not (self.alone and name.startswith("blk.0."))}

    def values(self, rng: np.random.Generator, name: str, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
        """See Tiny."""
        values = super().values(_own_random(name), name, shape)
        if name == "token_embd.weight":  # normed, so that norms have no effect
            return values / np.sqrt((values**2).mean(axis=1, keepdims=True))
        if name.endswith("nextn.eh_proj.weight"):
            n = shape[1]
            left = np.zeros((n, n)) if self.repeats else np.eye(n)
            other = np.random.default_rng(zlib.crc32(name.encode())).permutation(
                values[:, n:]
            )  # different in each block
            right = np.eye(n) if self.repeats else self.sway * other
            return np.concatenate([left, right], axis=1).astype(np.float32)
        halves = self.architecture == "nemotron_h_moe"
        if halves and "post_attention_norm" in name:
            return super().values(_own_random("attn_norm.weight"), name, shape)
        if "layer_output_norm" in name or (halves and "shared_head_norm" in name and not self.repeats):
            return super().values(_own_random("output_norm.weight"), name, shape)
        if "nextn" in name:
            return np.ones_like(values)
        if halves and self.quiet:
            return np.zeros_like(values) if "ssm_out" in name else values
        block = int(name.split(".")[1]) if name.startswith("blk.") else self.n_layer
        silent = (self.repeats and block == self.n_layer - 1) or (self.quiet and block < self.n_layer - 2)
        return np.zeros_like(values) if silent and _adds(name) else values


WITH_STATES = ("qwen35", "qwen35moe", "qwen3next", "bailingmoe3", "nemotron_h_moe")


def _with_states(base: Tiny, more: Mapping[str, Shape | None], options: Mapping[str, Any]) -> HeadedModel:
    """Return a hybrid model with all layers, and a prediction block with attention."""
    keys, block = {**base.keys, "nextn_predict_layers": 1}, {**base.layers[3 if 3 in base.layers else 1], **more}
    if base.architecture == "nemotron_h_moe":  # layers have one block each, the head has both
        network = {name: shape for name, shape in base.layers[2].items() if shape is not None}
        block |= {**network, "post_attention_norm.weight": base.n_embd, "nextn.shared_head_norm.weight": base.n_embd}
    if base.architecture == "bailingmoe3":
        block["layer_output_norm.weight"] = base.n_embd
    for key in ("attention.head_count_kv", "feed_forward_length"):
        if isinstance(keys[key], list):
            keys[key] = [*keys[key], max(keys[key])]
    return HeadedModel(
        base.architecture, keys, base.layer, base.tensors, {**base.layers, 4: block}, n_layer=5, **options
    )


def headed(name: str, *, n_heads: int = 1, **options: Any) -> HeadedModel:
    """Return one layer of a small model and its prediction blocks; hybrids have all layers."""
    base = TINY[name]
    n = base.n_embd
    # Heads that read normed hidden states need no norm of their own.
    normed = options.get("repeats") and name not in ("mimo2", "step35")
    own_norm: dict[str, Shape | None] = {"nextn.shared_head_norm.weight": n} if normed else {}
    more: dict[str, Shape | None] = {
        "nextn.eh_proj.weight": (2 * n, n), "nextn.enorm.weight": n, "nextn.hnorm.weight": n, **own_norm,
    }  # fmt: skip
    if name in WITH_STATES:
        return _with_states(base, more, options)
    own = base.layers.get(0 if name == "mimo2" else 1, {})
    layer = {name: shape for name, shape in {**base.layer, **own}.items() if shape is not None}
    if name == "mimo2":  # as llama.cpp requires
        parts = [layer.pop(f"attn_{part}.weight") for part in "qkv"]
        layer["attn_qkv.weight"] = (n, sum(shape[1] for shape in parts if isinstance(shape, tuple)))
    changed = {**base.keys, "leading_dense_block_count": 0, "nextn_predict_layers": n_heads, **CHANGES.get(name, {})}
    lists = [key for key, value in changed.items() if isinstance(value, list) and "rope" not in key]
    changed |= {key: [changed[key][-1]] * (1 + n_heads) for key in lists if key != "attention.indexer.types"}
    return HeadedModel(
        base.architecture,
        changed,
        layer,
        base.tensors,
        {1 + i: more for i in range(n_heads)},
        n_layer=1 + n_heads,
        pre=base.pre,
        deviation=base.deviation,
        **options,
    )


def make_headed(path: Path, name: str, **options: Any) -> Path:
    """Write the file of a model of `headed`."""
    return make(headed(name, **options), path)


@dataclass(frozen=True)
class Eagle(Tiny):
    """A draft head in its own file.

    With `repeats`, it adds nothing to the state of the last target layer that it reads. `table` are its draft tokens.
    """

    repeats: bool = False
    table: tuple[int, ...] = ()

    def values(self, rng: np.random.Generator, name: str, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
        """See Tiny."""
        values = super().values(rng, name, shape)
        if name == "d2t" and self.table:
            return np.array(self.table, np.int64)
        if name == "d2t":
            return np.sort(np.random.default_rng(1).permutation(self.n_vocab)[: shape[0]]).astype(np.int64)
        if self.repeats and name == "fc.weight":
            n = shape[1]
            return np.concatenate([np.zeros((n, 2 * n)), np.eye(n)], axis=1).astype(np.float32)
        if self.repeats and name == "output_norm.weight":  # as in the target
            return super().values(_own_random(name), name, shape)
        return np.zeros_like(values) if self.repeats and _adds(name) else values


def make_eagle(path: Path, *, n_drafted: int = 0, own: bool = False, repeats: bool = False, **keys: Any) -> Path:
    """Write an EAGLE-3 head for the model of `make_target`, with `n_drafted` draft tokens (0: all).

    With `own`, it has an embedding.
    """
    n = N_EMBD
    layer: dict[str, Shape] = {
        "attn_norm_2.weight": n,
        **{
            name: (2 * n, shape[1]) if name[:6] in ("attn_q", "attn_k", "attn_v") else shape
            for name, shape in LLAMA.items()
        },
    }
    tensors: dict[str, Shape | None] = {
        "fc.weight": (3 * n, n),
        "output.weight": (n, n_drafted) if n_drafted else None,
        "d2t": n_drafted or None,
        "enc.output_norm.weight": 3 * n if keys.get("norm_before_fc") else None,
    }
    if not own:
        tensors["token_embd.weight"] = None
    wanted = {"target_layers": [0, 1, 2], "target_hidden_size": n, **keys}
    return make(Eagle("eagle3", {**KEYS, **wanted}, layer, tensors, n_layer=1, repeats=repeats), path)


def make_target(path: Path) -> Path:
    """Write the target of these heads, a small llama model of four layers."""
    return make(HeadedModel("llama", {**KEYS, "rope.dimension_count": HEAD}, LLAMA, n_layer=4), path)


def make_dflash(
    path: Path,
    *,
    n_drafted: int = 0,
    table: tuple[int, ...] = (),
    own: bool = False,
    more: Sequence[str] = (),
    **keys: Any,
) -> Path:
    """Write a DFlash head of two layers, with `n_drafted` draft tokens or those of `table`.

    `more` are optional weights to add; "-attn_v.weight" removes that matrix.
    """
    n, n_drafted = N_EMBD, n_drafted or len(table)
    optional: dict[str, Shape] = {
        "post_attention_norm.weight": n,
        "post_ffw_norm.weight": n,
        "attn_sinks.weight": 4,
        "layer_output_scale.weight": 1,
    }
    layer: dict[str, Shape] = {**LLAMA, "attn_q_norm.weight": HEAD, "attn_k_norm.weight": HEAD}
    layer |= {name: optional[name] for name in more if name in optional}
    if "-attn_v.weight" in more:
        del layer["attn_v.weight"]
    tensors: dict[str, Shape | None] = {
        "fc.weight": (3 * n, n),
        "enc.output_norm.weight": n,
        "output.weight": (n, n_drafted) if n_drafted else None,
        "d2t": n_drafted or None,
        "rope_freqs.weight": HEAD // 2 if "rope_freqs.weight" in more else None,
    }
    if not own:
        tensors["token_embd.weight"] = None
    wanted = {"target_layers": [0, 1, 3], "block_size": 6, "tokenizer.ggml.mask_token_id": 5, **keys}
    return make(Eagle("dflash", {**KEYS, **wanted}, layer, tensors, n_layer=2, table=table), path)
