"""Mixtures of experts whose dense models are in other files, or do not exist."""

from __future__ import annotations

from tiny.granite import FACTORS
from tiny.llama import (
    ATTENTION,
    BIASES,
    EXPERT,
    EXPERT_KEYS,
    EXPERTS,
    FUSED,
    GATED,
    HEAD,
    KEYS,
    LONGROPE,
    LONGROPE_KEYS,
    N_EMBD,
    POST_NORMS,
)
from tiny.spec import N_VOCAB, Tiny

HEAD_NORMS = {"attn_q_norm.weight": HEAD, "attn_k_norm.weight": HEAD}
ROW_NORMS = {"attn_q_norm.weight": 4 * HEAD, "attn_k_norm.weight": 2 * HEAD}
EQUAL_HEADS = {
    "attn_k.weight": (N_EMBD, 4 * HEAD),
    "attn_v.weight": (N_EMBD, 4 * HEAD),
    "attn_q_norm.weight": 4 * HEAD,
    "attn_k_norm.weight": 4 * HEAD,
}
SHARED = 96
SHARED_EXPERT = {
    "ffn_gate_shexp.weight": (N_EMBD, SHARED),
    "ffn_up_shexp.weight": (N_EMBD, SHARED),
    "ffn_down_shexp.weight": (SHARED, N_EMBD),
}
NO_EXPERTS = {name: None for name in (*EXPERTS, *SHARED_EXPERT) if name != "ffn_norm.weight"}
DENSE = {**NO_EXPERTS, "exp_probs_b.bias": None, **GATED}
"""Dense network of a first layer without experts."""
NARROW = {**KEYS, **EXPERT_KEYS, "feed_forward_length": EXPERT}
"""Keys of files that give an expert's width as the feed-forward width."""
TWO_SHARED = {
    "ffn_gate_shexp.weight": (N_EMBD, 2 * EXPERT),
    "ffn_up_shexp.weight": (N_EMBD, 2 * EXPERT),
    "ffn_down_shexp.weight": (2 * EXPERT, N_EMBD),
}
SIGMOIDS = {
    **KEYS,
    **EXPERT_KEYS,
    "expert_shared_count": 2,
    "expert_gating_func": 2,
    "expert_weights_scale": 2.5,
    "expert_weights_norm": True,
    "leading_dense_block_count": 1,
}
EQUAL_KEYS = {"attn_k.weight": (N_EMBD, 4 * HEAD), "attn_v.weight": (N_EMBD, 4 * HEAD)}
BLOCK_INDEXER = {
    "indexer.q_proj.weight": (N_EMBD, 2 * 48),
    "indexer.k_proj.weight": (N_EMBD, 48),
    "indexer.q_norm.weight": 48,
    "indexer.k_norm.weight": 48,
}

MODELS = (
    Tiny("olmoe", {**NARROW, "attention.head_count_kv": 4}, {**ATTENTION, **EQUAL_HEADS, **EXPERTS}),
    Tiny(
        "phimoe",
        {**NARROW, "rope.dimension_count": HEAD},
        {
            **ATTENTION,
            **BIASES,
            **EXPERTS,
            "attn_output.bias": N_EMBD,
            "attn_norm.bias": N_EMBD,
            "ffn_norm.bias": N_EMBD,
        },
        {"output_norm.bias": N_EMBD, "output.bias": N_VOCAB},
    ),
    Tiny(
        "phimoe",
        {**NARROW, **LONGROPE_KEYS, "rope.dimension_count": HEAD},
        {
            **ATTENTION,
            **BIASES,
            **EXPERTS,
            "attn_output.bias": N_EMBD,
            "attn_norm.bias": N_EMBD,
            "ffn_norm.bias": N_EMBD,
        },
        {"output_norm.bias": N_EMBD, "output.bias": N_VOCAB, **LONGROPE},
        n_layer=2,
        variant="longrope",
    ),
    Tiny("granitemoe", {**NARROW, **FACTORS}, {**ATTENTION, **EXPERTS}, {"output.weight": None}),
    Tiny(
        "granitemoe",
        {**NARROW, **FACTORS, "expert_shared_feed_forward_length": SHARED},
        {**ATTENTION, **EXPERTS, **SHARED_EXPERT},
        variant="shared",
    ),
    Tiny(
        "hunyuan-moe",
        {**NARROW, "expert_shared_feed_forward_length": SHARED},
        {**ATTENTION, **HEAD_NORMS, **EXPERTS, **SHARED_EXPERT},
    ),
    Tiny(
        "ernie4_5-moe",
        {
            **KEYS,
            **EXPERT_KEYS,
            "expert_shared_feed_forward_length": SHARED,
            "interleave_moe_layer_step": 1,
            "leading_dense_block_count": 1,
        },
        {**ATTENTION, **EXPERTS, **SHARED_EXPERT, "exp_probs_b.bias": 8},
        layers={0: DENSE},
    ),
    Tiny(
        "minimax-m2",
        {**NARROW, "rope.dimension_count": HEAD // 2, "expert_gating_func": 2},
        {**ATTENTION, **ROW_NORMS, **EXPERTS, "exp_probs_b.bias": 8},
    ),
    *(
        Tiny(
            "minimax-m3",
            {
                **SIGMOIDS,
                "rope.dimension_count": HEAD // 2,
                "attention.indexer.head_count": 2,
                "attention.indexer.key_length": 48,
                "attention.indexer.block_size": block,
                "attention.indexer.top_k": n_chosen,
                "attention.indexer.local_blocks": n_local,
            },
            {**ATTENTION, **HEAD_NORMS, **EXPERTS, **TWO_SHARED, "exp_probs_b.bias": 8, **BLOCK_INDEXER},
            layers={0: {**DENSE, **dict.fromkeys(BLOCK_INDEXER)}},
            n_layer=3,
            variant=variant,
        )
        for variant, block, n_chosen, n_local in (("", 64, 2, 1), ("small", 16, 5, 2))
    ),
    *(
        Tiny(
            "glm4moe",
            {
                **KEYS,
                **EXPERT_KEYS,
                "rope.dimension_count": HEAD // 2,
                "expert_shared_count": 2,
                "expert_weights_scale": 2.5,
                "expert_weights_norm": True,
                "leading_dense_block_count": 1,
                **keys,
            },
            {
                **{name: shape for name, shape in {**ATTENTION, **EXPERTS}.items() if name != "ffn_norm.weight"},
                **BIASES,
                **norms,
                "post_attention_norm.weight": N_EMBD,
                "ffn_gate_shexp.weight": (N_EMBD, 2 * EXPERT),
                "ffn_up_shexp.weight": (N_EMBD, 2 * EXPERT),
                "ffn_down_shexp.weight": (2 * EXPERT, N_EMBD),
                "exp_probs_b.bias": 8,
            },
            layers={0: {**DENSE, "ffn_norm.weight": None}},
            variant=variant,
        )
        for variant, norms, keys in (
            ("", {}, {}),
            ("normed", HEAD_NORMS, {}),
            ("sections", {}, {"rope.dimension_sections": [2, 3, 3, 0]}),
        )
    ),
    Tiny(
        "dots1",
        {**SIGMOIDS, "attention.head_count_kv": 4},
        {**ATTENTION, **HEAD_NORMS, **EQUAL_KEYS, **EXPERTS, **TWO_SHARED, "exp_probs_b.bias": 8},
        layers={0: DENSE},
        n_layer=2,
    ),
    Tiny(
        "bailingmoe2",
        {**SIGMOIDS, "expert_group_count": 4, "expert_group_used_count": 2, "rope.dimension_count": HEAD // 2},
        {**FUSED, **HEAD_NORMS, **EXPERTS, **TWO_SHARED, "exp_probs_b.bias": 8},
        layers={0: DENSE},
        n_layer=2,
    ),
    Tiny(
        "hy_v3",
        {**SIGMOIDS, "expert_shared_feed_forward_length": SHARED},
        {**ATTENTION, **HEAD_NORMS, **EXPERTS, **SHARED_EXPERT, "exp_probs_b": 8},
        layers={0: {**DENSE, "exp_probs_b": None}},
        n_layer=2,
    ),
    Tiny(
        "exaone-moe",
        {**SIGMOIDS, "expert_shared_feed_forward_length": SHARED, "attention.sliding_window": 64},
        {**ATTENTION, **HEAD_NORMS, **EXPERTS, **SHARED_EXPERT, "exp_probs_b.bias": 8},
        layers={0: DENSE},
    ),
    Tiny(
        "afmoe",
        {**SIGMOIDS, "attention.sliding_window": 64},
        {
            **ATTENTION,
            **HEAD_NORMS,
            "attn_gate.weight": (N_EMBD, 4 * HEAD),
            **POST_NORMS,
            **EXPERTS,
            **TWO_SHARED,
            "exp_probs_b.bias": 8,
        },
        layers={0: DENSE},
    ),
)
