"""DeepSeek and architectures derived from it."""

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
"""Dense network of the first layer, in place of a mixture."""

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
INDEXER: dict[str, Shape] = {
    "indexer.attn_q_b.weight": (Q_RANK, 6 * 64),
    "indexer.attn_k.weight": (N_EMBD, 64),
    "indexer.k_norm.weight": 64,
    "indexer.k_norm.bias": 64,
    "indexer.proj.weight": (N_EMBD, 6),
}
INDEXER_KEYS = {"attention.indexer.head_count": 6, "attention.indexer.key_length": 64, "attention.indexer.top_k": 100}
"""The indexer selects few tokens, so that the others matter."""

GLM_EMBD, GLM_HEADS, GLM_PART, GLM_EXPERTS = 32, 2, 16, 4
"""GLM-4.7-Flash, recognized by its 47 layers and 154,880 tokens; all other sizes are small."""
GLM_KEYS = {
    **KEYS,
    "embedding_length": GLM_EMBD,
    "feed_forward_length": 2 * GLM_EMBD,
    "attention.head_count": GLM_HEADS,
    "attention.head_count_kv": 1,
    "attention.key_length": 3 * GLM_PART,
    "attention.value_length": 2 * GLM_PART,
    "attention.key_length_mla": 2 * GLM_PART,
    "attention.value_length_mla": GLM_PART,
    "attention.q_lora_rank": GLM_EMBD,
    "attention.kv_lora_rank": 2 * GLM_PART,
    "rope.dimension_count": GLM_PART,
    "rope.freq_base": 1e6,
    "expert_count": GLM_EXPERTS,
    "expert_used_count": 2,
    "expert_shared_count": 1,
    "expert_feed_forward_length": GLM_EMBD,
    "expert_weights_norm": True,
    "expert_weights_scale": 1.8,
    "leading_dense_block_count": 1,
    "nextn_predict_layers": 1,
}
GLM_LAYER: dict[str, Shape] = {
    "attn_norm.weight": GLM_EMBD,
    "attn_kv_a_mqa.weight": (GLM_EMBD, 3 * GLM_PART),
    "attn_kv_a_norm.weight": 2 * GLM_PART,
    "attn_q_a.weight": (GLM_EMBD, GLM_EMBD),
    "attn_q_a_norm.weight": GLM_EMBD,
    "attn_q_b.weight": (GLM_EMBD, GLM_HEADS * 2 * GLM_PART),
    "attn_k_b.weight": (GLM_PART, 2 * GLM_PART, GLM_HEADS),
    "attn_v_b.weight": (2 * GLM_PART, GLM_PART, GLM_HEADS),
    "attn_output.weight": (GLM_HEADS * GLM_PART, GLM_EMBD),
    "ffn_norm.weight": GLM_EMBD,
}
GLM_NETWORK: dict[str, Shape] = {
    "ffn_gate.weight": (GLM_EMBD, 2 * GLM_EMBD),
    "ffn_up.weight": (GLM_EMBD, 2 * GLM_EMBD),
    "ffn_down.weight": (2 * GLM_EMBD, GLM_EMBD),
}
GLM_MIXTURE: dict[str, Shape] = {
    "ffn_gate_inp.weight": (GLM_EMBD, GLM_EXPERTS),
    "exp_probs_b.bias": GLM_EXPERTS,
    **{f"ffn_{part}_exps.weight": (GLM_EMBD, GLM_EMBD, GLM_EXPERTS) for part in ("gate", "up", "down")},
    **{f"ffn_{part}_shexp.weight": (GLM_EMBD, GLM_EMBD) for part in ("gate", "up", "down")},
}

STREAMS = 4
STREAM_KEYS = {
    "hyper_connection.count": STREAMS,
    "hyper_connection.epsilon": 1e-3,
    "hyper_connection.magnitude": 2.0,
    "swiglu_clamp_exp": [0.0, 0.5, 0.5],
}
CONNECTIONS: dict[str, Shape] = {
    "attn_gate.weight": (N_EMBD, N_HEAD * VALUE),
    "attn_sinks.weight": N_HEAD,
    **{f"hc_{half}_fn.weight": (STREAMS * N_EMBD, 2 * STREAMS) for half in ("attn", "ffn")},
    **{f"hc_{half}_base.weight": 2 * STREAMS for half in ("attn", "ffn")},
    **{f"hc_{half}_scale.weight": 2 for half in ("attn", "ffn")},
}
COLLECTED: dict[str, Shape | None] = {
    "output_hc_fn.weight": (STREAMS * N_EMBD, STREAMS),
    "output_hc_base.weight": STREAMS,
    "output_hc_scale.weight": 1,
}

NARROW = {"nope": 16, "value": 16, "rank": 32, "heads": 8}
"""Window layers of dots3note, which have more heads."""
NARROW_LATENT: dict[str, Shape] = {
    "attn_q_b.weight": (Q_RANK, NARROW["heads"] * (NARROW["nope"] + ROPE)),
    "attn_kv_a_mqa.weight": (N_EMBD, NARROW["rank"] + ROPE),
    "attn_kv_a_norm.weight": NARROW["rank"],
    "attn_k_b.weight": (NARROW["nope"], NARROW["rank"], NARROW["heads"]),
    "attn_v_b.weight": (NARROW["rank"], NARROW["value"], NARROW["heads"]),
    "attn_output.weight": (NARROW["heads"] * NARROW["value"], N_EMBD),
    "attn_gate.weight": (N_EMBD, NARROW["heads"]),
}
WINDOWED: dict[str, Shape | None] = {**dict.fromkeys(INDEXER), **NARROW_LATENT}

MODELS = (
    Tiny(
        "dots3note",
        {
            **ABSORBED_KEYS,
            **SIGMOID,
            **INDEXER_KEYS,
            "attention.head_count": [8, 4, 8, 4],
            "attention.key_length_mla_swa": NARROW["nope"] + ROPE,
            "attention.value_length_mla_swa": NARROW["value"],
            "attention.kv_lora_rank_swa": NARROW["rank"],
            "attention.key_length_swa": NARROW["rank"] + ROPE,
            "attention.value_length_swa": NARROW["rank"],
            "attention.sliding_window": 64,
            "attention.sliding_window_pattern": [True, False, True, False],
            "attention.indexer.types": [0, 1, 0, 1],
            "rope.freq_base_swa": 5000.0,
        },
        {
            **LATENT,
            **LOW_RANK,
            **ABSORBED,
            **MIXTURE,
            **BIAS,
            **INDEXER,
            "attn_k_norm.weight": ROPE,
            "attn_gate.weight": (N_EMBD, N_HEAD),
        },
        layers={0: {**DENSE, **NO_BIAS, **WINDOWED}, 2: WINDOWED},
    ),
    *(
        Tiny(
            "hy_v4",
            {**ABSORBED_KEYS, **SIGMOID, **STREAM_KEYS, **keys},
            {**LATENT, **LOW_RANK, **ABSORBED, **MIXTURE, **BIAS, **CONNECTIONS, **more},
            COLLECTED,
            layers={0: {**DENSE, **NO_BIAS}, 2: dict.fromkeys(more)},
            n_layer=3,
            deviation={"_base": 1.0, "_scale": 1.0},
            variant=variant,
        )
        for variant, keys, more in (
            ("", {**INDEXER_KEYS, "attention.indexer.types": [1, 1, 0]}, INDEXER),
            ("all", {}, {}),
        )
    ),
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
        "deepseek2",
        {
            **ABSORBED_KEYS,
            **SIGMOID,
            **STRETCHED,
            "expert_group_count": 4,
            "expert_group_used_count": 2,
            "leading_dense_block_count": 3,
        },
        {**LATENT, **LOW_RANK, **ABSORBED, **MIXTURE, **BIAS},
        layers={i: {**DENSE, **NO_BIAS} for i in range(3)},
        n_layer=5,
        pre="deepseek-v3",
        variant="v3",
    ),
    Tiny(
        "deepseek2",
        {
            **ABSORBED_KEYS,
            **SIGMOID,
            **STRETCHED,
            "expert_weights_scale": 2.827,
            "rope.freq_base": 50000.0,
            "rope.scaling.factor": 32.0,
        },
        {**LATENT, **LOW_RANK, **ABSORBED, **MIXTURE, **BIAS},
        layers={0: {**DENSE, **NO_BIAS}},
        pre="kimi-k2",
        variant="kimi-k2",
    ),
    Tiny(
        "deepseek2",
        GLM_KEYS,
        {**GLM_LAYER, **GLM_MIXTURE},
        layers={0: {**dict.fromkeys(GLM_MIXTURE), **GLM_NETWORK}},
        n_layer=48,
        pre="glm4",
        n_vocab=154_880,
        variant="glm-4.7-flash",
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
    Tiny(
        "deepseek32",
        {**ABSORBED_KEYS, **SIGMOID, **STRETCHED, **INDEXER_KEYS},
        {**LATENT, **LOW_RANK, **ABSORBED, **MIXTURE, **BIAS, **INDEXER},
        layers={0: {**DENSE, **NO_BIAS}},
        n_layer=2,
    ),
    Tiny(
        "glm-dsa",
        {**ABSORBED_KEYS, **SIGMOID, **INDEXER_KEYS, "attention.indexer.types": [1, 1, 0]},
        {**LATENT, **LOW_RANK, **ABSORBED, **MIXTURE, **BIAS, **INDEXER},
        layers={0: {**DENSE, **NO_BIAS}, 2: dict.fromkeys(INDEXER)},
        n_layer=3,
    ),
)
