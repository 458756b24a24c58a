"""Small projectors with SigLIP encoders."""

from __future__ import annotations

from projectors.spec import Shape, TinyProjector

N, FF = 32, 64

LAYER: dict[str, Shape] = {
    **{f"{name}.{which}": N for name in ("ln1", "ln2") for which in ("weight", "bias")},
    **{f"attn_{name}.weight": (N, N) for name in ("q", "k", "v", "out")},
    **{f"attn_{name}.bias": N for name in ("q", "k", "v", "out")},
    "ffn_up.weight": (N, FF),
    "ffn_up.bias": FF,
    "ffn_down.weight": (FF, N),
    "ffn_down.bias": N,
}
"""Tensors of a layer with layer norms, biases and no gate."""

KEYS = {"embedding_length": N, "feed_forward_length": FF, "attention.head_count": 4, "patch_size": 4}
TENSORS: dict[str, Shape] = {
    "v.patch_embd.weight": (4, 4, 3, N),
    "v.patch_embd.bias": N,
    "v.post_ln.weight": N,
    "v.post_ln.bias": N,
}

GEMMA3 = TinyProjector(
    "gemma3",
    {**KEYS, "image_size": 32, "clip.use_gelu": True},
    LAYER,
    {**TENSORS, "v.position_embd.weight": (N, 64), "mm.soft_emb_norm.weight": N, "mm.input_projection.weight": (64, N)},
    n_embd=64,
    tokens=("<start_of_image>", "<end_of_image>"),
)
PROJECTORS = [GEMMA3]
