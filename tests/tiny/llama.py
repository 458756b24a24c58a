"""Llama and architectures derived from it."""

from __future__ import annotations

from tiny.spec import Tiny

N_EMBD, N_FF, HEAD = 128, 192, 32

ATTENTION = {
    "attn_norm.weight": N_EMBD,
    "attn_q.weight": (N_EMBD, 4 * HEAD),
    "attn_k.weight": (N_EMBD, 2 * HEAD),
    "attn_v.weight": (N_EMBD, 2 * HEAD),
    "attn_output.weight": (4 * HEAD, N_EMBD),
}
"""Four query heads and two KV heads."""
BIASES = {
    "attn_q.bias": 4 * HEAD,
    "attn_k.bias": 2 * HEAD,
    "attn_v.bias": 2 * HEAD,
}
GATED = {
    "ffn_norm.weight": N_EMBD,
    "ffn_gate.weight": (N_EMBD, N_FF),
    "ffn_up.weight": (N_EMBD, N_FF),
    "ffn_down.weight": (N_FF, N_EMBD),
}
EXPERT = 64
EXPERTS = {
    "ffn_norm.weight": N_EMBD,
    "ffn_gate_inp.weight": (N_EMBD, 8),
    "ffn_gate_exps.weight": (N_EMBD, EXPERT, 8),
    "ffn_up_exps.weight": (N_EMBD, EXPERT, 8),
    "ffn_down_exps.weight": (EXPERT, N_EMBD, 8),
}
"""Eight experts."""
SHARED = {
    "ffn_gate_shexp.weight": (N_EMBD, EXPERT),
    "ffn_up_shexp.weight": (N_EMBD, EXPERT),
    "ffn_down_shexp.weight": (EXPERT, N_EMBD),
}
EXPERT_KEYS = {"expert_count": 8, "expert_used_count": 3, "expert_feed_forward_length": EXPERT}
FUSED = {
    "attn_norm.weight": N_EMBD,
    "attn_qkv.weight": (N_EMBD, 8 * HEAD),
    "attn_output.weight": (4 * HEAD, N_EMBD),
}
"""ATTENTION in one fused matrix."""
GATED_FUSED = {
    "ffn_norm.weight": N_EMBD,
    "ffn_up.weight": (N_EMBD, 2 * N_FF),
    "ffn_down.weight": (N_FF, N_EMBD),
}
POST_NORMS = {"post_attention_norm.weight": N_EMBD, "post_ffw_norm.weight": N_EMBD}
KEYS = {
    "embedding_length": N_EMBD,
    "feed_forward_length": N_FF,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "rope.freq_base": 10000.0,
}

LONGROPE_KEYS = {
    "rope.scaling.type": "longrope",
    "rope.scaling.original_context_length": 256,
    "rope.scaling.attn_factor": 1.19,
}
LONGROPE = {"rope_factors_short.weight": HEAD // 2, "rope_factors_long.weight": HEAD // 2}

MODELS = (
    Tiny(
        "arcee",
        {**KEYS, "rope.dimension_count": HEAD},
        {**ATTENTION, **{name: shape for name, shape in GATED.items() if "gate" not in name}},
        {"rope_freqs.weight": HEAD // 2},
    ),
    Tiny(
        "llama4",
        {
            **KEYS,
            **EXPERT_KEYS,
            "context_length": 16384,
            "expert_used_count": 1,
            "interleave_moe_layer_step": 2,
            "rope.dimension_count": HEAD,
            "attention.sliding_window_pattern": 4,
        },
        {**ATTENTION, **GATED},
        {"rope_freqs.weight": HEAD // 2},
        layers={i: {**dict.fromkeys(GATED), **EXPERTS, **SHARED} for i in (1, 3)},
    ),
    Tiny("llama", {**KEYS, "rope.dimension_count": HEAD}, {**ATTENTION, **GATED}),
    Tiny(
        "llama",
        {**KEYS, **LONGROPE_KEYS, "rope.dimension_count": HEAD},
        {**ATTENTION, **GATED},
        LONGROPE,
        variant="longrope",
    ),
    Tiny(
        "llama",
        {**KEYS, "rope.dimension_count": HEAD},
        {**ATTENTION, **GATED, **BIASES, "attn_output.bias": N_EMBD},
        {"rope_freqs.weight": HEAD // 2},
        variant="biased",
    ),
    Tiny(
        "llama",
        {
            **KEYS,
            "rope.dimension_count": HEAD,
            "expert_count": 8,
            "expert_used_count": 2,
            "feed_forward_length": EXPERT,
        },
        {**ATTENTION, **EXPERTS},
        variant="experts",
    ),
    Tiny(
        "mistral3",
        {
            **KEYS,
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 4.0,
            "rope.scaling.original_context_length": 128,
            "rope.scaling.yarn_log_multiplier": 3.0,
            "rope.scaling.yarn_beta_fast": 8.0,
            "rope.scaling.yarn_beta_slow": 0.5,
            "attention.temperature_scale": 0.5,
        },
        {**ATTENTION, **GATED},
    ),
    Tiny(
        "mistral3",
        {
            **KEYS,
            "rope.dimension_count": HEAD,
            "expert_count": 8,
            "expert_used_count": 3,
            "feed_forward_length": EXPERT,
            "attention.temperature_scale": 0.5,
            "rope.scaling.original_context_length": 128,
        },
        {**FUSED, **EXPERTS},
        variant="experts",
    ),
    Tiny("internlm2", KEYS, {**ATTENTION, **GATED}),
    Tiny("smollm3", KEYS, {**ATTENTION, **GATED}, {"output.weight": None}, n_layer=5),
    Tiny(
        "deci",
        {
            **KEYS,
            "rope.dimension_count": HEAD,
            "attention.key_length": HEAD,
            "attention.value_length": HEAD,
            "attention.head_count": [4, 4, 0, 0, 4],
            "attention.head_count_kv": [2, 0, 0, 0, 2],
            "feed_forward_length": [N_FF, N_FF, N_FF, 0, N_FF],
        },
        {**ATTENTION, **GATED},
        {"rope_freqs.weight": HEAD // 2},
        layers={
            1: {"attn_q.weight": None, "attn_k.weight": None, "attn_v.weight": None},
            2: dict.fromkeys(ATTENTION),
            3: dict.fromkeys((*ATTENTION, *GATED)),
        },
        n_layer=5,
    ),
    Tiny(
        "nanbeige",
        {**KEYS, "num_loops": 2},
        {**ATTENTION, **GATED},
        n_layer=2,
        deviation={"output_norm": 1.0},
    ),
)
