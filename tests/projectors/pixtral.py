"""Small projectors with Pixtral's encoder."""

from __future__ import annotations

from projectors.spec import Shape, TinyProjector

N, FF, OUT = 32, 48, 64

LAYER: dict[str, Shape] = {
    "ln1.weight": N,
    "ln2.weight": N,
    **{f"attn_{name}.weight": (N, N) for name in ("q", "k", "v", "out")},
    "ffn_gate.weight": (N, FF),
    "ffn_up.weight": (N, FF),
    "ffn_down.weight": (FF, N),
}
KEYS = {
    "embedding_length": N,
    "feed_forward_length": FF,
    "attention.head_count": 2,
    "patch_size": 4,
    "image_size": 64,
    "clip.use_silu": True,
}
TENSORS: dict[str, Shape] = {
    "v.patch_embd.weight": (4, 4, 3, N),
    "v.pre_ln.weight": N,
    "mm.1.weight": (N, OUT),
    "mm.2.weight": (OUT, OUT),
}
BIASES: dict[str, Shape] = {"mm.1.bias": OUT, "mm.2.bias": OUT}
MERGER: dict[str, Shape] = {"mm.input_norm.weight": N, "mm.patch_merger.weight": (4 * N, N)}
ROW_END: dict[str, Shape] = {"v.token_embd.img_break": OUT}

PIXTRAL = TinyProjector("pixtral", KEYS, LAYER, {**TENSORS, **BIASES, **ROW_END}, n_embd=OUT, tokens=("[IMG_END]",))
MISTRAL3 = TinyProjector(
    "pixtral",
    {**KEYS, "spatial_merge_size": 2},
    LAYER,
    {**TENSORS, **MERGER, **ROW_END},
    n_embd=OUT,
    tokens=("[IMG_END]",),
    variant="merged",
)
LIGHTONOCR = TinyProjector(
    "lightonocr",
    {**KEYS, "spatial_merge_size": 2},
    LAYER,
    {**TENSORS, **BIASES, **MERGER},
    n_embd=OUT,
)

PROJECTORS = [PIXTRAL, MISTRAL3, LIGHTONOCR]
