"""Small projector of Step3-VL."""

from __future__ import annotations

from projectors.siglip import FF, N
from projectors.spec import Shape, TinyProjector

OUT = 64

LAYER: dict[str, Shape] = {
    **{f"{name}.{which}": N for name in ("ln1", "ln2") for which in ("weight", "bias")},
    "attn_qkv.weight": (N, 3 * N),
    "attn_qkv.bias": 3 * N,
    "attn_out.weight": (N, N),
    "attn_out.bias": N,
    "ffn_up.weight": (N, FF),
    "ffn_up.bias": FF,
    "ffn_down.weight": (FF, N),
    "ffn_down.bias": N,
    "ls1.weight": N,
    "ls2.weight": N,
}
STEP3VL = TinyProjector(
    "step3vl",
    {
        "embedding_length": N,
        "feed_forward_length": FF,
        "attention.head_count": 2,
        "patch_size": 14,
        "image_size": 112,
        "preproc_image_size": 1008,
    },
    LAYER,
    {
        "v.patch_embd.weight": (14, 14, 3, N),
        "v.pre_ln.weight": N,
        "v.pre_ln.bias": N,
        "v.position_embd.weight": (N, 7 * 7),
        "mm.0.weight": (3, 3, N, 2 * N),
        "mm.0.bias": 2 * N,
        "mm.1.weight": (3, 3, 2 * N, 3 * N),
        "mm.model.fc.weight": (3 * N, OUT),
    },
    n_embd=OUT,
    tokens=("<im_start>", "<im_end>", "<patch_start>", "<patch_end>", "<patch_newline>"),
)

PROJECTORS = [STEP3VL]
