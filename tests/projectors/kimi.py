"""Small projectors with MoonViT, the encoder of Kimi."""

from __future__ import annotations

from projectors.siglip import FF, LAYER, N
from projectors.spec import Shape, TinyProjector

OUT = 64

KEYS = {
    "embedding_length": N,
    "feed_forward_length": FF,
    "attention.head_count": 2,
    "patch_size": 4,
    "image_size": 64,
    "projector.scale_factor": 2,
    "clip.use_gelu": True,
}
TENSORS: dict[str, Shape] = {
    "v.patch_embd.weight": (4, 4, 3, N),
    "v.patch_embd.bias": N,
    "v.post_ln.weight": N,
    "v.post_ln.bias": N,
    "mm.input_norm.weight": N,
    "mm.input_norm.bias": N,
    "mm.1.weight": (4 * N, 4 * N),
    "mm.1.bias": 4 * N,
    "mm.2.weight": (4 * N, OUT),
    "mm.2.bias": OUT,
}

KIMIVL = TinyProjector(
    "kimivl",
    KEYS,
    LAYER,
    {**TENSORS, "v.position_embd.weight": (N, 8 * 8)},
    n_embd=OUT,
    tokens=("<|media_start|>", "<|media_end|>"),
)
KIMIK25 = TinyProjector(
    "kimik25",
    KEYS,
    LAYER,
    {**TENSORS, "v.position_embd.weight": (N, 10, 8)},
    n_embd=OUT,
    tokens=("<|media_begin|>", "<|media_end|>"),
)
GLM52 = TinyProjector(
    "kimik25",
    {**KEYS, "image_min_pixels": 64, "image_max_pixels": 4096},
    LAYER,
    {**TENSORS, "v.position_embd.weight": (N, 6, 6)},
    n_embd=OUT,
    tokens=("<|begin_of_image|>", "<|end_of_image|>"),
    variant="glm",
)

PROJECTORS = [KIMIVL, KIMIK25, GLM52]
