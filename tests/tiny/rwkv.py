"""RWKV and architectures derived from it. Heads have 64 elements: llama.cpp's kernel reads beyond smaller ones."""

from __future__ import annotations

from tiny.llama import GATED, N_EMBD
from tiny.spec import Tiny

SIZE, N_FF, RANK = 64, 256, 16

WKV_KEYS = {
    "embedding_length": N_EMBD,
    "feed_forward_length": N_FF,
    "attention.head_count": 0,
    "wkv.head_size": SIZE,
}
RANKS_7 = {f"attention.{name}_lora_rank": RANK for name in ("decay", "iclr", "value_residual_mix", "gate")}
RANKS_6 = {"time_mix_extra_dim": RANK, "time_decay_extra_dim": RANK}
LAYER_NORMED = {**WKV_KEYS, "attention.layer_norm_epsilon": 1e-5}
RMS_NORMED = {**WKV_KEYS, "attention.layer_norm_rms_epsilon": 1e-5, "token_shift_count": 1, "feed_forward_length": 192}
SQUARE = (N_EMBD, N_EMBD)


def low_rank(name: str, *, bias: bool = True) -> dict[str, int | tuple[int, ...]]:
    found: dict[str, int | tuple[int, ...]] = {
        f"time_mix_{name}1.weight": (N_EMBD, RANK),
        f"time_mix_{name}2.weight": (RANK, N_EMBD),
    }
    return {**found, f"time_mix_{name}0.weight": N_EMBD} if bias else found


SQUARES = {f"time_mix_{name}.weight": SQUARE for name in ("key", "value", "receptance", "output")}
HEAD_NORM = {"time_mix_ln.weight": N_EMBD, "time_mix_ln.bias": N_EMBD}
NORMS = {f"{name}.{kind}": N_EMBD for name in ("attn_norm", "attn_norm_2") for kind in ("weight", "bias")}
OUTSIDE = {
    "token_embd_norm.weight": N_EMBD,
    "token_embd_norm.bias": N_EMBD,
    "output_norm.bias": N_EMBD,
}
TIME_7 = {
    **low_rank("w"),
    **low_rank("a"),
    **low_rank("v"),
    "time_mix_k_k.weight": N_EMBD,
    "time_mix_k_a.weight": N_EMBD,
    "time_mix_r_k.weight": N_EMBD,
    **SQUARES,
}
GATE_7 = {**low_rank("g", bias=False), "time_mix_lerp_fused.weight": (N_EMBD, 1, 1, 6)}
TIME_6 = {
    "time_mix_lerp_x.weight": N_EMBD,
    "time_mix_lerp_fused.weight": (N_EMBD, 1, 1, 5),
    "time_mix_w1.weight": (N_EMBD, 5 * RANK),
    "time_mix_w2.weight": (RANK, N_EMBD, 5),
    "time_mix_decay.weight": N_EMBD,
    "time_mix_decay_w1.weight": (N_EMBD, RANK),
    "time_mix_decay_w2.weight": (RANK, N_EMBD),
    "time_mix_gate.weight": SQUARE,
    **SQUARES,
}
CHANNEL_6 = {
    "channel_mix_lerp_k.weight": N_EMBD,
    "channel_mix_lerp_r.weight": N_EMBD,
    "channel_mix_key.weight": (N_EMBD, N_FF),
    "channel_mix_value.weight": (N_FF, N_EMBD),
    "channel_mix_receptance.weight": SQUARE,
}
CHANNEL_7 = {name: CHANNEL_6[name] for name in CHANNEL_6 if "lerp_r" not in name and "receptance" not in name}
NARROW = {
    f"time_mix_{name}.{kind}": shape
    for name in ("key", "value")
    for kind, shape in (("weight", (N_EMBD, SIZE)), ("bias", SIZE))
}

MODELS = (
    Tiny(
        "rwkv7",
        {**LAYER_NORMED, **RANKS_7},
        {**NORMS, **TIME_7, **GATE_7, **HEAD_NORM, **CHANNEL_7},
        OUTSIDE,
        vocabulary="rwkv",
    ),
    Tiny(
        "arwkv7",
        {**RMS_NORMED, **RANKS_7, "attention.gate_lora_rank": 0},
        {"attn_norm.weight": N_EMBD, **TIME_7, "time_mix_lerp_fused.weight": (N_EMBD, 1, 1, 5), **GATED},
    ),
    Tiny(
        "rwkv6",
        {**LAYER_NORMED, **RANKS_6, "rescale_every_n_layers": 3},
        {**NORMS, **TIME_6, "time_mix_first.weight": (SIZE, N_EMBD // SIZE), **HEAD_NORM, **CHANNEL_6},
        OUTSIDE,
        vocabulary="rwkv",
    ),
    Tiny(
        "rwkv6qwen2",
        {**RMS_NORMED, **RANKS_6, "attention.head_count_kv": 1},
        {"attn_norm.weight": N_EMBD, **TIME_6, **NARROW, "time_mix_receptance.bias": N_EMBD, **GATED},
    ),
)
