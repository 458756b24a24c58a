"""Encoder architectures."""

from __future__ import annotations

from typing import Any

from tiny.gemma import WIDE, WIDE_ATTENTION, WIDE_KEYS
from tiny.layer_norms import LAYER_NORM_KEYS, OUT_BIAS, UNGATED_BIASES
from tiny.llama import ATTENTION, GATED, GATED_FUSED, HEAD, N_EMBD, N_FF, POST_NORMS
from tiny.llama import FUSED as LLAMA_FUSED
from tiny.llama import KEYS as LLAMA_KEYS
from tiny.spec import Shape, Tiny

KEYS: dict[str, Any] = {
    **LAYER_NORM_KEYS,
    "attention.head_count_kv": 4,
    "attention.causal": False,
    "pooling_type": 1,
    "tokenizer.ggml.token_type_count": 2,
}
"""Hyperparameters: each query head has a KV head, and vectors are pooled by their mean."""
EMBEDDING: dict[str, Shape | None] = {
    "token_types.weight": (N_EMBD, 2),
    "token_embd_norm.weight": N_EMBD,
    "token_embd_norm.bias": N_EMBD,
    "output.weight": None,
    "output_norm.weight": None,
}
FUSED = {"attn_qkv.weight": (N_EMBD, 12 * HEAD), "attn_output.weight": (N_EMBD, N_EMBD)}
FUSED_BIAS = {"attn_qkv.bias": 12 * HEAD}
SEPARATE = {f"attn_{name}.weight": (N_EMBD, N_EMBD) for name in ("q", "k", "v", "output")}
SEPARATE_BIASES = {f"attn_{name}.bias": N_EMBD for name in ("q", "k", "v", "output")}
NORMS = {f"{name}.{part}": N_EMBD for name in ("attn_output_norm", "layer_output_norm") for part in ("weight", "bias")}
UNGATED = {"ffn_up.weight": (N_EMBD, N_FF), "ffn_down.weight": (N_FF, N_EMBD)}
EXPERTS: dict[str, Shape | None] = {
    **dict.fromkeys((*UNGATED, *UNGATED_BIASES)),
    "ffn_gate_inp.weight": (N_EMBD, 8),
    "ffn_up_exps.weight": (N_EMBD, N_FF, 8),
    "ffn_down_exps.weight": (N_FF, N_EMBD, 8),
}
"""Eight experts in place of a network."""
STRONG = {"token_types": 0.5, "position_embd": 0.5}

MODELS = (
    Tiny(
        "bert",
        KEYS,
        {**SEPARATE, **SEPARATE_BIASES, **NORMS, **UNGATED, **UNGATED_BIASES},
        {**EMBEDDING, "position_embd.weight": (N_EMBD, 2048)},
        deviation=STRONG,
    ),
    Tiny(
        "bert",
        {**KEYS, "pooling_type": 4},
        {**SEPARATE, **SEPARATE_BIASES, **NORMS, **UNGATED, **UNGATED_BIASES},
        {
            **EMBEDDING,
            "position_embd.weight": (N_EMBD, 2048),
            "cls.weight": (N_EMBD, N_EMBD),
            "cls.bias": N_EMBD,
            "cls.output.weight": (N_EMBD, 1),
            "cls.output.bias": 1,
        },
        deviation=STRONG,
        variant="ranks",
    ),
    Tiny(
        "bert",
        {**KEYS, "pooling_type": 4, "classifier.pooling_type": 1},
        {**SEPARATE, **SEPARATE_BIASES, **NORMS, **UNGATED, **UNGATED_BIASES},
        {
            **EMBEDDING,
            "position_embd.weight": (N_EMBD, 2048),
            "cls.weight": (N_EMBD, N_EMBD),
            "cls.bias": N_EMBD,
            "cls.output.weight": (N_EMBD, 1),
        },
        deviation={**STRONG, "cls.output": 0.25},
        variant="ranks-by-means",
    ),
    Tiny(
        "nomic-bert",
        KEYS,
        {**FUSED, **NORMS, **UNGATED, "ffn_gate.weight": (N_EMBD, N_FF)},
        EMBEDDING,
        deviation=STRONG,
    ),
    Tiny(
        "nomic-bert-moe",
        {**KEYS, "moe_every_n_layers": 2, "expert_count": 8, "expert_used_count": 2},
        {**FUSED, **FUSED_BIAS, **OUT_BIAS, **NORMS, **UNGATED, **UNGATED_BIASES},
        EMBEDDING,
        dict.fromkeys((1, 3), EXPERTS),
        deviation=STRONG,
    ),
    Tiny(
        "jina-bert-v2",
        {**KEYS, "pooling_type": 2},
        {
            **SEPARATE,
            **SEPARATE_BIASES,
            **NORMS,
            "ffn_gate.weight": (N_EMBD, N_FF),
            "ffn_up.weight": (N_EMBD, N_FF),
            "ffn_down.weight": (N_FF, N_EMBD),
            "ffn_down.bias": N_EMBD,
        },
        EMBEDDING,
        deviation=STRONG,
    ),
    Tiny(
        "jina-bert-v2",
        KEYS,
        {
            **SEPARATE,
            **SEPARATE_BIASES,
            **NORMS,
            **{f"{name}.{part}": N_EMBD for name in ("attn_q_norm", "attn_k_norm") for part in ("weight", "bias")},
            "attn_norm_2.weight": N_EMBD,
            "attn_norm_2.bias": N_EMBD,
            "ffn_up.weight": (N_EMBD, 2 * N_FF),
            "ffn_down.weight": (N_FF, N_EMBD),
            "ffn_down.bias": N_EMBD,
        },
        {**EMBEDDING, "cls.weight": (N_EMBD, 1), "cls.bias": 1},
        deviation=STRONG,
        variant="code",
    ),
    Tiny(
        "jina-bert-v2",
        KEYS,
        {**SEPARATE, **SEPARATE_BIASES, **NORMS, **UNGATED, "ffn_down.bias": N_EMBD},
        EMBEDDING,
        n_layer=2,
        deviation=STRONG,
        variant="ungated",
    ),
    Tiny(
        "jina-bert-v3",
        KEYS,
        {**FUSED, **FUSED_BIAS, **OUT_BIAS, **NORMS, **UNGATED, **UNGATED_BIASES},
        EMBEDDING,
        deviation=STRONG,
    ),
    Tiny(
        "modern-bert",
        {**KEYS, "attention.sliding_window": 16, "rope.freq_base": 160000.0, "rope.freq_base_swa": 5000.0},
        {
            "attn_norm.weight": N_EMBD,
            **FUSED,
            "ffn_norm.weight": N_EMBD,
            "ffn_up.weight": (N_EMBD, 2 * N_FF),
            "ffn_down.weight": (N_FF, N_EMBD),
        },
        {"token_embd_norm.weight": N_EMBD, "output.weight": None},
        {0: {"attn_norm.weight": None}},
        n_layer=5,
    ),
    Tiny(
        "modern-bert",
        {**KEYS, "attention.sliding_window": 16, "rope.freq_base": 160000.0},
        {
            "attn_norm.weight": N_EMBD,
            **FUSED,
            "ffn_norm.weight": N_EMBD,
            "ffn_up.weight": (N_EMBD, 2 * N_FF),
            "ffn_down.weight": (N_FF, N_EMBD),
        },
        {"token_embd_norm.weight": N_EMBD, "output.weight": None},
        {0: {"attn_norm.weight": None}},
        n_layer=2,
        variant="one-base",
    ),
    Tiny(
        "modern-bert",
        {**KEYS, "pooling_type": 4},
        {
            "attn_norm.weight": N_EMBD,
            **FUSED,
            "ffn_norm.weight": N_EMBD,
            "ffn_up.weight": (N_EMBD, 2 * N_FF),
            "ffn_down.weight": (N_FF, N_EMBD),
        },
        {
            "token_embd_norm.weight": N_EMBD,
            "output.weight": None,
            "cls.weight": (N_EMBD, N_EMBD),
            "cls.norm.weight": N_EMBD,
            "cls.output.weight": (N_EMBD, 1),
            "cls.output.bias": 1,
        },
        {0: {"attn_norm.weight": None}},
        variant="ranks",
    ),
    Tiny(
        "gemma-embedding",
        {
            **WIDE_KEYS,
            "attention.sliding_window": 16,
            "attention.sliding_window_pattern": 3,
            "rope.freq_base": 1e6,
            "pooling_type": 1,
            "dense_2_feat_in": N_EMBD,
            "dense_2_feat_out": N_FF,
            "dense_3_feat_in": N_FF,
            "dense_3_feat_out": N_EMBD,
        },
        {**WIDE_ATTENTION, **GATED, **POST_NORMS, "attn_q_norm.weight": WIDE, "attn_k_norm.weight": WIDE},
        {"output.weight": None, "dense_2.weight": (N_EMBD, N_FF), "dense_3.weight": (N_FF, N_EMBD)},
        vocabulary="spm",
        deviation={"token_embd": 0.1},
    ),
    *(
        Tiny(
            "t5encoder",
            {
                "embedding_length": N_EMBD,
                "feed_forward_length": N_FF,
                "attention.head_count": 4,
                "attention.key_length": 48,
                "attention.value_length": 48,
                "attention.layer_norm_rms_epsilon": 1e-6,
                "attention.relative_buckets_count": 32,
                **keys,
            },
            {
                "attn_norm.weight": N_EMBD,
                **{f"attn_{name}.weight": (N_EMBD, 4 * 48) for name in ("q", "k", "v")},
                "attn_o.weight": (4 * 48, N_EMBD),
                "ffn_norm.weight": N_EMBD,
                **UNGATED,
                **more,
            },
            {"enc.output_norm.weight": N_EMBD, "output.weight": None, "output_norm.weight": None},
            {0: {"attn_rel_b.weight": (4, 32)}, **layers},
            deviation={"attn_rel_b": 2.0, "attn_q": 0.02},
            stack="enc.blk",
            variant=variant,
        )
        for more, layers, keys, variant in (
            ({}, {}, {"attention.causal": False}, ""),
            ({"ffn_gate.weight": (N_EMBD, N_FF)}, {2: {"attn_rel_b.weight": (4, 32)}}, {}, "v1.1"),
        )
    ),
    Tiny(
        "eurobert",
        {**LLAMA_KEYS, "attention.causal": False, "pooling_type": 1},
        {**ATTENTION, **GATED},
        {"output.weight": None},
        n_layer=2,
    ),
    Tiny(
        "neo-bert",
        {**LLAMA_KEYS, "attention.causal": False, "pooling_type": 1},
        {**LLAMA_FUSED, **GATED_FUSED},
        {"output.weight": None, "output_norm.weight": None, "enc.output_norm.weight": N_EMBD},
        n_layer=2,
    ),
    Tiny(
        "llama-embed",
        {**LLAMA_KEYS, "attention.causal": False, "pooling_type": 1, "rope.dimension_count": HEAD},
        {**ATTENTION, **GATED},
        {"rope_freqs.weight": HEAD // 2},
        n_layer=2,
    ),
)
