"""Small projectors with the encoders of Qwen-VL."""

from __future__ import annotations

from projectors.siglip import FF, LAYER, N
from projectors.spec import Shape, TinyProjector

OUT, MERGED = 64, 4 * N

KEYS = {
    "embedding_length": N,
    "feed_forward_length": FF,
    "attention.head_count": 2,
    "patch_size": 8,
    "image_size": 64,
    "spatial_merge_size": 2,
}
PATCHES: dict[str, Shape] = {"v.patch_embd.weight": (8, 8, 3, N), "v.patch_embd.weight.1": (8, 8, 3, N)}
POST_NORM: dict[str, Shape] = {"v.post_ln.weight": N, "v.post_ln.bias": N}
PROJECTION: dict[str, Shape] = {
    "mm.0.weight": (MERGED, MERGED),
    "mm.0.bias": MERGED,
    "mm.2.weight": (MERGED, OUT),
    "mm.2.bias": OUT,
}
TENSORS = {**PATCHES, **POST_NORM, **PROJECTION}
RMS_LAYER: dict[str, Shape] = {
    **{name: shape for name, shape in LAYER.items() if name not in ("ln1.bias", "ln2.bias")},
    "ffn_gate.weight": (N, FF),
    "ffn_gate.bias": FF,
}
FUSED: dict[str, Shape] = {
    **{name: shape for name, shape in LAYER.items() if not name.startswith(("attn_q", "attn_k", "attn_v"))},
    "attn_qkv.weight": (N, 3 * N),
    "attn_qkv.bias": 3 * N,
}
TOKENS = "<|vision_start|>", "<|vision_end|>"


def deepstack(layer: int) -> dict[str, Shape]:
    """Tensors of DeepStack in a layer."""
    shapes: dict[str, Shape] = {
        "norm.weight": MERGED,
        "norm.bias": MERGED,
        "fc1.weight": (MERGED, MERGED),
        "fc1.bias": MERGED,
        "fc2.weight": (MERGED, OUT),
        "fc2.bias": OUT,
    }
    return {f"v.deepstack.{layer}.{name}": shape for name, shape in shapes.items()}


QWEN2VL = TinyProjector("qwen2vl_merger", KEYS, LAYER, TENSORS, n_embd=OUT, text="qwen2vl", tokens=TOKENS)
QWEN25VL = TinyProjector(
    "qwen2.5vl_merger",
    {**KEYS, "n_wa_pattern": 2, "patch_size": 14, "clip.use_silu": True},
    RMS_LAYER,
    {
        **PROJECTION,
        "v.patch_embd.weight": (14, 14, 3, N),
        "v.patch_embd.weight.1": (14, 14, 3, N),
        "v.post_ln.weight": N,
    },
    n_embd=OUT,
    n_layer=3,
    text="qwen2vl",
    tokens=TOKENS,
)
QWEN3VL = TinyProjector(
    "qwen3vl_merger",
    {**KEYS, "clip.use_gelu": True},
    FUSED,
    {
        **TENSORS,
        "v.patch_embd.bias": N,
        "v.position_embd.weight": (N, 8 * 8),
        **deepstack(0),
        **deepstack(2),
    },
    n_embd=OUT,
    n_layer=3,
    text="qwen3vl",
    tokens=TOKENS,
)
EXAONE45 = TinyProjector(
    "exaone4_5",
    {
        **KEYS,
        "attention.head_count": 4,
        "attention.head_count_kv": 2,
        "n_wa_pattern": 2,
        "clip.use_silu": True,
        "image_min_pixels": 1024,
        "image_max_pixels": 65536,
    },
    {
        **{name: shape for name, shape in RMS_LAYER.items() if not name.startswith(("attn_q", "attn_k", "attn_v"))},
        "attn_qkv.weight": (N, 2 * N),
        "attn_qkv.bias": 2 * N,
    },
    {**PATCHES, **PROJECTION, "v.post_ln.weight": N},
    n_embd=OUT,
    n_layer=3,
    text="qwen2vl",
    tokens=("<vision>", "</vision>"),
)

LING3VL = TinyProjector(
    "ling3vl",
    {**KEYS, "clip.use_gelu": True},
    FUSED,
    {
        **PATCHES,
        **PROJECTION,
        "v.patch_embd.bias": N,
        "v.position_embd.weight": (N, 8 * 8),
        "mm.input_norm.weight": N,
        "mm.input_norm.bias": N,
    },
    n_embd=OUT,
    text="qwen2vl",
    tokens=TOKENS,
)
YOUTUVL = TinyProjector(
    "youtuvl",
    {**KEYS, "window_size": 64, "wa_layer_indexes": [1], "clip.use_gelu": True},
    LAYER,
    {
        **POST_NORM,
        **PROJECTION,
        "v.patch_embd.weight": (192, N),
        "v.patch_embd.bias": N,
        "mm.input_norm.weight": N,
    },
    n_embd=OUT,
    n_layer=3,
    text="qwen2vl",
    tokens=TOKENS,
)

PROJECTORS = [QWEN2VL, QWEN25VL, QWEN3VL, LING3VL, EXAONE45, YOUTUVL]
