"""Models with linear attention or short convolutions in most layers."""

from __future__ import annotations

import numpy as np

from tiny.llama import ATTENTION, EXPERT, EXPERT_KEYS, EXPERTS, GATED, HEAD, KEYS, N_EMBD
from tiny.spec import Tiny

STATE, N_KEYS, N_VALUES, KERNEL = 32, 2, 4, 4
CHANNELS = STATE * (2 * N_KEYS + N_VALUES)
SHARED = 96

DELTA_KEYS = {
    **KEYS,
    "attention.key_length": HEAD,
    "attention.value_length": HEAD,
    "rope.dimension_count": HEAD // 2,
    "ssm.conv_kernel": KERNEL,
    "ssm.state_size": STATE,
    "ssm.group_count": N_KEYS,
    "ssm.time_step_rank": N_VALUES,
    "ssm.inner_size": STATE * N_VALUES,
}
DELTA_NET = {
    "attn_norm.weight": N_EMBD,
    "post_attention_norm.weight": N_EMBD,
    "attn_qkv.weight": (N_EMBD, CHANNELS),
    "attn_gate.weight": (N_EMBD, STATE * N_VALUES),
    "ssm_conv1d.weight": (KERNEL, CHANNELS),
    "ssm_dt.bias": N_VALUES,
    "ssm_a": N_VALUES,
    "ssm_norm.weight": STATE,
    "ssm_out.weight": (STATE * N_VALUES, N_EMBD),
}
OWN = {"ssm_alpha.weight": (N_EMBD, N_VALUES), "ssm_beta.weight": (N_EMBD, N_VALUES)}
FUSED = {"ssm_ba.weight": (N_EMBD, 2 * N_VALUES)}
FIRST = {
    "attn_qkv.weight": None,
    "attn_gate.weight": None,
    "ssm_in.weight": (N_EMBD, CHANNELS + STATE * N_VALUES),
}
"""Tensors in the first files of Qwen3-Next."""
GATED_ATTENTION = {
    "attn_q.weight": (N_EMBD, 2 * 4 * HEAD),
    "attn_k.weight": (N_EMBD, 2 * HEAD),
    "attn_v.weight": (N_EMBD, 2 * HEAD),
    "attn_output.weight": (4 * HEAD, N_EMBD),
    "attn_q_norm.weight": HEAD,
    "attn_k_norm.weight": HEAD,
}
MIXTURE = {
    **EXPERTS,
    "ffn_gate_inp_shexp.weight": N_EMBD,
    "ffn_gate_shexp.weight": (N_EMBD, SHARED),
    "ffn_up_shexp.weight": (N_EMBD, SHARED),
    "ffn_down_shexp.weight": (SHARED, N_EMBD),
}
MIXTURE_KEYS = {**EXPERT_KEYS, "expert_shared_feed_forward_length": SHARED}
SECTIONS = {"rope.dimension_sections": [3, 3, 2, 0]}


NEXT = {"nextn.eh_proj.weight": (2 * N_EMBD, N_EMBD), "nextn.enorm.weight": N_EMBD, "nextn.hnorm.weight": N_EMBD}
"""Additional tensors of a multi-token prediction block."""


def delta(
    architecture: str,
    keys: dict[str, object],
    strengths: dict[str, object],
    network: dict[str, object],
    n_next: int = 0,
    variant: str = "",
) -> Tiny:
    """Three layers with the delta rule, one with attention, and `n_next` prediction blocks."""
    network = {name: shape for name, shape in network.items() if name != "ffn_norm.weight"}
    others = (*DELTA_NET, *strengths)
    gone = {name: None for name in others if name not in ("attn_norm.weight", "post_attention_norm.weight")}
    layer = {**DELTA_NET, **strengths, **network}
    attention = {3: {**gone, **GATED_ATTENTION}, 4: {**gone, **GATED_ATTENTION, **NEXT}}
    keys = {**DELTA_KEYS, **keys, **({"nextn_predict_layers": n_next} if n_next else {})}
    return Tiny(architecture, keys, layer, layers=attention, n_layer=4 + n_next, variant=variant)  # type: ignore[arg-type]


CONVOLUTION = {
    "attn_norm.weight": N_EMBD,
    "shortconv.in_proj.weight": (N_EMBD, 3 * N_EMBD),
    "shortconv.conv.weight": (3, N_EMBD),
    "shortconv.out_proj.weight": (N_EMBD, N_EMBD),
}
NORMED = {**ATTENTION, "attn_q_norm.weight": HEAD, "attn_k_norm.weight": HEAD}
ATTENDS = {2: {**{name: None for name in CONVOLUTION if name != "attn_norm.weight"}, **NORMED}}
LIQUID_KEYS = {**KEYS, "attention.head_count_kv": [0, 0, 2, 0], "shortconv.l_cache": 3}
LIQUID_NORM = {"output_norm.weight": None, "token_embd_norm.weight": N_EMBD, "output.weight": None}

KDA = 32
"""Head size of Kimi Linear, which has four heads."""
RANK, ROPE, NOPE, VALUE = 48, 16, 32, 32
KIMI_DELTA = {
    "attn_norm.weight": N_EMBD,
    **{f"attn_{name}.weight": (N_EMBD, 4 * KDA) for name in "qkv"},
    **{f"ssm_conv1d_{name}.weight": (KERNEL, 1, 4 * KDA) for name in "qkv"},
    "ssm_f_a.weight": (N_EMBD, KDA),
    "ssm_f_b.weight": (KDA, 4 * KDA),
    "ssm_dt.bias": 4 * KDA,
    "ssm_a": (1, 4),
    "ssm_beta.weight": (N_EMBD, 4),
    "ssm_g_a.weight": (N_EMBD, KDA),
    "ssm_g_b.weight": (KDA, 4 * KDA),
    "ssm_norm.weight": KDA,
    "attn_output.weight": (4 * KDA, N_EMBD),
}
KIMI_LATENT = {
    "attn_q.weight": (N_EMBD, 4 * (NOPE + ROPE)),
    "attn_kv_a_mqa.weight": (N_EMBD, RANK + ROPE),
    "attn_kv_a_norm.weight": RANK,
    "attn_k_b.weight": (NOPE, RANK, 4),
    "attn_v_b.weight": (RANK, VALUE, 4),
    "attn_output.weight": (4 * VALUE, N_EMBD),
}
KIMI_MIXTURE = {
    **EXPERTS,
    "exp_probs_b.bias": 8,
    "ffn_gate_shexp.weight": (N_EMBD, EXPERT),
    "ffn_up_shexp.weight": (N_EMBD, EXPERT),
    "ffn_down_shexp.weight": (EXPERT, N_EMBD),
}
BAILING_DELTA = {
    **{name: shape for name, shape in KIMI_DELTA.items() if not name.startswith(("ssm_f", "ssm_g"))},
    "ssm_f_a.weight": (N_EMBD, 4 * KDA),
    "ssm_g_a.weight": (N_EMBD, 4 * KDA),
}
BAILING_LATENT = {
    **{name: shape for name, shape in KIMI_LATENT.items() if name != "attn_q.weight"},
    "attn_q_a.weight": (N_EMBD, RANK),
    "attn_q_a_norm.weight": RANK,
    "attn_q_b.weight": (RANK, 4 * (NOPE + ROPE)),
    "attn_gate.weight": (N_EMBD, 4),
}
SHORT_KEYS = {"ssm_conv1d_k": 0.002}
"""Keys so short that the epsilon of their norm matters."""
NO_MIXTURE = {name: None for name in KIMI_MIXTURE if name != "ffn_norm.weight"}

KIMI_KEYS = {
    **KEYS,
    **EXPERT_KEYS,
    "attention.head_count_kv": [0, 0, 0, 1],
    "attention.key_length": RANK + ROPE,
    "attention.value_length": RANK,
    "attention.key_length_mla": NOPE + ROPE,
    "attention.value_length_mla": VALUE,
    "attention.kv_lora_rank": RANK,
    "rope.dimension_count": ROPE,
    "kda.head_dim": KDA,
    "ssm.conv_kernel": KERNEL,
    "expert_shared_count": 1,
    "expert_weights_scale": 2.5,
    "expert_gating_func": 2,
    "leading_dense_block_count": 1,
}

LIGHTNING = {
    "attn_norm.weight": N_EMBD,
    "attn_qkv.weight": (N_EMBD, 3 * 4 * HEAD),
    "attn_gate.weight": (N_EMBD, 4 * HEAD),
    "attn_norm_2.weight": 4 * HEAD,
    "attn_output.weight": (4 * HEAD, N_EMBD),
}

K3_NARROW = 64
K3_SCORES = {"attn_res_score.weight": N_EMBD, "ffn_res_score.weight": N_EMBD}
K3_DELTA = {
    **{name: shape for name, shape in KIMI_DELTA.items() if not name.startswith("ssm_g")},
    "ssm_g.weight": (N_EMBD, 4 * KDA),
    "ssm_a": 4,
}
K3_LATENT = {**BAILING_LATENT, "attn_gate.weight": (N_EMBD, 4 * VALUE)}
K3_MIXTURE = {
    **KIMI_MIXTURE,
    "ffn_gate_exps.weight": (K3_NARROW, EXPERT, 8),
    "ffn_up_exps.weight": (K3_NARROW, EXPERT, 8),
    "ffn_down_exps.weight": (EXPERT, K3_NARROW, 8),
    "ffn_routed_down.weight": (N_EMBD, K3_NARROW),
    "ffn_routed_up.weight": (K3_NARROW, N_EMBD),
    "ffn_routed_norm.weight": K3_NARROW,
}
K3_KEYS = {
    **KIMI_KEYS,
    "attention.head_count_kv": [0, 0, 1, 0, 1],
    "attention.q_lora_rank": RANK,
    "kda.gate_lower_bound": -5.0,
    "expert_weights_norm": True,
    "expert_latent_length": K3_NARROW,
    "activation.situ_beta": 1.5,
    "activation.situ_linear_beta": 2.0,
    "attn_res.block_size": 2,
}
K3_ATTENDS = {**{name: None for name in K3_DELTA if name != "attn_norm.weight"}, **K3_LATENT}

STREAMS, POOL, INDEX, INDEX_HEADS = 4, 4, 32, 4
CONNECTIONS = {
    f"hc_{part}_{name}.weight": shape
    for part in ("attn", "ffn")
    for name, shape in (("fn", (STREAMS * N_EMBD, 6 * STREAMS)), ("scale", 3), ("base", 6 * STREAMS))
}
GLM5_DELTA = {**KIMI_DELTA, "ssm_a": 4}
GLM5_LATENT = {
    "attn_q_a.weight": (N_EMBD, RANK),
    "attn_q_a_norm.weight": RANK,
    "attn_q_b.weight": (RANK, 4 * NOPE),
    "attn_kv_a_mqa.weight": (N_EMBD, RANK),
    "attn_kv_a_norm.weight": RANK,
    "attn_k_b.weight": (NOPE, RANK, 4),
    "attn_v_b.weight": (RANK, VALUE, 4),
    "attn_output.weight": (4 * VALUE, N_EMBD),
}
GLM5_HEADS = 12
"""With fewer heads some scores are 0, and llama.cpp selects among equal scores arbitrarily."""
GLM5_INDEXER = {
    "indexer.attn_q_b.weight": (RANK, GLM5_HEADS * INDEX),
    "indexer.attn_k.weight": (N_EMBD, INDEX),
    "indexer.k_norm.weight": INDEX,
    "indexer.k_norm.bias": INDEX,
    "indexer.proj.weight": (N_EMBD, GLM5_HEADS),
    "indexer_compressor_gate.weight": (N_EMBD, INDEX),
    "indexer_compressor_ape.weight": (INDEX, POOL),
}
GLM5_KEYS = {
    **KIMI_KEYS,
    "attention.head_count_kv": [0, 1, 0, 1, 0],
    "attention.key_length": RANK,
    "attention.key_length_mla": NOPE,
    "attention.q_lora_rank": RANK,
    "attention.layer_norm_epsilon": 1e-6,
    "rope.dimension_count": 0,
    "kda.gate_lower_bound": -5.0,
    "expert_weights_norm": True,
    "swiglu_clamp_exp": [0.7] * 5,
    "attention.indexer.head_count": GLM5_HEADS,
    "attention.indexer.key_length": INDEX,
    "attention.indexer.top_k": 40,
    "attention.indexer.kpool": POOL,
    "attention.indexer.kpool_select_tail": True,
    "hyper_connection.count": STREAMS,
    "hyper_connection.sinkhorn_iterations": 4,
    "hyper_connection.epsilon": 1e-6,
}
GLM5_ATTENDS = {**{name: None for name in GLM5_DELTA if name != "attn_norm.weight"}, **GLM5_LATENT}

Q4_RANK, GRAM, GRAM_HEADS, GRAM_TAPS, GRAM_ROWS = 24, 3, 2, 4, 97
Q4_GATES = {
    f"hc_{part}_{name}.weight": shape
    for part in ("attn", "ffn")
    for name, shape in (
        ("norm", STREAMS * N_EMBD),
        ("down", (STREAMS * N_EMBD, Q4_RANK)),
        ("up", (Q4_RANK, STREAMS * N_EMBD)),
        ("inject", (STREAMS * N_EMBD, STREAMS)),
    )
}
Q4_OUT = {
    "output_norm.weight": None,
    "output_hc_norm.weight": STREAMS * N_EMBD,
    "output_hc_down.weight": (STREAMS * N_EMBD, Q4_RANK),
    "output_hc_up.weight": (Q4_RANK, STREAMS * N_EMBD),
}
Q4_DELTA = {name: shape for name, shape in {**DELTA_NET, **OWN}.items() if "norm" not in name or "ssm" in name}
Q4_ATTENDS = {
    **dict.fromkeys(Q4_DELTA),
    **GATED_ATTENTION,
    "indexer.q_proj.weight": (N_EMBD, INDEX_HEADS * INDEX),
    "indexer.k_proj.weight": (N_EMBD, INDEX),
    "indexer.q_norm.weight": INDEX,
    "indexer.k_norm.weight": INDEX,
}
Q4_NGRAMS = {
    "ple_key.weight": (N_EMBD, STREAMS * N_EMBD),
    "ple_value.weight": (N_EMBD, N_EMBD),
    "ple_norm_key.weight": STREAMS * N_EMBD,
    "ple_norm_query.weight": STREAMS * N_EMBD,
    "ple_norm_conv.weight": STREAMS * N_EMBD,
    "ple_conv1d.weight": (GRAM_TAPS, STREAMS * N_EMBD),
}
Q4_KEYS = {
    **DELTA_KEYS,
    **SECTIONS,
    **MIXTURE_KEYS,
    "full_attention_interval": 2,
    "hyper_connection.count": STREAMS,
    "hyper_connection.low_rank": Q4_RANK,
    "attention.indexer.head_count": INDEX_HEADS,
    "attention.indexer.key_length": INDEX,
    "attention.indexer.top_k": 40,
    "attention.compress_ratios": [0, POOL, 0, POOL],
}
Q4_NGRAM_KEYS = {
    "ple.layers": [2],
    "ple.ngram_size": GRAM,
    "ple.heads_per_ngram": GRAM_HEADS,
    "ple.conv_kernel": GRAM_TAPS,
    "ple.eos_token_id": 2,
    "embedding_length_per_layer_input": N_EMBD // (GRAM_HEADS * (GRAM - 1)),
    "ple.layer_multipliers": np.array([(1 << 44) + 7, (1 << 43) + 99, 12345678901], np.uint64),
    "ple.head_offsets": np.arange(0, 4 * GRAM_ROWS, GRAM_ROWS, np.uint64),
    "ple.head_vocab_sizes": np.array([GRAM_ROWS, 89, 83, 79], np.uint64),
}
Q4_MIXTURE = {name: shape for name, shape in MIXTURE.items() if name != "ffn_norm.weight"}

MODELS = (
    Tiny(
        "qwen4exp",
        {**Q4_KEYS, **Q4_NGRAM_KEYS},
        {**Q4_DELTA, **Q4_MIXTURE, **Q4_GATES},
        {**Q4_OUT, "per_layer_token_embd.weight": (N_EMBD // (GRAM_HEADS * (GRAM - 1)), 4 * GRAM_ROWS + 3)},
        layers={1: Q4_ATTENDS, 2: Q4_NGRAMS, 3: Q4_ATTENDS},
    ),
    Tiny(
        "qwen4exp",
        {**Q4_KEYS, "attention.compress_ratios": [0, 0, 0, POOL]},
        {**Q4_DELTA, **Q4_MIXTURE, **Q4_GATES},
        {**Q4_OUT, "output.weight": None},
        layers={1: Q4_ATTENDS, 3: Q4_ATTENDS},
        variant="plain",
    ),
    Tiny(
        "glm5-next",
        {**GLM5_KEYS, "attention.indexer.types": [True, True, True, False, True]},
        {**GLM5_DELTA, **KIMI_MIXTURE, **CONNECTIONS},
        layers={
            0: {**NO_MIXTURE, **GATED},
            1: {**GLM5_ATTENDS, **GLM5_INDEXER},
            3: GLM5_ATTENDS,
        },
        n_layer=5,
        deviation=SHORT_KEYS,
    ),
    Tiny(
        "kimi-k3",
        K3_KEYS,
        {**K3_DELTA, **K3_MIXTURE, **K3_SCORES},
        {"output_res_score.weight": N_EMBD},
        layers={0: {**dict.fromkeys(K3_MIXTURE), **GATED}, 2: K3_ATTENDS, 4: K3_ATTENDS},
        n_layer=5,
    ),
    Tiny(
        "minimax-01",
        {
            **KEYS,
            **EXPERT_KEYS,
            "feed_forward_length": EXPERT,
            "residual_scale": 3.5,
            "rope.dimension_count": HEAD // 2,
            "full_attention_interval": 2,
        },
        {**LIGHTNING, **EXPERTS},
        layers={i: {**dict.fromkeys(LIGHTNING), **ATTENTION} for i in (1, 3)},
    ),
    Tiny(
        "bailingmoe3",
        {**KIMI_KEYS, "attention.q_lora_rank": RANK, "kda.gate_lower_bound": -5.0, "expert_weights_norm": True},
        {**BAILING_DELTA, **KIMI_MIXTURE},
        layers={
            0: {**NO_MIXTURE, **GATED},
            3: {**{name: None for name in BAILING_DELTA if name != "attn_norm.weight"}, **BAILING_LATENT},
        },
    ),
    delta("qwen3next", MIXTURE_KEYS, FUSED, MIXTURE),
    delta("qwen3next", MIXTURE_KEYS, {**FUSED, **FIRST}, MIXTURE, variant="first"),
    delta("qwen35", SECTIONS, OWN, GATED, n_next=1),
    delta("qwen35moe", {**SECTIONS, **MIXTURE_KEYS}, OWN, MIXTURE),
    Tiny("lfm2", {**LIQUID_KEYS, "attention.sliding_window": 40}, {**CONVOLUTION, **GATED}, LIQUID_NORM, ATTENDS),
    Tiny(
        "lfm2moe",
        {**LIQUID_KEYS, **EXPERT_KEYS, "expert_gating_func": 2, "leading_dense_block_count": 1},
        {**CONVOLUTION, **EXPERTS, "exp_probs_b.bias": 8},
        LIQUID_NORM,
        {**ATTENDS, 0: {**dict.fromkeys(EXPERTS), "exp_probs_b.bias": None, **GATED}},
    ),
    Tiny(
        "kimi-linear",
        KIMI_KEYS,
        {**KIMI_DELTA, **KIMI_MIXTURE},
        layers={
            0: {**NO_MIXTURE, **GATED},
            3: {**{name: None for name in KIMI_DELTA if name != "attn_norm.weight"}, **KIMI_LATENT},
        },
        deviation=SHORT_KEYS,
    ),
)
