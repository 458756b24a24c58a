"""Keys and tensors of architectures with layer norms."""

from __future__ import annotations

from tiny.llama import HEAD, KEYS, N_EMBD, N_FF

LAYER_NORM_KEYS = {name: value for name, value in KEYS.items() if "rms" not in name} | {
    "attention.layer_norm_epsilon": 1e-5
}
NORM_SHIFTS = {"attn_norm.bias": N_EMBD, "ffn_norm.bias": N_EMBD}
OUTPUT_SHIFT = {"output_norm.bias": N_EMBD}
FUSED_BIAS = {"attn_qkv.bias": 8 * HEAD}
OUT_BIAS = {"attn_output.bias": N_EMBD}
UNGATED = {"ffn_norm.weight": N_EMBD, "ffn_up.weight": (N_EMBD, N_FF), "ffn_down.weight": (N_FF, N_EMBD)}
UNGATED_BIASES = {"ffn_up.bias": N_FF, "ffn_down.bias": N_EMBD}

MODELS = ()
