"""Small projector of dots3-note."""

from __future__ import annotations

from projectors.pixtral import FF, LAYER, N
from projectors.spec import Shape, TinyProjector

OUT, EXPERTS, EXPERT_FF = 64, 6, 24

MIXED: dict[str, Shape | None] = {
    **{f"ffn_{name}.weight": None for name in ("gate", "up", "down")},
    "ffn_gate_inp.weight": (N, EXPERTS),
    "exp_probs_b.weight": EXPERTS,
    "ffn_gate_exps.weight": (N, EXPERT_FF, EXPERTS),
    "ffn_up_exps.weight": (N, EXPERT_FF, EXPERTS),
    "ffn_down_exps.weight": (EXPERT_FF, N, EXPERTS),
}
DOTS3NOTE = TinyProjector(
    "dots3note_v",
    {
        "embedding_length": N,
        "feed_forward_length": FF,
        "attention.head_count": 2,
        "patch_size": 4,
        "image_size": 64,
        "spatial_merge_size": 2,
        "image_min_pixels": 1024,
        "image_max_pixels": 8192,
        "expert_used_count": 2,
        "clip.use_silu": True,
    },
    LAYER,
    {
        "v.patch_embd.weight": (4, 4, 3, N),
        "v.patch_embd.bias": N,
        "v.pre_ln.weight": N,
        "mm.post_norm.weight": N,
        "mm.input_norm.weight": N,
        "mm.input_norm.bias": N,
        "mm.0.weight": (4 * N, 4 * N),
        "mm.0.bias": 4 * N,
        "mm.2.weight": (4 * N, OUT),
        "mm.2.bias": OUT,
    },
    layers={1: MIXED},
    n_embd=OUT,
    tokens=("<|img|>", "<|endofimg|>"),
)

PROJECTORS = [DOTS3NOTE]
