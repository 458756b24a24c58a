"""DeepSeek and those that follow it."""

from __future__ import annotations

from typing import Any

from tiny.llama import ATTENTION, GATED, HEAD, KEYS, N_EMBD
from tiny.spec import Shape, Tiny

N_EXPERT, N_FF_EXP, N_HEAD = 8, 64, 4
NOPE, ROPE, VALUE, RANK, Q_RANK = 32, 32, 24, 64, 96
EXPERTS = {
    "expert_count": N_EXPERT,
    "expert_used_count": 3,
    "expert_shared_count": 2,
    "expert_feed_forward_length": N_FF_EXP,
    "leading_dense_block_count": 1,
}
MIXTURE: dict[str, Shape] = {
    "ffn_norm.weight": N_EMBD,
    "ffn_gate_inp.weight": (N_EMBD, N_EXPERT),
    "ffn_gate_exps.weight": (N_EMBD, N_FF_EXP, N_EXPERT),
    "ffn_up_exps.weight": (N_EMBD, N_FF_EXP, N_EXPERT),
    "ffn_down_exps.weight": (N_FF_EXP, N_EMBD, N_EXPERT),
    "ffn_gate_shexp.weight": (N_EMBD, 2 * N_FF_EXP),
    "ffn_up_shexp.weight": (N_EMBD, 2 * N_FF_EXP),
    "ffn_down_shexp.weight": (2 * N_FF_EXP, N_EMBD),
}
DENSE: dict[str, Shape | None] = {**dict.fromkeys(MIXTURE), **GATED}
"""The first layer's network in the place of a mixture."""

LATENT: dict[str, Shape] = {
    "attn_norm.weight": N_EMBD,
    "attn_kv_a_mqa.weight": (N_EMBD, RANK + ROPE),
    "attn_kv_a_norm.weight": RANK,
    "attn_output.weight": (N_HEAD * VALUE, N_EMBD),
}
LOW_RANK: dict[str, Shape] = {
    "attn_q_a.weight": (N_EMBD, Q_RANK),
    "attn_q_a_norm.weight": Q_RANK,
    "attn_q_b.weight": (Q_RANK, N_HEAD * (NOPE + ROPE)),
}
ABSORBED: dict[str, Shape] = {"attn_k_b.weight": (NOPE, RANK, N_HEAD), "attn_v_b.weight": (RANK, VALUE, N_HEAD)}
LATENT_KEYS: dict[str, Any] = {
    **KEYS,
    **EXPERTS,
    "rope.dimension_count": ROPE,
    "attention.kv_lora_rank": RANK,
}
ABSORBED_KEYS = {
    **LATENT_KEYS,
    "attention.head_count_kv": 1,
    "attention.key_length": RANK + ROPE,
    "attention.value_length": RANK,
    "attention.key_length_mla": NOPE + ROPE,
    "attention.value_length_mla": VALUE,
    "attention.q_lora_rank": Q_RANK,
}
EXPANDED_KEYS = {
    **LATENT_KEYS,
    "attention.head_count_kv": N_HEAD,
    "attention.key_length": NOPE + ROPE,
    "attention.value_length": VALUE,
    "attention.q_lora_rank": 0,
}
SIGMOID = {"expert_gating_func": 2, "expert_weights_norm": True, "expert_weights_scale": 2.5}
STRETCHED = {
    "rope.scaling.type": "yarn",
    "rope.scaling.factor": 4.0,
    "rope.scaling.original_context_length": 128,
    "rope.scaling.yarn_log_multiplier": 0.0707,
}
BIAS: dict[str, Shape] = {"exp_probs_b.bias": N_EXPERT}
NO_BIAS: dict[str, Shape | None] = {"exp_probs_b.bias": None}

MODELS = (
    Tiny(
        "deepseek2",
        {**ABSORBED_KEYS, **SIGMOID, "expert_group_count": 4, "expert_group_used_count": 2},
        {**LATENT, **LOW_RANK, **ABSORBED, **MIXTURE, **BIAS},
        layers={0: {**DENSE, **NO_BIAS}},
    ),
    Tiny(
        "deepseek2",
        {**EXPANDED_KEYS, **STRETCHED},
        {
            **LATENT,
            **MIXTURE,
            "attn_q.weight": (N_EMBD, N_HEAD * (NOPE + ROPE)),
            "attn_kv_b.weight": (RANK, N_HEAD * (NOPE + VALUE)),
        },
        layers={0: DENSE},
        variant="expanded",
    ),
    Tiny(
        "deepseek2",
        {**ABSORBED_KEYS, **SIGMOID, **STRETCHED, "nextn_predict_layers": 1},
        {**LATENT, **LOW_RANK, **ABSORBED, **MIXTURE, **BIAS},
        layers={0: {**DENSE, **NO_BIAS}},
        n_layer=5,
        variant="nextn",
    ),
    Tiny(
        "mistral4",
        {
            **ABSORBED_KEYS,
            **STRETCHED,
            "attention.temperature_scale": 0.3,
            "attention.temperature_length": 64,
            "expert_weights_norm": True,
        },
        {**LATENT, **LOW_RANK, **ABSORBED, **MIXTURE},
        layers={0: DENSE},
    ),
    Tiny(
        "deepseek",
        {**KEYS, **EXPERTS, "rope.dimension_count": HEAD, "expert_weights_scale": 1.5},
        {**ATTENTION, **MIXTURE},
        layers={0: DENSE},
    ),
)
