"""Hyper-parameters: what a GGUF file says about the shape of a model (key names: llama-arch.cpp)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import IntEnum
from math import log
from typing import NamedTuple

import numpy as np

from llamado.ggml.ops import RopeMode
from llamado.gguf.metadata import Metadata
from llamado.models.errors import InvalidModel, UnsupportedModel
from llamado.models.keys import Keys


class Pooling(IntEnum):
    """How the vectors of a text's tokens become one (`llama_pooling_type`).

    RANK: what a classifier makes of one of them.
    """

    NONE = 0
    MEAN = 1
    CLS = 2
    LAST = 3
    RANK = 4


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary embedding of a kind of layer, in the words of `ggml.graph.rope_ext`.

    Pairs of `still` are not turned.
    """

    n_dims: int
    mode: RopeMode
    n_ctx_orig: int
    freq_base: float
    freq_scale: float
    ext_factor: float
    attn_factor: float
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    still: tuple[int, ...] = ()


class Temperature(NamedTuple):
    """How queries grow with their place: log(⌊(position + offset) / length⌋ + 1) · scale + 1 (Llama 4)."""

    scale: float
    length: int
    offset: float = 0.0


class Gating(IntEnum):
    """What experts' weights are made of (`llama_expert_gating_func_type`)."""

    SOFTMAX = 1
    SIGMOID = 2
    SOFTMAX_OF_CHOSEN = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """A mixture of experts: of `n` a token goes through `n_used`, each with a hidden layer of `n_ff`.

    Weights are made by `gating`, divided by their sum with `normalised`, and multiplied by `scale`. Of `n_groups` > 1
    groups of experts only those of the best `n_groups_used` are chosen from. Every token goes through `n_shared`
    others, or one of `n_ff_shared`. The first `n_dense_layers` layers have no experts.
    """

    n: int
    n_used: int
    n_ff: int
    gating: Gating
    normalised: bool
    scale: float
    n_groups: int
    n_groups_used: int
    n_shared: int
    n_ff_shared: int
    n_dense_layers: int


@dataclass(frozen=True, slots=True)
class HyperParameters:
    """The sizes and constants of a model. Tuples have one entry per layer.

    `n_swa` is the width of the sliding window in tokens (0: no such layers), `swa_layers` the layers that have it:
    there a token at position p sees positions p - n_swa + 1 to p, or with `swa_symmetric` half of `n_swa` to each side.
    `rope_swa` is the rotary embedding of those layers.
    `n_ctx_short` is the longest context with LongRoPE's short factors, see Factors.
    `norm_eps` is what the norms add to the mean square or the variance.
    `experts` is the mixture that feed-forward networks are made of, where they are.
    `embedding_scale`, `residual_scale` and `logit_scale` multiply embeddings, what a half of a layer adds, and logits;
    the soft caps bend x to cap · tanh(x / cap). Without `causal` a token sees the whole of its text. `pooling` is the
    file's word on it. `n_nextn` blocks behind the layers predict tokens beyond the next one: see heads/.
    `first_block` is the file's block that layer 0 is.
    """

    architecture: str
    n_layer: int
    n_embd: int
    n_head: tuple[int, ...]
    n_head_kv: tuple[int, ...]
    head_dim_k: int
    head_dim_v: int
    n_ff: tuple[int, ...]
    n_vocab: int
    n_ctx_train: int
    n_ctx_short: int
    norm_eps: float
    rope: Rope
    attention_scale: float
    n_swa: int = 0
    swa_layers: tuple[bool, ...] = ()
    swa_symmetric: bool = False
    rope_swa: Rope | None = None
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    attention_softcap: float = 0.0
    final_logit_softcap: float = 0.0
    causal: bool = True
    pooling: Pooling | None = None
    experts: Experts | None = None
    n_nextn: int = 0
    first_block: int = 0

    def n_embd_k(self, layer: int) -> int:
        """Elements of one token's keys in a layer."""
        return self.head_dim_k * self.n_head_kv[layer]

    def n_embd_v(self, layer: int) -> int:
        """Elements of one token's values in a layer."""
        return self.head_dim_v * self.n_head_kv[layer]

    def is_swa(self, layer: int) -> bool:
        """Whether a layer attends through the sliding window."""
        return bool(self.swa_layers) and self.swa_layers[layer]

    def rope_of(self, layer: int) -> Rope:
        """The rotary embedding of a layer."""
        return self.rope_swa if self.rope_swa is not None and self.is_swa(layer) else self.rope


def override_metadata(metadata: Metadata, values: Iterable[tuple[str, int | float | bool | str]]) -> Metadata:
    """The metadata with other values; `{arch}` in a key stands for the architecture. Raises GgufError."""
    architecture = metadata.str_("general.architecture", "")
    return metadata.with_values({key.replace("{arch}", architecture): value for key, value in values})


def inverse_sqrt(n: int) -> float:
    """1 / sqrt(n), rounded to float32 at each step as C++ does with floats."""
    return float(np.float32(1) / np.sqrt(np.float32(n)))


ROPE_TYPES = ("none", "linear", "yarn", "longrope")
"""How positions are stretched (`llama_rope_scaling_type`). LongRoPE is in factors of frequencies alone, see Factors."""


def rotated(keys: Keys, suffix: str, default: int, head_dim: int, *, or_none: bool = False) -> int:
    """How many elements of a head are turned; with `or_none`, or without heads, perhaps 0.

    Raises GgufError or InvalidModel.
    """
    n = keys.int_(suffix, default)
    if n > head_dim or n % 2 or not (n or or_none or not head_dim):
        raise InvalidModel(f"metadata key '{keys.name(suffix)}' is {n}; an even number up to {head_dim} is expected")
    return n


def read_rope(
    keys: Keys, head_dim: int, n_ctx_train: int, mode: RopeMode, *, file_betas: bool = False, or_none: bool = False
) -> Rope:
    """The rotary embedding of the global layers, as the file and the user have it (llama-context.cpp).

    `file_betas`: whether the file says where YaRN's ramp begins and ends; of most architectures llama.cpp does not read
    it. `or_none`: see `rotated`. Raises GgufError, InvalidModel or UnsupportedModel.
    """
    wanted = keys.rope
    wanted.check()
    n_dims = rotated(keys, "rope.dimension_count", head_dim, head_dim, or_none=or_none)
    kind = wanted.scaling or _rope_type(keys)
    freq_scale = 1.0 if kind == "none" else wanted.freq_scale or _trained_scale(keys)
    ext_factor = wanted.ext_factor
    if ext_factor < 0:
        ext_factor = 1.0 if kind == "yarn" else 0.0
    attn_factor = 1.0 if wanted.attn_factor < 0 else wanted.attn_factor
    if ext_factor:
        # The rotation multiplies by 1 + 0.1 ln(factor) itself; what is passed to it cancels that.
        stretch = 1.0 / freq_scale
        magnitude = 1.0 if stretch <= 1.0 else 0.1 * log(stretch) + 1.0
        attn_factor = float(np.float32(magnitude / (1.0 + 0.1 * log(stretch))))
    fast, slow = 32.0, 1.0
    if file_betas:
        fast, slow = keys.float_("rope.scaling.yarn_beta_fast", fast), keys.float_("rope.scaling.yarn_beta_slow", slow)
    return Rope(
        n_dims=n_dims,
        mode=mode,
        n_ctx_orig=wanted.n_ctx_orig or keys.int_("rope.scaling.original_context_length", n_ctx_train),
        freq_base=wanted.freq_base or _trained_base(keys),
        freq_scale=float(np.float32(freq_scale)),
        ext_factor=ext_factor,
        attn_factor=attn_factor * keys.float_("rope.scaling.attn_factor", 1.0),
        beta_fast=fast if wanted.beta_fast < 0 else wanted.beta_fast,
        beta_slow=slow if wanted.beta_slow < 0 else wanted.beta_slow,
    )


def stretch_factor(rope: Rope, multiplier: float) -> float:
    """What YaRN multiplies attention by for its stretch of the context: 0.1 · multiplier · ln(stretch) + 1."""
    stretch = 1.0 / rope.freq_scale
    return 1.0 if stretch <= 1.0 else 0.1 * multiplier * log(stretch) + 1.0


def swa_rope(keys: Keys, rope: Rope, *, freq_base: float = 0.0, freq_scale: float = 0.0) -> Rope:
    """The rotary embedding of layers with a window: as `rope`, with the base and the stretch of the file.

    What a user wants of both is for the other layers alone. `freq_base` and `freq_scale` are for files that do not give
    those of the window (0: as the other layers').
    """
    base = keys.float_("rope.freq_base_swa", freq_base or _trained_base(keys))
    return replace(rope, freq_base=base, freq_scale=freq_scale or _trained_scale(keys))


def trained_base(keys: Keys, rope: Rope, freq_base: float) -> Rope:
    """The rotary embedding of an architecture that has its base from elsewhere, unless the user wants another."""
    return replace(rope, freq_base=keys.rope.freq_base or freq_base)


def _rope_type(keys: Keys) -> str:
    kind = keys.str_("rope.scaling.type", "linear")
    if kind not in ROPE_TYPES:
        raise UnsupportedModel(
            f"metadata key '{keys.name('rope.scaling.type')}' is '{kind}'; {', '.join(ROPE_TYPES[:-1])} and "
            f"{ROPE_TYPES[-1]} are known here"
        )
    return kind


def _trained_base(keys: Keys) -> float:
    return keys.float_("rope.freq_base", 10000.0)


def _trained_scale(keys: Keys) -> float:
    """What the file multiplies positions by, rounded to float32."""
    factor = keys.float_("rope.scaling.factor", 0.0) or keys.float_("rope.scale_linear", 0.0)
    return 1.0 if factor == 0 else float(np.float32(1) / np.float32(factor))


def _context_length(keys: Keys, n_ctx_train: int, rope: Rope) -> int:
    """Tokens that a model was made for; another stretch by YaRN than the file's makes it another."""
    kind = keys.rope.scaling or _rope_type(keys)
    if kind != "yarn" or rope.freq_scale == _trained_scale(keys):
        return n_ctx_train
    return int(np.float32(rope.n_ctx_orig) / np.float32(rope.freq_scale))


def read_swa_layers(keys: Keys, n_layer: int, period: int, *, dense_first: bool = False) -> tuple[bool, ...]:
    """Which layers have the sliding window: a list in the file, or all but every n-th (default: `period`-th).

    `dense_first`: of each n the first has none, not the last.
    """
    suffix = "attention.sliding_window_pattern"
    if keys.has(suffix) and not keys.is_int(suffix):
        return keys.metadata.bools(keys.name(suffix), n=n_layer)
    period = keys.int_(suffix, period)
    return tuple(period == 0 or i % period != (0 if dense_first else period - 1) for i in range(n_layer))


def sectioned(keys: Keys, mode: RopeMode) -> RopeMode:
    """The rotation of text where images have places of several dimensions (M-RoPE, arXiv 2409.12191), else `mode`.

    Time, height and width of a token of text are its position: what is left is the order of pairs, which is NEOX's.
    Raises UnsupportedModel where pairs are turned by the fourth dimension, which is 0 in text.
    """
    key = keys.name("rope.dimension_sections")
    sections = keys.metadata.ints(key, ())
    if len(sections) < 2 or sections[0] <= 0 or sections[1] <= 0:
        return mode
    if len(sections) > 3 and sections[3]:
        raise UnsupportedModel(f"metadata key '{key}' is {list(sections)}; places of up to three dimensions run here")
    return RopeMode.NEOX


def interleaved(keys: Keys, rope: Rope) -> Rope:
    """The rotation of text where pairs are turned by time, height and width in turns (Qwen3-VL, arXiv 2511.21631).

    All three are a text's positions. What none of them turns llama.cpp leaves to a fourth, which is 0 in text
    (ggml_mrope_cache_init). Raises GgufError or InvalidModel.
    """
    key = keys.name("rope.dimension_sections")
    sections = keys.metadata.ints(key)
    if not 3 <= len(sections) <= 4 or min(sections) < 0 or not sum(sections):
        raise InvalidModel(f"metadata key '{key}' is {list(sections)}; three or four numbers of pairs are expected")
    n = sum(sections)
    still = tuple(i for i in range(rope.n_dims // 2) if i % n >= 3 * sections[i % n % 3])
    return replace(rope, mode=RopeMode.NEOX, still=still)


def read_pooling(keys: Keys) -> Pooling | None:
    """How the file wants vectors of tokens pooled; None where it says nothing."""
    if not keys.has("pooling_type"):
        return None
    value = keys.int_("pooling_type")
    try:
        return Pooling(value)
    except ValueError:
        raise UnsupportedModel(
            f"metadata key '{keys.name('pooling_type')}' is {value}; known are "
            + ", ".join(f"{p.value} ({p.name.lower()})" for p in Pooling)
        ) from None


def read_experts(
    keys: Keys,
    n_ff: int,
    *,
    gating: Gating = Gating.SOFTMAX,
    normalised: bool = False,
    from_file: bool = False,
    per_layer: bool = False,
) -> Experts:
    """The mixture of a file's layers.

    `n_ff` is the width of an expert where the file names none. Experts are weighted as `gating` and `normalised` say;
    with `from_file`, as the file says where it does. `per_layer`: each layer may have its own width, and use as many as
    it says: here are the greatest. Raises GgufError, InvalidModel or UnsupportedModel, naming the
    key.
    """
    n, n_used = keys.int_("expert_count"), 0 if per_layer else keys.int_("expert_used_count")
    if per_layer:
        n_blocks = keys.int_("block_count")
        n_used = max(keys.per_layer("expert_used_count", n_blocks))
        n_ff = max(keys.per_layer("expert_feed_forward_length", n_blocks, (n_ff,)))
    n_groups, n_groups_used = keys.int_("expert_group_count", 0), keys.int_("expert_group_used_count", 0)
    if not 0 < n_used <= n:
        raise InvalidModel(
            f"metadata keys '{keys.name('expert_count')}' and '{keys.name('expert_used_count')}' are {n} and {n_used}; "
            "a token goes through at least one expert, and at most through all"
        )
    if n_groups > 1 and (n % n_groups or n // n_groups < 2 or not 0 < n_groups_used < n_groups):
        raise InvalidModel(
            f"metadata keys '{keys.name('expert_group_count')}' and '{keys.name('expert_group_used_count')}' are "
            f"{n_groups} and {n_groups_used} for {n} experts; equal groups of two or more are expected, and fewer used"
        )
    if n_groups > 1 and n_used > n // n_groups * n_groups_used:
        raise InvalidModel(
            f"metadata key '{keys.name('expert_used_count')}' is {n_used}; the groups that are used have "
            f"{n // n_groups * n_groups_used} experts"
        )
    factor = 1.0
    if from_file:
        gating = _read_gating(keys, gating)
        normalised = keys.bool_("expert_weights_norm", normalised)
        factor = keys.float_("expert_weights_scale", 0.0) or 1.0
    return Experts(
        n=n,
        n_used=n_used,
        n_ff=n_ff if per_layer else keys.int_("expert_feed_forward_length", 0) or n_ff,
        gating=gating,
        normalised=normalised,
        scale=factor,
        n_groups=n_groups,
        n_groups_used=n_groups_used,
        n_shared=keys.int_("expert_shared_count", 0),
        n_ff_shared=keys.int_("expert_shared_feed_forward_length", 0),
        n_dense_layers=0 if keys.n_heads else keys.int_("leading_dense_block_count", 0),
    )


def _read_gating(keys: Keys, default: Gating) -> Gating:
    value = keys.int_("expert_gating_func", 0)
    if not value:
        return default
    try:
        return Gating(value)
    except ValueError:
        raise UnsupportedModel(
            f"metadata key '{keys.name('expert_gating_func')}' is {value}; known are "
            + ", ".join(f"{g.value} ({g.name.lower()})" for g in Gating)
        ) from None


def read_hparams(
    keys: Keys,
    *,
    n_vocab: int,
    rope_mode: RopeMode,
    embedding_scale: float = 1.0,
    norm_eps: str = "attention.layer_norm_rms_epsilon",
    file_betas: bool = False,
    recurrent: bool = False,
    unturned: bool = False,
) -> HyperParameters:
    """The hyper-parameters every model has; an architecture replaces those it treats otherwise.

    `norm_eps` names the key of the norms' epsilon; `file_betas`: see read_rope. With `recurrent` layers may have no
    heads of keys and values, no heads at all, or no feed-forward network; with `unturned` perhaps no part of a head is
    turned. Raises GgufError (missing key, wrong type), InvalidModel (impossible value) or UnsupportedModel, naming the
    key.
    """
    n_layer = n_blocks = keys.int_("block_count")
    n_nextn = keys.int_("nextn_predict_layers", 0)
    if n_nextn >= n_layer:
        raise InvalidModel(
            f"metadata key '{keys.name('nextn_predict_layers')}' is {n_nextn}; fewer than the {n_layer} layers are "
            "expected"
        )
    if keys.n_heads and not n_nextn:
        raise InvalidModel("the file has no block that predicts tokens beyond the next one")
    n_embd = keys.int_("embedding_length")
    n_head = keys.per_layer("attention.head_count", n_blocks, or_none=recurrent)
    n_head_kv = keys.per_layer("attention.head_count_kv", n_blocks, n_head, or_none=recurrent)
    for layer, (heads, heads_kv) in enumerate(zip(n_head, n_head_kv, strict=True)):
        if heads_kv and heads % heads_kv:
            raise InvalidModel(
                f"metadata key '{keys.name('attention.head_count_kv')}' gives layer {layer} {heads_kv} heads for "
                f"{heads} query heads; a divisor is expected"
            )
    if max(n_head) > n_embd:
        raise InvalidModel(
            f"metadata key '{keys.name('attention.head_count')}' is {max(n_head)}; no more than the width, "
            f"{n_embd}, are possible"
        )
    heads = n_head[0] or max(n_head)
    head_dim = n_embd // heads if heads else 0
    head_dim_k = keys.int_("attention.key_length", head_dim)
    head_dim_v = keys.int_("attention.value_length", head_dim)
    n_ctx_train = keys.int_("context_length")
    rope = read_rope(keys, head_dim_k, n_ctx_train, rope_mode, file_betas=file_betas, or_none=unturned)
    mixture = keys.int_("expert_count", 0) > 0
    return HyperParameters(
        architecture=keys.architecture,
        n_layer=min(keys.n_heads, n_nextn) or n_layer - n_nextn,
        n_embd=n_embd,
        n_head=keys.own(n_head),
        n_head_kv=keys.own(n_head_kv),
        head_dim_k=head_dim_k,
        head_dim_v=head_dim_v,
        # In a mixture the experts' own width may be all there is.
        n_ff=keys.own(
            keys.per_layer(
                "feed_forward_length", n_blocks, (0,) * n_blocks if mixture or recurrent else None, or_none=recurrent
            )
        ),
        n_nextn=n_nextn,
        first_block=n_layer - n_nextn if keys.n_heads else 0,
        n_vocab=n_vocab,
        n_ctx_train=_context_length(keys, n_ctx_train, rope),
        n_ctx_short=keys.int_("rope.scaling.original_context_length", n_ctx_train),
        norm_eps=keys.float_(norm_eps),
        rope=rope,
        attention_scale=inverse_sqrt(head_dim_k) if head_dim_k else 0.0,
        embedding_scale=embedding_scale,
        causal=keys.bool_("attention.causal", True),
        pooling=read_pooling(keys),
    )
