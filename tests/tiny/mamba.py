"""Mamba, and what has state spaces in the place of attention."""

from __future__ import annotations

from tiny.llama import N_EMBD
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

MODELS = (
    Tiny("mamba", {**BASE_KEYS, **SIZES, **ALONE}, MAMBA, {"output.weight": None}),
    Tiny("mamba", {**BASE_KEYS, **SIZES, **ALONE, "ssm.dt_b_c_rms": True}, MAMBA, variant="normed"),
    Tiny("mamba2", {**BASE_KEYS, **HEADS, **ALONE}, MAMBA2),
)
