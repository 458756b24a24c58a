"""Gemma architectures."""

from __future__ import annotations

from tiny.llama import ATTENTION, EXPERT, FUSED, GATED, HEAD, KEYS, N_EMBD, POST_NORMS
from tiny.spec import Tiny

SHARED = {"token_embd": 0.05, "output_norm": 4.0}
"""Deviations for scaled, tied embeddings: a larger one would only repeat the input token."""
WIDE = 48
"""Head size; not the width divided by the number of heads."""
WIDE_KEYS = {**KEYS, "attention.key_length": WIDE, "attention.value_length": WIDE}
WIDE_ATTENTION = {
    **ATTENTION,
    "attn_q.weight": (N_EMBD, 4 * WIDE),
    "attn_k.weight": (N_EMBD, 2 * WIDE),
    "attn_v.weight": (N_EMBD, 2 * WIDE),
    "attn_output.weight": (4 * WIDE, N_EMBD),
}

N_LAYER, N_OWN, N_INPUT, WIDE_HEAD = 6, 4, 32, 64
"""Number of layers, layers with own keys and values, size of per-layer inputs, and head size of global layers."""
_GLOBAL = {
    "attn_q.weight": (N_EMBD, 4 * WIDE_HEAD),
    "attn_k.weight": (N_EMBD, WIDE_HEAD),
    "attn_v.weight": None,
    "attn_output.weight": (4 * WIDE_HEAD, N_EMBD),
    "attn_q_norm.weight": WIDE_HEAD,
    "attn_k_norm.weight": WIDE_HEAD,
}
_FUSED_GLOBAL = {
    "attn_qkv.weight": (N_EMBD, 6 * WIDE_HEAD),
    "attn_output.weight": (4 * WIDE_HEAD, N_EMBD),
    "attn_q_norm.weight": WIDE_HEAD,
    "attn_k_norm.weight": WIDE_HEAD,
}
_NONE_OF_ITS_OWN = dict.fromkeys(("attn_k.weight", "attn_v.weight", "attn_k_norm.weight"))
_SMALL_NETWORK = {"ffn_gate.weight": (N_EMBD, 96), "ffn_up.weight": (N_EMBD, 96), "ffn_down.weight": (96, N_EMBD)}
GEMMA4_KEYS = {
    **KEYS,
    "feed_forward_length": [192] * N_OWN + [96] * (N_LAYER - N_OWN),
    "attention.head_count_kv": [2, 1] * (N_LAYER // 2),
    "attention.key_length": WIDE_HEAD,
    "attention.value_length": WIDE_HEAD,
    "attention.key_length_swa": HEAD,
    "attention.value_length_swa": HEAD,
    "attention.sliding_window": 64,
    "attention.sliding_window_pattern": [True, False] * (N_LAYER // 2),
    "attention.shared_kv_layers": N_LAYER - N_OWN,
    "final_logit_softcapping": 30.0,
    "rope.freq_base": 1e6,
    "rope.freq_base_swa": 10000.0,
    "rope.dimension_count": WIDE_HEAD,
    "rope.dimension_count_swa": HEAD,
}
_EXPERTS_BESIDE = {
    "ffn_gate_inp.weight": (N_EMBD, 8),
    "ffn_gate_inp.scale": N_EMBD,
    "ffn_gate_up_exps.weight": (N_EMBD, 2 * EXPERT, 8),
    "ffn_down_exps.weight": (EXPERT, N_EMBD, 8),
    "ffn_down_exps.scale": 8,
    "pre_ffw_norm_2.weight": N_EMBD,
    "post_ffw_norm_1.weight": N_EMBD,
    "post_ffw_norm_2.weight": N_EMBD,
}

SMALL, SMALL_HEAD = 32, 32
DEEP_KEYS = {
    **KEYS,
    "embedding_length": SMALL,
    "feed_forward_length": SMALL,
    "attention.head_count": 2,
    "attention.head_count_kv": 1,
    "attention.key_length": SMALL_HEAD,
    "attention.value_length": SMALL_HEAD,
}
DEEP_LAYER = {
    "attn_norm.weight": SMALL,
    "attn_q.weight": (SMALL, 2 * SMALL_HEAD),
    "attn_k.weight": (SMALL, SMALL_HEAD),
    "attn_v.weight": (SMALL, SMALL_HEAD),
    "attn_output.weight": (2 * SMALL_HEAD, SMALL),
    "ffn_norm.weight": SMALL,
    "ffn_gate.weight": (SMALL, SMALL),
    "ffn_up.weight": (SMALL, SMALL),
    "ffn_down.weight": (SMALL, SMALL),
    "post_attention_norm.weight": SMALL,
    "post_ffw_norm.weight": SMALL,
}
"""Layers whose heads are twice as wide as the width divided by the number of heads."""

DEEP = 22
"""Layers of a Gemma 3n. The last two share keys and values, but have key and value matrices."""


def gemma3n(n_layer: int) -> Tiny:
    """Gemma 3n with `n_layer` layers; the architecture fixes the number of those with own keys and values."""
    return Tiny(
        "gemma3n",
        {
            **WIDE_KEYS,
            "attention.sliding_window": 64,
            "attention.sliding_window_pattern": 2,
            "rope.freq_base": 1e6,
        },
        {
            **WIDE_ATTENTION,
            **GATED,
            **POST_NORMS,
            "attn_q_norm.weight": WIDE,
            "attn_k_norm.weight": WIDE,
            "inp_gate.weight": (N_EMBD, 256),
            "proj.weight": (256, N_EMBD),
            "post_norm.weight": N_EMBD,
            "altup_router.weight": (N_EMBD, 4),
            "altup_router_norm.weight": N_EMBD,
            "altup_predict_coef.weight": (4, 16),
            "altup_correct_coef.weight": (4, 4),
            "altup_correct_scale.weight": N_EMBD,
            "laurel_l.weight": (N_EMBD, 64),
            "laurel_r.weight": (64, N_EMBD),
            "laurel_post_norm.weight": N_EMBD,
        },
        {
            "per_layer_token_embd.weight": (256 * n_layer, 512),
            "per_layer_model_proj.weight": (N_EMBD, 256 * n_layer),
            "per_layer_proj_norm.weight": 256,
            "altup_proj.weight": (N_EMBD, N_EMBD, 3),
            "altup_unembd_proj.weight": (N_EMBD, N_EMBD, 3),
        },
        n_layer=n_layer,
        vocabulary="spm",
        # Small weights: many layers with larger ones amplify rounding differences.
        deviation={
            "post_": 0.15,
            "altup_router.weight": 5.0,
            "altup_predict_coef": 0.1,
            "altup_correct_scale": 1.0,
        },
    )


MODELS = (
    gemma3n(DEEP),
    Tiny(
        "gemma4",
        {**GEMMA4_KEYS, "embedding_length_per_layer_input": N_INPUT},
        {
            **ATTENTION,
            **GATED,
            **POST_NORMS,
            "attn_q_norm.weight": HEAD,
            "attn_k_norm.weight": HEAD,
            "inp_gate.weight": (N_EMBD, N_INPUT),
            "proj.weight": (N_INPUT, N_EMBD),
            "post_norm.weight": N_EMBD,
            "layer_output_scale.weight": 1,
        },
        {
            "rope_freqs.weight": WIDE_HEAD // 2,
            "per_layer_token_embd.weight": (N_INPUT * N_LAYER, 512),
            "per_layer_model_proj.weight": (N_EMBD, N_INPUT * N_LAYER),
            "per_layer_proj_norm.weight": N_INPUT,
        },
        layers={
            1: _GLOBAL,
            3: _GLOBAL,
            4: {**_NONE_OF_ITS_OWN, **_SMALL_NETWORK},
            5: {**_GLOBAL, **_NONE_OF_ITS_OWN, **_SMALL_NETWORK},
        },
        n_layer=N_LAYER,
        vocabulary="spm",
        deviation={"layer_output_scale": 0.7, "per_layer_token_embd": 0.2},
    ),
    Tiny(
        "gemma4",
        {
            **GEMMA4_KEYS,
            "feed_forward_length": 192,
            "embedding_length_per_layer_input": 0,
            "attention.shared_kv_layers": 0,
            "expert_count": 8,
            "expert_used_count": 3,
            "expert_feed_forward_length": EXPERT,
        },
        {
            **ATTENTION,
            **GATED,
            **POST_NORMS,
            "attn_q_norm.weight": HEAD,
            "attn_k_norm.weight": HEAD,
            **_EXPERTS_BESIDE,
        },
        {"rope_freqs.weight": WIDE_HEAD // 2},
        layers=dict.fromkeys((1, 3, 5), _GLOBAL),
        n_layer=N_LAYER,
        vocabulary="spm",
        variant="experts",
    ),
    # Two head sizes, and layers that share keys and values but have their matrices.
    Tiny(
        "gemma4",
        {**GEMMA4_KEYS, "embedding_length_per_layer_input": 0, "feed_forward_length": 192},
        {**FUSED, **GATED, **POST_NORMS, "attn_q_norm.weight": HEAD, "attn_k_norm.weight": HEAD},
        {"rope_freqs.weight": WIDE_HEAD // 2},
        layers={**dict.fromkeys((1, 3, 5), _FUSED_GLOBAL), 4: {"attn_k_norm.weight": None}},
        n_layer=N_LAYER,
        vocabulary="spm",
        variant="fused",
    ),
    Tiny("gemma", WIDE_KEYS, {**WIDE_ATTENTION, **GATED}, {"output.weight": None}, vocabulary="spm", deviation=SHARED),
    Tiny(
        "gemma2",
        {
            **WIDE_KEYS,
            "attention.sliding_window": 64,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 20.0,
        },
        {**WIDE_ATTENTION, **GATED, **POST_NORMS},
        {"output.weight": None},
        vocabulary="spm",
        deviation=SHARED,
    ),
    Tiny(
        "gemma3",
        {
            **KEYS,
            "attention.key_length": HEAD,
            "attention.value_length": HEAD,
            "attention.sliding_window": 64,
            "attention.sliding_window_pattern": 2,
            "final_logit_softcapping": 30.0,
            "rope.freq_base": 1e6,
        },
        {**ATTENTION, **GATED, **POST_NORMS, "attn_q_norm.weight": HEAD, "attn_k_norm.weight": HEAD},
        vocabulary="spm",
    ),
    # The 27B model is recognized by its number of layers.
    Tiny(
        "gemma2",
        {
            **DEEP_KEYS,
            "attention.sliding_window": 64,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 20.0,
        },
        DEEP_LAYER,
        {"output.weight": None},
        n_layer=46,
        vocabulary="spm",
        deviation=SHARED,
        variant="27b",
    ),
    Tiny(
        "gemma3",
        {**DEEP_KEYS, "attention.sliding_window": 64, "rope.freq_base": 1e6},
        {**DEEP_LAYER, "attn_q_norm.weight": SMALL_HEAD, "attn_k_norm.weight": SMALL_HEAD},
        n_layer=62,
        vocabulary="spm",
        variant="27b",
    ),
)
