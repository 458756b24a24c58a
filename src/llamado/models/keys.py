"""Typed access to an architecture's metadata keys, with a valid range for each value."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from llamado.gguf.metadata import Metadata
from llamado.models.errors import InvalidModel

N = TypeVar("N", int, float)
T = TypeVar("T")

_INT32 = 2**31 - 1
MOST_LAYERS = 512  # LLAMA_MAX_LAYERS, llama-hparams.h
_EXPERTS = 1024  # LLAMA_MAX_EXPERTS, llama-hparams.h


class Range(NamedTuple):
    """Valid range of a hyper-parameter, and the reason for its bounds.

    With `or_zero`, 0 is also valid and means "not given".
    """

    low: float
    high: float
    source: str
    or_zero: bool = False

    def contains(self, value: float) -> bool:
        """Return True if a value is valid; NaN is not."""
        return self.low <= value <= self.high or (self.or_zero and value == 0)

    def __str__(self) -> str:
        return ("0, or " if self.or_zero else "") + f"{self.low:g} to {self.high:.10g}"


INTEGERS: dict[str, Range] = {
    "block_count": Range(1, MOST_LAYERS, "as many layers as llama.cpp has room for"),
    "embedding_length": Range(1, 2**20, "60 times the widest model's"),
    "feed_forward_length": Range(1, 2**24, "as the width, 16 times as much"),
    "context_length": Range(1, _INT32, "positions are I32"),
    "attention.head_count": Range(1, 2**16, "no head is narrower than 16 of the width"),
    "attention.head_count_kv": Range(1, 2**16, "as attention.head_count"),
    "attention.key_length": Range(1, 2**16, "100 times the widest head's"),
    "attention.value_length": Range(1, 2**16, "as attention.key_length"),
    "attention.key_length_mla": Range(1, 2**16, "as attention.key_length"),
    "attention.value_length_mla": Range(1, 2**16, "as attention.key_length"),
    "attention.key_length_mla_swa": Range(1, 2**16, "as attention.key_length"),
    "attention.value_length_mla_swa": Range(1, 2**16, "as attention.key_length"),
    "attention.kv_lora_rank_swa": Range(1, 2**16, "as attention.kv_lora_rank"),
    "attention.q_lora_rank": Range(0, 2**20, "as embedding_length"),
    "attention.kv_lora_rank": Range(1, 2**16, "a head of attention has as many elements"),
    "attention.temperature_length": Range(1, _INT32, "positions are I32"),
    "attention.indexer.head_count": Range(1, 2**16, "as attention.head_count"),
    "attention.indexer.key_length": Range(2, 2**16, "as attention.key_length"),
    "attention.indexer.kpool": Range(2, 256, "runs of cells begin at multiples of 256"),
    "attention.indexer.top_k": Range(1, _INT32, "a number of tokens"),
    "attention.indexer.block_size": Range(1, 2**16, "a number of tokens"),
    "attention.indexer.local_blocks": Range(0, _INT32, "a number of blocks"),
    "attention.key_length_swa": Range(1, 2**16, "as attention.key_length"),
    "attention.shared_kv_layers": Range(0, MOST_LAYERS, "as block_count"),
    "embedding_length_per_layer_input": Range(0, 2**20, "as embedding_length"),
    "rope.dimension_count_swa": Range(2, 2**16, "as attention.key_length"),
    "n_deepstack_layers": Range(0, MOST_LAYERS, "3 in use"),
    "nextn_predict_layers": Range(0, MOST_LAYERS, "as block_count"),
    "target_hidden_size": Range(1, 2**20, "as embedding_length"),
    "block_size": Range(2, 1024, "tokens that are drafted at once; 8 to 16 in use"),
    "tokenizer.ggml.mask_token_id": Range(0, _INT32, "tokens are I32"),
    "attention.relative_buckets_count": Range(4, 256, "a quarter is 1 to 64; 32 in use"),
    "attention.sliding_window": Range(0, _INT32, "positions are I32"),
    "attention.sliding_window_pattern": Range(0, MOST_LAYERS, "a number of layers"),
    "rope.dimension_count": Range(2, 2**16, "as attention.key_length", or_zero=True),
    "rope.scaling.original_context_length": Range(1, _INT32, "ROPE's op_params hold it as I32"),
    "expert_count": Range(0, _EXPERTS, "as many as llama.cpp has room for"),
    "expert_used_count": Range(0, _EXPERTS, "as expert_count"),
    "expert_shared_count": Range(0, _EXPERTS, "as expert_count"),
    "expert_group_count": Range(0, _EXPERTS, "as expert_count"),
    "expert_group_used_count": Range(0, _EXPERTS, "as expert_count"),
    "expert_feed_forward_length": Range(0, 2**24, "as feed_forward_length"),
    "expert_shared_feed_forward_length": Range(0, 2**24, "as feed_forward_length"),
    "experts_per_group": Range(1, _EXPERTS, "as expert_count"),
    "expert_chunk_feed_forward_length": Range(0, 2**24, "as feed_forward_length"),
    "expert_gating_func": Range(0, _INT32, "llama_expert_gating_func_type"),
    "leading_dense_block_count": Range(0, MOST_LAYERS, "a number of layers"),
    "interleave_moe_layer_step": Range(0, MOST_LAYERS, "a number of layers"),
    "num_loops": Range(1, MOST_LAYERS, "a number of layers"),
    "hrm.layers_per_stack": Range(1, MOST_LAYERS, "a number of layers"),
    "hrm.h_cycles": Range(1, MOST_LAYERS, "a number of layers"),
    "hrm.l_cycles": Range(1, MOST_LAYERS, "a number of layers"),
    "hyper_connection.count": Range(1, 64, "streams of hidden states; 4 in use"),
    "adapters.count": Range(1, 4096, "as llama.cpp's"),
    "adapters.lora_rank": Range(1, 4096, "as llama.cpp's"),
    "moe_every_n_layers": Range(0, MOST_LAYERS, "a number of layers"),
    "ssm.conv_kernel": Range(2, 16, "3 and 4 in use"),
    "ssm.inner_size": Range(1, 2**20, "as embedding_length"),
    "ssm.state_size": Range(1, 1024, "16 to 256 in use"),
    "ssm.time_step_rank": Range(1, 2**20, "as ssm.inner_size"),
    "ssm.group_count": Range(1, 2**16, "as attention.head_count"),
    "full_attention_interval": Range(1, MOST_LAYERS, "a number of layers"),
    "kda.head_dim": Range(1, 1024, "a state is a square of it; 128 in use"),
    "rescale_every_n_layers": Range(0, MOST_LAYERS, "a number of layers"),
    "shortconv.l_cache": Range(2, 16, "as ssm.conv_kernel"),
    "wkv.head_size": Range(1, 1024, "as kda.head_dim"),
    "hyper_connection.sinkhorn_iterations": Range(1, 256, "20 in use"),
    "hyper_connection.low_rank": Range(1, 2**20, "as embedding_length"),
    "ple.ngram_size": Range(2, 8, "3 in use"),
    "ple.heads_per_ngram": Range(1, 64, "as many as llama.cpp has room for"),
    "ple.conv_kernel": Range(2, 16, "as ssm.conv_kernel"),
    "ple.eos_token_id": Range(0, _INT32, "a token"),
    "ple.image_token_id": Range(0, _INT32, "a token"),
    "expert_latent_length": Range(0, 2**20, "as embedding_length"),
    "attn_res.block_size": Range(0, MOST_LAYERS, "a number of layers"),
    "moe_latent_size": Range(0, 2**20, "as embedding_length"),
    "pooling_type": Range(0, _INT32, "llama_pooling_type without the unspecified one"),
    "classifier.pooling_type": Range(-1, _INT32, "llama_pooling_type"),
    "tokenizer.ggml.token_type_count": Range(1, 2**16, "BERT has 2, RoBERTa 1"),
}
"""Integer keys, without the architecture prefix."""

_BASE = Range(2, 1e15, "YaRN divides by its logarithm; a million times the largest in use")
_STRETCH = Range(1e-4, 1e6, "its inverse and YaRN's 1 + 0.1 ln(factor) must be positive and finite", or_zero=True)
_STRENGTH = Range(1e-3, 1e3, "a factor of activations, about 1")
_FACTOR = Range(1e-6, 1e6, "a factor or divisor of what is about 1", or_zero=True)
_ROTATIONS = Range(1e-3, 1e6, "turns within the context, 1 and 32 in YaRN's paper; it takes their logarithm")
_LIMIT = Range(1e-5, 1e6, "the greatest factor in a gated activation; 7 to 16 in use", or_zero=True)
_CURVE = Range(-1e3, 1e3, "of an activation: 0.5 to 2 in use, and -1e-6")
_EPSILON = Range(0, 1, "added to a mean square of about 1")

FLOATS: dict[str, Range] = {
    "attention.layer_norm_rms_epsilon": _EPSILON,
    "attention.layer_norm_epsilon": _EPSILON,
    "attn_logit_softcapping": Range(1e-3, 1e6, "products are divided by it; 50 in use", or_zero=True),
    "final_logit_softcapping": Range(1e-3, 1e6, "logits are divided by it; 30 in use", or_zero=True),
    "expert_weights_scale": Range(1e-3, 1e3, "a factor of activations; 2.5 in use", or_zero=True),
    "expert_group_scale": Range(1e-3, 1e3, "as expert_weights_scale; 0.05 in use", or_zero=True),
    "hyper_connection.epsilon": _EPSILON,
    "hyper_connection.magnitude": _STRENGTH,
    "adapters.router_gain": Range(1e-3, 1e3, "e to the power of it is a weight; 15 in use"),
    "attention.scale": _FACTOR,
    "kda.gate_lower_bound": Range(-1e3, -1e-3, "the logarithm of the least decay; -5 in use"),
    "attention.output_scale": _FACTOR,
    "attention.value_scale": _FACTOR,
    "attention.clamp_kqv": Range(1e-3, 1e6, "the greatest magnitude of queries and keys; 8 in use", or_zero=True),
    "attention.max_alibi_bias": Range(1e-3, 1e3, "a factor of distances; 8 in use", or_zero=True),
    "activation.situ_beta": Range(1e-3, 1e6, "activations are divided by it; about 4 in use"),
    "activation.situ_linear_beta": Range(1e-3, 1e6, "as activation.situ_beta", or_zero=True),
    "swiglu_clamp_exp": _LIMIT,
    "swiglu_clamp_shexp": _LIMIT,
    "embedding_scale": _FACTOR,
    "residual_scale": _FACTOR,
    "logit_scale": _FACTOR,
    "attention.temperature_scale": Range(1e-3, 1e3, "a factor of a logarithm; 0.1 in use", or_zero=True),
    "rope.freq_base": _BASE,
    "rope.freq_base_swa": _BASE,
    "rope.global.freq_base": _BASE,
    "rope.local.freq_base": _BASE,
    "rope.scaling.factor": _STRETCH,
    "rope.scale_linear": _STRETCH,
    "rope.scaling.alpha": Range(1e-3, 1e6, "a power of it multiplies rope.freq_base; 1000 in use", or_zero=True),
    "rope.scaling.attn_factor": _STRENGTH,
    "rope.scaling.yarn_log_multiplier": Range(1e-3, 1e3, "a factor of a logarithm; 0.1 in use", or_zero=True),
    "xielu.alpha_n": _CURVE,
    "xielu.alpha_p": _CURVE,
    "xielu.beta": _CURVE,
    "xielu.eps": _CURVE,
    "rope.scaling.yarn_ext_factor": Range(-1, 1e3, "0 to 1 in use, less than 0: by the type"),
    "rope.scaling.yarn_attn_factor": Range(-1, 1e3, "a factor of activations, less than 0: 1"),
    "rope.scaling.yarn_beta_fast": _ROTATIONS,
    "rope.scaling.yarn_beta_slow": _ROTATIONS,
    "adapter.lora.alpha": Range(1e-6, 1e6, "divided by the rank it scales an adapter; about the rank", or_zero=True),
}
"""Float keys, without the architecture prefix."""

BOOLS = (
    "attention.causal", "attention.indexer.kpool_select_tail", "expert_weights_norm", "rope.scaling.finetuned",
    "ssm.dt_b_c_rms", "skip_loop_final_norm", "use_parallel_residual", "norm_before_residual", "norm_before_fc",
)  # fmt: skip
STRINGS = ("hidden_activation", "rope.scaling.type")


@dataclass(frozen=True, slots=True)
class RopeOptions:
    """User overrides of a file's rotary embedding (llama.cpp's `--rope-*`, `--yarn-*`).

    `scaling` is none, linear or yarn. None, 0 and, for the last four fields, a negative number keep the file's value.
    """

    scaling: str | None = None
    freq_base: float = 0.0
    freq_scale: float = 0.0
    n_ctx_orig: int = 0
    ext_factor: float = -1.0
    attn_factor: float = -1.0
    beta_fast: float = -1.0
    beta_slow: float = -1.0

    def check(self) -> None:
        """Raise InvalidModel if a value is out of range."""
        for name, value, nothing, possible in (
            ("base of the frequencies", self.freq_base, 0.0, _BASE),
            ("factor of the frequencies", self.freq_scale, 0.0, Range(1e-6, 1e4, "the inverse of a stretch")),
            ("original context", self.n_ctx_orig, 0, INTEGERS["rope.scaling.original_context_length"]),
            ("YaRN's share", self.ext_factor, -1.0, Range(0, 1e3, "0 to 1 in use")),
            ("YaRN's factor of attention", self.attn_factor, -1.0, _STRENGTH),
            ("YaRN's beta_fast", self.beta_fast, -1.0, _ROTATIONS),
            ("YaRN's beta_slow", self.beta_slow, -1.0, _ROTATIONS),
        ):
            if value != nothing and not possible.contains(value):
                raise InvalidModel(f"rotary embedding: {name} is {value:g}; {possible} is expected")


FILE_ROPE = RopeOptions()
"""No overrides."""


class Keys:
    """Metadata of one architecture: `keys.int_("block_count")` reads `llama.block_count` of a llama file.

    Only keys in the tables of this module can be read, so every value that a model is built from has a range. `rope`
    holds the user's overrides.
    """

    def __init__(self, metadata: Metadata, rope: RopeOptions = FILE_ROPE, *, n_heads: int = 0) -> None:
        """With `n_heads`, the model is the first `n_heads` multi-token prediction blocks after the layers."""
        self.metadata, self.rope, self.n_heads = metadata, rope, n_heads
        self.architecture = metadata.str_("general.architecture")

    def of_layers(self, blocks: tuple[T, ...]) -> tuple[T, ...]:
        """Select the model's layers from values of all blocks of the file."""
        n = len(blocks) - self.int_("nextn_predict_layers", 0)
        return blocks[n : n + self.n_heads] if self.n_heads else blocks[:n]

    def name(self, suffix: str) -> str:
        """Return the full name of a key."""
        return suffix if suffix.startswith(("tokenizer.", "adapter.", "xielu.")) else f"{self.architecture}.{suffix}"

    def has(self, suffix: str) -> bool:
        """Return True if the file has the key."""
        return self.name(suffix) in self.metadata

    def has_experts(self) -> bool:
        """Return True if the file is a mixture of experts."""
        return self.int_("expert_count", 0) > 0

    def is_int(self, suffix: str) -> bool:
        """Return True if the key holds one integer rather than an array."""
        value = self.metadata.get(self.name(suffix))
        return isinstance(value, int) and not isinstance(value, bool)

    def int_(self, suffix: str, default: int | None = None) -> int:
        """Return an integer; required unless there is a default. Raises GgufError or InvalidModel."""
        key = self.name(suffix)
        value = self.metadata.int_(key) if default is None else self.metadata.int_(key, default)
        return value if value is default else self._checked(suffix, value, INTEGERS[suffix])

    def float_(self, suffix: str, default: float | None = None) -> float:
        """Return a number; required unless there is a default. Raises GgufError or InvalidModel."""
        key = self.name(suffix)
        value = self.metadata.float_(key) if default is None else self.metadata.float_(key, default)
        return value if value is default else self._checked(suffix, value, FLOATS[suffix])

    def bool_(self, suffix: str, default: bool | None = None) -> bool:
        """Return a bool; required unless there is a default. Raises GgufError."""
        assert suffix in BOOLS
        key = self.name(suffix)
        return self.metadata.bool_(key) if default is None else self.metadata.bool_(key, default)

    def str_(self, suffix: str, default: str) -> str:
        """Return a string. Raises GgufError."""
        assert suffix in STRINGS
        return self.metadata.str_(self.name(suffix), default)

    def per_layer(
        self, suffix: str, n_layer: int, default: tuple[int, ...] | None = None, *, allow_zero: bool = False
    ) -> tuple[int, ...]:
        """Return one integer per layer, from a scalar or an array; with `allow_zero`, 0 is valid.

        Raises GgufError or InvalidModel.
        """
        key = self.name(suffix)
        values = self.metadata.ints(key, n=n_layer) if default is None else self.metadata.ints(key, default, n=n_layer)
        for value in values if values is not default else ():
            self._checked(suffix, value, INTEGERS[suffix]._replace(or_zero=allow_zero or INTEGERS[suffix].or_zero))
        return values

    def floats_per_layer(self, suffix: str, n_layer: int, default: float | None = None) -> tuple[float, ...]:
        """Return one number per layer, from a scalar or an array. Raises GgufError or InvalidModel."""
        key = self.name(suffix)
        given = None if default is None else (default,) * n_layer
        values = self.metadata.floats(key, n=n_layer) if given is None else self.metadata.floats(key, given, n=n_layer)
        for value in values if values is not given else ():
            self._checked(suffix, value, FLOATS[suffix])
        return values

    def _checked(self, suffix: str, value: N, range: Range) -> N:
        if range.contains(value):
            return value
        raise InvalidModel(f"metadata key '{self.name(suffix)}' is {value}; {range} is expected")
