"""Small projectors with the encoder of GLM-4.xV."""

from __future__ import annotations

from projectors.qwen_vl import KEYS, OUT, PATCHES
from projectors.siglip import FF, N
from projectors.spec import Shape, TinyProjector

WIDE = 48
RMS_LAYER: dict[str, Shape] = {
    "ln1.weight": N,
    "ln2.weight": N,
    "attn_qkv.weight": (N, 3 * N),
    "attn_qkv.bias": 3 * N,
    "attn_out.weight": (N, N),
    "ffn_up.weight": (N, FF),
    "ffn_gate.weight": (N, FF),
    "ffn_down.weight": (FF, N),
}
TENSORS: dict[str, Shape] = {
    **PATCHES,
    "v.patch_embd.bias": N,
    "v.post_ln.weight": N,
    "mm.patch_merger.weight": (2, 2, N, WIDE),
    "mm.patch_merger.bias": WIDE,
    "mm.model.fc.weight": (WIDE, OUT),
    "mm.post_norm.weight": OUT,
    "mm.post_norm.bias": OUT,
    "mm.up.weight": (OUT, FF),
    "mm.gate.weight": (OUT, FF),
    "mm.down.weight": (FF, OUT),
}
TOKENS = "<|begin_of_image|>", "<|end_of_image|>"
GLM_KEYS = {**KEYS, "clip.use_silu": True}

GLM4V = TinyProjector(
    "glm4v",
    GLM_KEYS,
    RMS_LAYER,
    {**TENSORS, "v.norm_embd.weight": N, "v.position_embd.weight": (N, 8 * 8)},
    n_embd=OUT,
    text="qwen2vl",
    tokens=TOKENS,
)
GLM_OCR = TinyProjector(
    "glm4v",
    GLM_KEYS,
    {**RMS_LAYER, "attn_q_norm.weight": N // 2, "attn_k_norm.weight": N // 2},
    {**TENSORS, "v.norm_embd.weight": N},
    n_embd=OUT,
    text="qwen2vl",
    tokens=TOKENS,
    variant="ocr",
)
GLM5V = TinyProjector(
    "glm5v",
    {**GLM_KEYS, "swiglu_clamp": 0.5, "image_min_pixels": 1024, "image_max_pixels": 32768},
    RMS_LAYER,
    {**TENSORS, "v.position_embd.weight": (N, 8 * 8)},
    n_embd=OUT,
    tokens=TOKENS,
)

PROJECTORS = [GLM4V, GLM_OCR, GLM5V]
