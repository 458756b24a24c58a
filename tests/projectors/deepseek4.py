"""Small projector of DeepSeek V4."""

from __future__ import annotations

from projectors.pixtral import FF, LAYER, N
from projectors.spec import TinyProjector

OUT = 64

DEEPSEEK4V = TinyProjector(
    "deepseek4v",
    {
        "embedding_length": N,
        "feed_forward_length": FF,
        "attention.head_count": 2,
        "patch_size": 4,
        "image_size": 64,
        "projector.scale_factor": 3,
        "image_min_pixels": 1024,
        "clip.use_silu": True,
    },
    LAYER,
    {
        "v.patch_embd.weight": (4, 4, 3, N),
        "v.post_ln.weight": N,
        "mm.1.weight": (9 * N, 2 * N),
        "mm.1.bias": 2 * N,
        "mm.2.weight": (2 * N, OUT),
        "mm.2.bias": OUT,
        "v.image_newline": OUT,
        **{f"v.token_embd.img_{which}": OUT for which in ("start", "end", "pad")},
    },
    n_embd=OUT,
)

PROJECTORS = [DEEPSEEK4V]
