"""Granite architectures."""

from __future__ import annotations

from tiny.llama import ATTENTION, EXPERT, EXPERT_KEYS, EXPERTS, FUSED, GATED, HEAD, KEYS, N_EMBD, N_FF, SHARED
from tiny.mamba import EVERY_OTHER, HEADS, MAMBA2
from tiny.spec import Shape, Tiny

FACTORS = {"embedding_scale": 3.0, "residual_scale": 0.4, "attention.scale": 0.3, "logit_scale": 2.0}

HYBRID = {i: ATTENTION | dict.fromkeys(set(MAMBA2) - set(ATTENTION)) for i in (1, 3)}

SWITCHES = 3
RANK = 8


def adapted(name: str, n_in: int, n_out: int) -> dict[str, Shape]:
    """Matrices of the adapter of each switch, and of the empty adapter."""
    return {f"{name}.lora_a": (n_in, RANK, SWITCHES + 1), f"{name}.lora_b": (RANK, n_out, SWITCHES + 1)}


ADAPTED = {
    **adapted("attn_q", N_EMBD, 4 * HEAD),
    **adapted("attn_k", N_EMBD, 2 * HEAD),
    **adapted("attn_v", N_EMBD, 2 * HEAD),
    **adapted("attn_output", 4 * HEAD, N_EMBD),
    **adapted("ffn_gate", N_EMBD, N_FF),
    **adapted("ffn_up", N_EMBD, N_FF),
    **adapted("ffn_down", N_FF, N_EMBD),
}
SWITCH_KEYS = {
    "adapters.count": SWITCHES,
    "adapters.lora_rank": RANK,
    "adapters.token_ids_activate": [119, 290, 100],
    "adapters.token_ids_substitute": [10, 11, 12],
}

MODELS = (
    Tiny(
        "graniteswitch",
        {**KEYS, **FACTORS, **SWITCH_KEYS},
        {**FUSED, **GATED, **ADAPTED},
        {"output.weight": None},
        n_layer=3,
    ),
    Tiny("granite", {**KEYS, **FACTORS}, {**ATTENTION, **GATED}, {"output.weight": None}),
    Tiny("granite", {**KEYS, **FACTORS, "rope.scaling.finetuned": False}, {**ATTENTION, **GATED}, variant="nope"),
    Tiny(
        "granitehybrid",
        {**KEYS, **FACTORS, **HEADS, **EVERY_OTHER},
        {**MAMBA2, **GATED},
        {"output.weight": None},
        HYBRID,
    ),
    Tiny(
        "granitehybrid",
        {
            **KEYS,
            **HEADS,
            **EVERY_OTHER,
            **EXPERT_KEYS,
            "feed_forward_length": EXPERT,
            "expert_shared_feed_forward_length": EXPERT,
            "rope.scaling.finetuned": False,
        },
        {**MAMBA2, **EXPERTS, **SHARED},
        layers=HYBRID,
        variant="experts",
    ),
)
