"""Small projectors of models that cut pictures into tiles, or take them in any size."""

from __future__ import annotations

from dataclasses import replace

from projectors.siglip import FF, KEYS, LAYER, TENSORS, N
from projectors.spec import Shape, TinyProjector

PLAIN = {**LAYER, "attn_qkv.weight": (N, 3 * N), "attn_qkv.bias": 3 * N}
"""Tensors of a layer with one matrix for queries, keys and values."""
for _name in ("q", "k", "v"):
    del PLAIN[f"attn_{_name}.weight"], PLAIN[f"attn_{_name}.bias"]


def two_matrices(first: str, second: str, n_in: int, n_out: int) -> dict[str, Shape]:
    """Return the tensors of a network of two layers."""
    return {
        f"{first}.weight": (n_in, FF),
        f"{first}.bias": FF,
        f"{second}.weight": (FF, n_out),
        f"{second}.bias": n_out,
    }


IDEFICS3 = TinyProjector(
    "idefics3",
    {**KEYS, "image_size": 32, "projector.scale_factor": 4, "preproc_image_size": 96, "clip.use_gelu": True},
    LAYER,
    {**TENSORS, "v.position_embd.weight": (N, 64), "mm.model.fc.weight": (16 * N, 64)},
    n_embd=64,
    tokens=(
        "<fake_token_around_image>",
        "<global-img>",
        *(f"<row_{row}_col_{column}>" for row in range(1, 5) for column in range(1, 5)),
    ),
)
LFM2 = TinyProjector(
    "lfm2",
    {**KEYS, "image_size": 64, "patch_size": 16, "projector.scale_factor": 2, "clip.use_gelu": True},
    LAYER,
    {
        **TENSORS,
        "v.patch_embd.weight": (16, 16, 3, N),
        "v.position_embd.weight": (N, 36),
        "mm.input_norm.weight": 4 * N,
        "mm.input_norm.bias": 4 * N,
        **two_matrices("mm.1", "mm.2", 4 * N, 64),
    },
    n_embd=64,
    tokens=(
        "<|image_start|>",
        "<|image_end|>",
        "<|img_thumbnail|>",
        *(f"<|img_row_{row}_col_{column}|>" for row in range(1, 6) for column in range(1, 6)),
    ),
)
PHI4 = TinyProjector(
    "phi4",
    {**KEYS, "image_size": 32, "image_min_pixels": 256, "image_max_pixels": 2500, "clip.use_gelu": True},
    LAYER,
    {**TENSORS, "v.position_embd.weight": (N, 64), **two_matrices("mm.0", "mm.2", N, 64)},
    n_embd=64,
)
JANUS_PRO = TinyProjector(
    "janus_pro",
    {**KEYS, "image_size": 32, "clip.use_gelu": True},
    LAYER,
    {**TENSORS, "v.position_embd.weight": (N, 64), **two_matrices("mm.0", "mm.1", N, 64)},
    n_embd=64,
)
INTERNVL = TinyProjector(
    "internvl",
    {**KEYS, "image_size": 32, "projector.scale_factor": 2, "clip.use_gelu": True},
    {**PLAIN, "ls1.weight": N, "ls2.weight": N},
    {
        "v.patch_embd.weight": (4, 4, 3, N),
        "v.patch_embd.bias": N,
        "v.class_embd": N,
        "v.position_embd.weight": (N, 65),
        "mm.model.mlp.0.weight": 4 * N,
        "mm.model.mlp.0.bias": 4 * N,
        **two_matrices("mm.model.mlp.1", "mm.model.mlp.3", 4 * N, 64),
    },
    n_embd=64,
    tokens=("<img>", "</img>"),
)
HEAD_NORMS = replace(
    INTERNVL,
    layer={**LAYER, "ls1.weight": N, "ls2.weight": N, "attn_q_norm.weight": N, "attn_k_norm.weight": N},
    variant="norms",
)
NEMOTRON_V2_VL = TinyProjector(
    "nemotron_v2_vl",
    {**KEYS, "image_size": 32, "projector.scale_factor": 2, "clip.use_gelu": True},
    PLAIN,
    {
        "v.patch_embd.weight": (4, 4, 3, N),
        "v.class_embd": (N, 3),
        "v.position_embd.weight": (N, 64),
        "mm.model.mlp.0.weight": 4 * N,
        "mm.model.mlp.1.weight": (4 * N, FF),
        "mm.model.mlp.3.weight": (FF, 64),
    },
    n_embd=64,
)
LLAMA4 = TinyProjector(
    "llama4",
    {**KEYS, "image_size": 32, "projector.scale_factor": 2, "clip.use_gelu": True},
    LAYER,
    {
        "v.patch_embd.weight": (48, N),
        "v.class_embd": N,
        "v.position_embd.weight": (N, 65),
        **{f"v.{name}.{which}": N for name in ("pre_ln", "post_ln") for which in ("weight", "bias")},
        "mm.model.mlp.1.weight": (4 * N, FF),
        "mm.model.mlp.2.weight": (FF, FF),
        "mm.model.fc.weight": (FF, 64),
    },
    n_embd=64,
    tokens=("<|image_start|>", "<|image_end|>"),
)
PROJECTORS = [IDEFICS3, LFM2, PHI4, JANUS_PRO, INTERNVL, HEAD_NORMS, NEMOTRON_V2_VL, LLAMA4]
