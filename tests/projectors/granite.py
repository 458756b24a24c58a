"""Small projectors of Granite Vision 4."""

from __future__ import annotations

from projectors.llava import norm
from projectors.siglip import KEYS
from projectors.spec import Shape, TinyProjector

N, FF, OUT = 64, 96, 48
LAYER: dict[str, Shape] = {
    **norm("ln1", N),
    **norm("ln2", N),
    **{f"attn_{name}.weight": (N, N) for name in ("q", "k", "v", "out")},
    **{f"attn_{name}.bias": N for name in ("q", "k", "v", "out")},
    "ffn_up.weight": (N, FF),
    "ffn_up.bias": FF,
    "ffn_down.weight": (FF, N),
    "ffn_down.bias": N,
}


def block(number: int) -> dict[str, Shape]:
    """Return the tensors of a query transformer for windows of 4 × 4 patches with 2 × 2 queries."""
    parts: dict[str, Shape] = {
        "img_pos": (N, 16),
        "query": (N, 4),
        "linear.weight": (N, OUT),
        "linear.bias": OUT,
        **norm("norm", N),
        **norm("post_norm", N),
        **norm("ffn_norm", N),
        "ffn_up.weight": (N, FF),
        "ffn_up.bias": FF,
        "ffn_down.weight": (FF, N),
        "ffn_down.bias": N,
    }
    for name in ("self_attn", "cross_attn"):
        parts |= norm(f"{name}_norm", N)
        for matrix in ("q", "k", "v", "out"):
            parts |= {f"{name}_{matrix}.weight": (N, N), f"{name}_{matrix}.bias": N}
    return {f"v.proj_blk.{number}.{name}": shape for name, shape in parts.items()}


GRANITE4_VISION = TinyProjector(
    "granite4_vision",
    {
        **KEYS,
        "embedding_length": N,
        "feed_forward_length": FF,
        "image_size": 32,
        "image_grid_pinpoints": [32, 64, 64, 32, 64, 64, 96, 32],
        "feature_layer": [2, 0, 1],
        "projector.spatial_offsets": [-1, 0, 2],
        "projector.window_side": 4,
        "projector.query_side": 2,
        "projection_dim": OUT,
        "clip.use_gelu": True,
    },
    LAYER,
    {
        "v.patch_embd.weight": (4, 4, 3, N),
        "v.patch_embd.bias": N,
        "v.position_embd.weight": (N, 64),
        "v.image_newline": OUT,
        **block(0),
        **block(1),
        **block(2),
    },
    n_embd=3 * OUT,
    n_layer=4,
)
PROJECTORS = [GRANITE4_VISION]
