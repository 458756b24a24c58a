"""Small projectors of Gemma 4."""

from __future__ import annotations

from projectors.pixtral import FF, N
from projectors.spec import Shape, TinyProjector

OUT, HEAD = 64, 16

LAYER: dict[str, Shape] = {
    **{f"{name}.weight": N for name in ("ln1", "ln2", "attn_post_norm", "ffn_post_norm")},
    **{f"attn_{name}.weight": (N, N) for name in ("q", "k", "v", "out")},
    "attn_q_norm.weight": HEAD,
    "attn_k_norm.weight": HEAD,
    "out_scale.weight": 1,
    "ffn_gate.weight": (N, FF),
    "ffn_up.weight": (N, FF),
    "ffn_down.weight": (FF, N),
}
LIMITS: dict[str, Shape] = {
    f"{name}.{which}_{end}": 1
    for name in ("attn_q", "attn_out", "ffn_gate", "ffn_down")
    for which in ("input", "output")
    for end in ("min", "max")
}
KEYS = {
    "embedding_length": N,
    "feed_forward_length": FF,
    "attention.head_count": N // HEAD,
    "patch_size": 4,
    "image_size": 224,
    "clip.use_gelu": True,
    "image_mean": [0.0, 0.0, 0.0],
    "image_std": [1.0, 1.0, 1.0],
}

GEMMA4V = TinyProjector(
    "gemma4v",
    KEYS,
    LAYER,
    {
        "v.patch_embd.weight": (4, 4, 3, N),
        "v.position_embd.weight": (N, 120, 2),
        "v.std_bias": N,
        "v.std_scale": N,
        "mm.input_projection.weight": (N, OUT),
    },
    layers={1: LIMITS},
    n_embd=OUT,
    tokens=("<|image>", "<image|>"),
)
GEMMA4UV = TinyProjector(
    "gemma4uv",
    {**KEYS, "attention.head_count": 0},
    {},
    {
        "v.patch_embd.weight": (3 * 12 * 12, N),
        "v.patch_embd.bias": N,
        **{f"v.patch_norm.{i}.{which}": n for i, n in ((1, 432), (2, N), (3, N)) for which in ("weight", "bias")},
        "v.position_embd.weight": (N, 60, 2),
        "mm.input_projection.weight": (N, OUT),
    },
    n_embd=OUT,
    n_layer=0,
    tokens=("<|image>", "<image|>"),
)

PROJECTORS = [GEMMA4V, GEMMA4UV]
