"""Hyper-parameters: the shape of a model, read from GGUF metadata (key names: llama-arch.cpp)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from enum import IntEnum
from math import log
from typing import NamedTuple

import numpy as np

from llamado.ggml.ops import RopeMode
from llamado.gguf.metadata import Metadata
from llamado.models.errors import InvalidModel, UnsupportedModel
from llamado.models.keys import Keys


class Pooling(IntEnum):
    """Pooling of token vectors into one vector per text (`llama_pooling_type`).

    RANK is a classifier's score of one of them.
    """

    NONE = 0
    MEAN = 1
    CLS = 2
    LAST = 3
    RANK = 4


class PositionSections(NamedTuple):
    """M-RoPE: the multi-section mode, and the number of pairs for each of the four dimensions of a position."""

    mode: RopeMode
    lengths: tuple[int, int, int, int]


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary embedding of a kind of layer; parameters as in `ggml.graph.rope_ext`.

    The pairs in `fixed_pairs` are not rotated. `sections`: rotation by multi-dimensional positions, which batches of
    embeddings have; `mode` and `fixed_pairs` give the same result for text.
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
    fixed_pairs: tuple[int, ...] = ()
    sections: PositionSections | None = field(default=None, repr=False)


class Temperature(NamedTuple):
    """Position-dependent factor of queries: log(⌊(position + offset) / length⌋ + 1) · scale + 1 (Llama 4)."""

    scale: float
    length: int
    offset: float = 0.0


class Gating(IntEnum):
    """Function that turns router logits into expert weights (`llama_expert_gating_func_type`)."""

    SOFTMAX = 1
    SIGMOID = 2
    SOFTMAX_WEIGHT = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """Sizes of a mixture of experts: each token uses `n_used` of `n` experts with hidden width `n_ff`.

    Router weights are computed by `gating`, divided by their sum if `normalized`, and multiplied by `scale`. If
    `n_groups` > 1, experts are selected only from the best `n_groups_used` groups. Every token also uses `n_shared`
    shared experts, or one of width `n_ff_shared`. The first `n_dense_layers` layers have no experts.
    """

    n: int
    n_used: int
    n_ff: int
    gating: Gating
    normalized: bool
    scale: float
    n_groups: int
    n_groups_used: int
    n_shared: int
    n_ff_shared: int
    n_dense_layers: int


@dataclass(frozen=True, slots=True)
class HyperParameters:
    """Sizes and constants of a model. Tuples have one entry per layer.

    - `n_swa`: width of the sliding window in tokens (0: none); `swa_layers`: the layers that have it. There a token at
      position p sees positions p - n_swa + 1 to p, or with `swa_symmetric` half of `n_swa` to each side. `rope_swa` is
      the rotary embedding of those layers.
    - `n_ctx_short`: longest context that uses LongRoPE's short factors.
    - `norm_eps`: added to the mean square or the variance by the norms.
    - `experts`: sizes of the mixture of experts, if the feed-forward networks are one.
    - `embedding_scale`, `residual_scale`, `logit_scale`: factors of embeddings, block outputs and logits.
    - `attention_softcap`, `final_logit_softcap`: x becomes cap · tanh(x / cap).
    - `clamp_kqv`: maximum magnitude of queries, keys and values; 0: none. `max_alibi_bias`: slope of ALiBi; 0: none.
    - `causal`: False if a token sees the whole text.
    - `pooling`: the file's pooling type, if any.
    - `n_nextn`: number of multi-token prediction blocks after the layers; see heads/.
    - `first_block`: the file's block that layer 0 is.
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
    clamp_kqv: float = 0.0
    max_alibi_bias: float = 0.0
    causal: bool = True
    pooling: Pooling | None = None
    experts: Experts | None = None
    n_nextn: int = 0
    first_block: int = 0

    def n_embd_k(self, layer: int) -> int:
        """Return the number of elements of one token's keys in a layer."""
        return self.head_dim_k * self.n_head_kv[layer]

    def n_embd_v(self, layer: int) -> int:
        """Return the number of elements of one token's values in a layer."""
        return self.head_dim_v * self.n_head_kv[layer]

    def is_swa(self, layer: int) -> bool:
        """Return True if a layer has sliding-window attention."""
        return bool(self.swa_layers) and self.swa_layers[layer]

    def rope_of(self, layer: int) -> Rope:
        """Return the rotary embedding of a layer."""
        return self.rope_swa if self.rope_swa is not None and self.is_swa(layer) else self.rope


def override_metadata(metadata: Metadata, values: Iterable[tuple[str, int | float | bool | str]]) -> Metadata:
    """Return the metadata with other values; `{arch}` in a key stands for the architecture. Raises GgufError."""
    architecture = metadata.str_("general.architecture", "")
    return metadata.with_values({key.replace("{arch}", architecture): value for key, value in values})


def inverse_sqrt(n: int) -> float:
    """Return 1 / sqrt(n), rounded to float32 at each step as C++ does with floats."""
    return float(np.float32(1) / np.sqrt(np.float32(n)))


ROPE_TYPES = ("none", "linear", "yarn", "longrope")
"""Context extension methods (`llama_rope_scaling_type`). LongRoPE only uses frequency factors."""


def rope_dims(keys: Keys, suffix: str, default: int, head_dim: int, *, allow_zero: bool = False) -> int:
    """Read the number of rotated elements of a head; with `allow_zero`, or if there are no heads, it may be 0.

    Raises GgufError or InvalidModel.
    """
    n = keys.int_(suffix, default)
    if n > head_dim or n % 2 or not (n or allow_zero or not head_dim):
        raise InvalidModel(f"metadata key '{keys.name(suffix)}' is {n}; an even number up to {head_dim} is expected")
    return n


def read_rope(
    keys: Keys,
    head_dim: int,
    n_ctx_train: int,
    mode: RopeMode,
    *,
    read_yarn_betas: bool = False,
    allow_zero: bool = False,
) -> Rope:
    """Read the rotary embedding of the global layers from the file and the user's overrides (llama-context.cpp).

    With `read_yarn_betas`, YaRN's ramp boundaries are read from the file; for most architectures llama.cpp ignores
    them. `allow_zero`: see `rope_dims`. Raises GgufError, InvalidModel or UnsupportedModel.
    """
    wanted = keys.rope
    wanted.check()
    n_dims = rope_dims(keys, "rope.dimension_count", head_dim, head_dim, allow_zero=allow_zero)
    kind = wanted.scaling or _rope_type(keys)
    freq_scale = 1.0 if kind == "none" else wanted.freq_scale or _trained_scale(keys)
    ext_factor = wanted.ext_factor
    if ext_factor < 0:
        ext_factor = 1.0 if kind == "yarn" else 0.0
    attn_factor = 1.0 if wanted.attn_factor < 0 else wanted.attn_factor
    if ext_factor:
        # ROPE itself multiplies by 1 + 0.1 ln(factor); this factor cancels it.
        stretch = 1.0 / freq_scale
        magnitude = 1.0 if stretch <= 1.0 else 0.1 * log(stretch) + 1.0
        attn_factor = float(np.float32(magnitude / (1.0 + 0.1 * log(stretch))))
    fast, slow = 32.0, 1.0
    if read_yarn_betas:
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


def yarn_attention_factor(rope: Rope, multiplier: float) -> float:
    """Return YaRN's attention factor for its context extension: 0.1 · multiplier · ln(stretch) + 1."""
    stretch = 1.0 / rope.freq_scale
    return 1.0 if stretch <= 1.0 else 0.1 * multiplier * log(stretch) + 1.0


def swa_rope(keys: Keys, rope: Rope, *, freq_base: float = 0.0, freq_scale: float = 0.0) -> Rope:
    """Return the rotary embedding of sliding-window layers: `rope` with the file's base and scale.

    The user's base and scale apply to the other layers only. `freq_base` and `freq_scale` are the defaults if the file
    has none for the window (0: as in the other layers).
    """
    base = keys.float_("rope.freq_base_swa", freq_base or _trained_base(keys))
    return replace(rope, freq_base=base, freq_scale=freq_scale or _trained_scale(keys))


def override_freq_base(keys: Keys, rope: Rope, freq_base: float) -> Rope:
    """Return `rope` with an architecture's own base, unless the user overrides it."""
    return replace(rope, freq_base=keys.rope.freq_base or freq_base)


def _rope_type(keys: Keys) -> str:
    kind = keys.str_("rope.scaling.type", "linear")
    if kind not in ROPE_TYPES:
        raise UnsupportedModel(
            f"metadata key '{keys.name('rope.scaling.type')}' is '{kind}'; {', '.join(ROPE_TYPES[:-1])} and "
            f"{ROPE_TYPES[-1]} are supported"
        )
    return kind


def _trained_base(keys: Keys) -> float:
    return keys.float_("rope.freq_base", 10000.0)


def _trained_scale(keys: Keys) -> float:
    """Return the file's factor of positions, rounded to float32."""
    factor = keys.float_("rope.scaling.factor", 0.0) or keys.float_("rope.scale_linear", 0.0)
    return 1.0 if factor == 0 else float(np.float32(1) / np.float32(factor))


def _context_length(keys: Keys, n_ctx_train: int, rope: Rope) -> int:
    """Return the training context length, adjusted if the user's YaRN scale differs from the file's."""
    kind = keys.rope.scaling or _rope_type(keys)
    if kind != "yarn" or rope.freq_scale == _trained_scale(keys):
        return n_ctx_train
    return int(np.float32(rope.n_ctx_orig) / np.float32(rope.freq_scale))


def read_swa_layers(keys: Keys, n_layer: int, period: int, *, dense_first: bool = False) -> tuple[bool, ...]:
    """Return which layers have the sliding window: a list in the file, or all but every n-th (default: `period`-th).

    With `dense_first`, the first layer of each n has no window instead of the last.
    """
    suffix = "attention.sliding_window_pattern"
    if keys.has(suffix) and not keys.is_int(suffix):
        return keys.metadata.bools(keys.name(suffix), n=n_layer)
    period = keys.int_(suffix, period)
    return tuple(period == 0 or i % period != (0 if dense_first else period - 1) for i in range(n_layer))


def with_window(
    keys: Keys,
    hp: HyperParameters,
    period: int,
    *,
    rope: Rope | None = None,
    optional: bool = False,
    dense_first: bool = False,
) -> HyperParameters:
    """Return `hp` with the file's sliding window in the layers of `read_swa_layers`, rotated by `rope`.

    With `optional`, the file may have no window. Raises GgufError or InvalidModel.
    """
    n_swa = keys.int_("attention.sliding_window", 0 if optional else None)
    if optional and not n_swa:
        return hp
    layers = read_swa_layers(keys, hp.n_layer, period, dense_first=dense_first)
    return replace(hp, n_swa=n_swa, swa_layers=layers, rope_swa=rope)


def mrope_text_mode(keys: Keys, mode: RopeMode) -> RopeMode:
    """Return the rope mode for text in models with multi-dimensional positions (M-RoPE, arXiv 2409.12191), else `mode`.

    Time, height and width of a text token all equal its position, so only the order of pairs remains, which is NEOX's.
    """
    sections = keys.metadata.ints(keys.name("rope.dimension_sections"), ())
    return mode if len(sections) < 2 or sections[0] <= 0 or sections[1] <= 0 else RopeMode.NEOX


def with_sections(keys: Keys, rope: Rope, mode: RopeMode) -> Rope:
    """Return the rope with the file's sections for multi-dimensional positions; unchanged if it has none.

    `mode`: how pairs are assigned to sections, MROPE or IMROPE. Pairs of a fourth section do not rotate in text, whose
    fourth position is 0. Raises GgufError or InvalidModel.
    """
    key = keys.name("rope.dimension_sections")
    lengths = keys.metadata.ints(key, ())
    if len(lengths) < 2 or min(lengths[:2]) <= 0:
        return rope
    a, b, c, d = (*lengths, 0, 0)[:4]
    if min(c, d) < 0:
        raise InvalidModel(f"metadata key '{key}' is {list(lengths)}; numbers of pairs are expected")
    n = a + b + c + d
    fixed_pairs = tuple(i for i in range(rope.n_dims // 2) if i % n >= n - d)
    return replace(rope, fixed_pairs=fixed_pairs, sections=PositionSections(mode, (a, b, c, d)))


def interleaved_mrope(keys: Keys, rope: Rope) -> Rope:
    """Return the rope for text in models with interleaved M-RoPE (Qwen3-VL, arXiv 2511.21631).

    Pairs alternate between time, height and width, which all equal a text token's position. llama.cpp leaves the
    remaining pairs to a fourth dimension, which is 0 in text (ggml_mrope_cache_init), so they do not rotate. Raises
    GgufError or InvalidModel.
    """
    key = keys.name("rope.dimension_sections")
    sections = keys.metadata.ints(key)
    if not 3 <= len(sections) <= 4 or min(sections) < 0 or not sum(sections):
        raise InvalidModel(f"metadata key '{key}' is {list(sections)}; three or four numbers of pairs are expected")
    n = sum(sections)
    fixed_pairs = tuple(i for i in range(rope.n_dims // 2) if i % n >= 3 * sections[i % n % 3])
    a, b, c, d = (*sections, 0)[:4]
    multi = PositionSections(RopeMode.IMROPE, (a, b, c, d))
    return replace(rope, mode=RopeMode.NEOX, fixed_pairs=fixed_pairs, sections=multi)


def read_pooling(keys: Keys) -> Pooling | None:
    """Return the file's pooling type; None if it has none."""
    if not keys.has("pooling_type"):
        return None
    value = keys.int_("pooling_type")
    try:
        return Pooling(value)
    except ValueError:
        raise UnsupportedModel(
            f"metadata key '{keys.name('pooling_type')}' is {value}; supported are "
            + ", ".join(f"{p.value} ({p.name.lower()})" for p in Pooling)
        ) from None


class RouterKind(NamedTuple):
    """Mixture of experts of an architecture: the router's gating, and whether its weights are divided by their sum.

    With `from_file`, these are defaults for the file's values. With `split_width`, the default width of an expert is
    the layer's width divided by the number of experts used. With `optional`, files may have no experts.
    """

    gating: Gating = Gating.SOFTMAX
    normalized: bool = False
    from_file: bool = False
    split_width: bool = False
    optional: bool = False

    def read(self, keys: Keys, n_ff: int) -> Experts | None:
        """Read the sizes of the experts, in layers of width `n_ff`.

        Raises GgufError, InvalidModel or UnsupportedModel.
        """
        if self.optional and not keys.has_experts():
            return None
        if self.split_width:
            n_ff //= max(keys.int_("expert_used_count"), 1)
        return read_experts(keys, n_ff, gating=self.gating, normalized=self.normalized, from_file=self.from_file)


def read_experts(
    keys: Keys,
    n_ff: int,
    *,
    gating: Gating = Gating.SOFTMAX,
    normalized: bool = False,
    from_file: bool = False,
    per_layer: bool = False,
) -> Experts:
    """Read the sizes of a mixture of experts.

    `n_ff` is the default width of an expert. `gating` and `normalized` are the architecture's; with `from_file` they
    are defaults. With `per_layer`, each layer may have its own width and number of used experts; the result has the
    maxima. Raises GgufError, InvalidModel or UnsupportedModel, naming the key.
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
            "a token uses between one and all of the experts"
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
        normalized = keys.bool_("expert_weights_norm", normalized)
        factor = keys.float_("expert_weights_scale", 0.0) or 1.0
    return Experts(
        n=n,
        n_used=n_used,
        n_ff=n_ff if per_layer else keys.int_("expert_feed_forward_length", 0) or n_ff,
        gating=gating,
        normalized=normalized,
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
            f"metadata key '{keys.name('expert_gating_func')}' is {value}; supported are "
            + ", ".join(f"{g.value} ({g.name.lower()})" for g in Gating)
        ) from None


def read_hparams(
    keys: Keys,
    *,
    n_vocab: int,
    rope_mode: RopeMode,
    norm_eps: str = "attention.layer_norm_rms_epsilon",
    read_yarn_betas: bool = False,
    recurrent: bool = False,
    allow_no_rope: bool = False,
) -> HyperParameters:
    """Read the hyper-parameters common to all models; an architecture replaces those it treats differently.

    `norm_eps` is the key of the norms' epsilon; `read_yarn_betas`: see `read_rope`. With `recurrent`, layers may have
    no KV heads, no heads at all, or no feed-forward network; with `allow_no_rope`, no part of a head need be rotated.
    Raises GgufError (missing key, wrong type), InvalidModel (impossible value) or UnsupportedModel, naming the key.
    """
    n_layer = n_blocks = keys.int_("block_count")
    n_nextn = keys.int_("nextn_predict_layers", 0)
    if n_nextn >= n_layer:
        raise InvalidModel(
            f"metadata key '{keys.name('nextn_predict_layers')}' is {n_nextn}; fewer than the {n_layer} layers are "
            "expected"
        )
    if keys.n_heads and not n_nextn:
        raise InvalidModel("the file has no multi-token prediction block")
    n_embd = keys.int_("embedding_length")
    n_head = keys.per_layer("attention.head_count", n_blocks, allow_zero=recurrent)
    n_head_kv = keys.per_layer("attention.head_count_kv", n_blocks, n_head, allow_zero=recurrent)
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
    rope = read_rope(
        keys, head_dim_k, n_ctx_train, rope_mode, read_yarn_betas=read_yarn_betas, allow_zero=allow_no_rope
    )
    mixture = keys.int_("expert_count", 0) > 0
    return HyperParameters(
        architecture=keys.architecture,
        n_layer=min(keys.n_heads, n_nextn) or n_layer - n_nextn,
        n_embd=n_embd,
        n_head=keys.of_layers(n_head),
        n_head_kv=keys.of_layers(n_head_kv),
        head_dim_k=head_dim_k,
        head_dim_v=head_dim_v,
        # A mixture of experts may only give the experts' width.
        n_ff=keys.of_layers(
            keys.per_layer(
                "feed_forward_length", n_blocks, (0,) * n_blocks if mixture or recurrent else None, allow_zero=recurrent
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
        causal=keys.bool_("attention.causal", True),
        pooling=read_pooling(keys),
    )
