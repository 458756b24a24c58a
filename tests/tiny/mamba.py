"""Mamba, and hybrids of state spaces and attention."""

from __future__ import annotations

from collections.abc import Mapping

from tiny.llama import ATTENTION, FUSED, GATED, GATED_FUSED, HEAD, KEYS, N_EMBD, N_FF
from tiny.spec import Shape, Tiny

N_INNER, N_STATE, RANK = 2 * N_EMBD, 16, 8

BASE_KEYS = {"embedding_length": N_EMBD, "attention.layer_norm_rms_epsilon": 1e-5}
SIZES = {"ssm.conv_kernel": 4, "ssm.inner_size": N_INNER, "ssm.state_size": N_STATE, "ssm.time_step_rank": RANK}
ALONE = {"attention.head_count": 0, "feed_forward_length": 0}
MAMBA: dict[str, Shape] = {
    "attn_norm.weight": N_EMBD,
    "ssm_in.weight": (N_EMBD, 2 * N_INNER),
    "ssm_conv1d.weight": (4, N_INNER),
    "ssm_conv1d.bias": N_INNER,
    "ssm_x.weight": (N_INNER, RANK + 2 * N_STATE),
    "ssm_dt.weight": (RANK, N_INNER),
    "ssm_dt.bias": N_INNER,
    "ssm_a": (N_STATE, N_INNER),
    "ssm_d": N_INNER,
    "ssm_out.weight": (N_INNER, N_EMBD),
}

N_GROUP, WIDE = 2, 32
N_MIXED = N_INNER + 2 * N_GROUP * WIDE
HEADS = {**SIZES, "ssm.state_size": WIDE, "ssm.group_count": N_GROUP}
MAMBA2: dict[str, Shape] = {
    "attn_norm.weight": N_EMBD,
    "ssm_in.weight": (N_EMBD, N_INNER + N_MIXED + RANK),
    "ssm_conv1d.weight": (4, N_MIXED),
    "ssm_conv1d.bias": N_MIXED,
    "ssm_dt.bias": RANK,
    "ssm_a": (1, RANK),
    "ssm_d": (1, RANK),
    "ssm_norm.weight": (N_INNER // N_GROUP, N_GROUP),
    "ssm_out.weight": (N_INNER, N_EMBD),
}
"""Eight heads of 32 channels."""

NORMS: dict[str, Shape] = {"ssm_dt_norm.weight": RANK, "ssm_b_norm.weight": N_STATE, "ssm_c_norm.weight": N_STATE}
EVERY_OTHER = {"attention.head_count_kv": [0, 2, 0, 2]}
"""Alternating layers with states and with attention."""


def without(*others: Mapping[str, Shape]) -> dict[str, Shape | None]:
    """Tensors that layers of the other kind lack."""
    return dict.fromkeys(name for shapes in others for name in shapes if name != "attn_norm.weight")


ATTENDS = {i: {**without(MAMBA, MAMBA2, NORMS), **ATTENTION} for i in (1, 3)}

WIDE_EXPERTS: dict[str, Shape] = {
    "ffn_norm.weight": N_EMBD,
    "ffn_gate_inp.weight": (N_EMBD, 8),
    "ffn_gate_exps.weight": (N_EMBD, N_FF, 8),
    "ffn_up_exps.weight": (N_EMBD, N_FF, 8),
    "ffn_down_exps.weight": (N_FF, N_EMBD, 8),
}
NETWORK: dict[str, Shape] = {"ffn_up.weight": (N_EMBD, N_FF), "ffn_down.weight": (N_FF, N_EMBD)}
LATENT, EXPERT = 96, 64
LATENT_EXPERTS: dict[str, Shape] = {
    "ffn_gate_inp.weight": (N_EMBD, 8),
    "exp_probs_b.bias": 8,
    "ffn_latent_down.weight": (N_EMBD, LATENT),
    "ffn_latent_up.weight": (LATENT, N_EMBD),
    "ffn_up_exps.weight": (LATENT, EXPERT, 8),
    "ffn_down_exps.weight": (EXPERT, LATENT, 8),
    "ffn_up_shexp.weight": (N_EMBD, N_FF),
    "ffn_down_shexp.weight": (N_FF, N_EMBD),
}
ONE_HALF = {
    "attention.head_count_kv": [0, 2, 0, 0],
    "attention.key_length": HEAD,
    "attention.value_length": HEAD,
    "attention.layer_norm_epsilon": 1e-5,
    "feed_forward_length": [0, 0, N_FF, 0],
}
"""One block per layer: state space, attention, network, state space."""


def one_half(network: Mapping[str, Shape]) -> dict[int, Mapping[str, Shape | None]]:
    return {1: {**without(MAMBA2), **ATTENTION}, 2: {**without(MAMBA2), **network}}


PLAMO: dict[str, Shape] = {
    **{name: shape for name, shape in MAMBA.items() if name != "ssm_conv1d.bias"},
    "ssm_x.weight": (N_INNER, 64 + 2 * N_STATE),
    "ssm_dt.weight": (64, RANK),
    "ssm_dt.bias": RANK,
    "ssm_a": RANK,
    "ssm_d": RANK,
    "ssm_dt_norm": 64,
    "ssm_b_norm": N_STATE,
    "ssm_c_norm": N_STATE,
}
# Files of PLaMo 2 give layers without attention no heads. If the first layer has none, llama.cpp (b11434) rotates
# nothing and never finishes.
HEAD_NORMS: dict[str, Shape] = {"attn_q_norm.weight": (HEAD, 4), "attn_k_norm.weight": (HEAD, 2)}
POST: dict[str, Shape] = {"post_attention_norm": N_EMBD, "post_ffw_norm": N_EMBD}

MODELS = (
    Tiny("mamba", {**BASE_KEYS, **SIZES, **ALONE}, MAMBA, {"output.weight": None}),
    Tiny("mamba", {**BASE_KEYS, **SIZES, **ALONE, "ssm.dt_b_c_rms": True}, MAMBA, variant="normed"),
    Tiny("mamba2", {**BASE_KEYS, **HEADS, **ALONE}, MAMBA2),
    Tiny(
        "jamba",
        {**KEYS, **SIZES, **EVERY_OTHER, "expert_count": 8, "expert_used_count": 2},
        {**MAMBA, **NORMS, **GATED},
        layers={
            0: {**without(GATED), **WIDE_EXPERTS},
            1: ATTENDS[1],
            3: {**ATTENDS[3], **without(GATED), **WIDE_EXPERTS},
        },
    ),
    Tiny(
        "falcon-h1",
        {**KEYS, **HEADS, "attention.key_length": HEAD, "attention.value_length": HEAD},
        {**MAMBA2, **ATTENTION, **{name: s for name, s in GATED.items() if "norm" not in name}, "ffn_norm": N_EMBD},
    ),
    Tiny("nemotron_h", {**KEYS, **HEADS, **ONE_HALF}, MAMBA2, layers=one_half(NETWORK)),
    Tiny(
        "nemotron_h_moe",
        {
            **KEYS,
            **HEADS,
            **ONE_HALF,
            "expert_count": 8,
            "expert_used_count": 3,
            "moe_latent_size": LATENT,
            "expert_feed_forward_length": EXPERT,
            "expert_shared_feed_forward_length": N_FF,
            "expert_shared_count": 1,
            "expert_weights_norm": True,
            "expert_weights_scale": 2.5,
        },
        MAMBA2,
        layers=one_half(LATENT_EXPERTS),
    ),
    Tiny(
        "plamo2",
        {
            **KEYS,
            **SIZES,
            **EVERY_OTHER,
            "attention.key_length": HEAD,
            "attention.value_length": HEAD,
            "ssm.group_count": 0,
        },
        {**PLAMO, **GATED_FUSED, **POST},
        layers={i: {**without(PLAMO), **FUSED, **HEAD_NORMS} for i in (1, 3)},
    ),
)
