"""Small projectors of LLaVA, MobileVLM, GLM-Edge and CogVLM."""

from __future__ import annotations

from dataclasses import replace

from projectors.siglip import FF, KEYS, LAYER, N
from projectors.spec import Shape, TinyProjector
from projectors.tiled import PLAIN, two_matrices

CLIP: dict[str, Shape] = {
    "v.patch_embd.weight": (4, 4, 3, N),
    "v.class_embd": N,
    "v.position_embd.weight": (N, 65),
    **{f"v.{name}.{which}": N for name in ("pre_ln", "post_ln") for which in ("weight", "bias")},
}


def norm(name: str, n: int) -> dict[str, Shape]:
    """Return the tensors of a layer norm."""
    return {f"{name}.weight": n, f"{name}.bias": n}


MLP = TinyProjector(
    "mlp",
    {**KEYS, "image_size": 32, "clip.has_llava_projector": True},
    LAYER,
    {**CLIP, **two_matrices("mm.0", "mm.2", N, 64)},
    n_embd=64,
    n_layer=3,
)
TILED = replace(
    MLP,
    keys={**MLP.keys, "image_grid_pinpoints": [32, 64, 64, 32, 64, 64], "mm_patch_merge_type": "spatial_unpad"},
    tensors={**MLP.tensors, "v.image_newline": 64},
    variant="tiles",
)
FEATURES = replace(
    MLP,
    keys={**MLP.keys, "feature_layer": [0, 2, 3], "clip.use_gelu": True},
    tensors={
        **{k: v for k, v in CLIP.items() if "class" not in k and "pre_ln" not in k},
        "v.position_embd.weight": (N, 64),
        **two_matrices("mm.0", "mm.2", 3 * N, 64),
    },
    variant="features",
)
SWAPPED = replace(
    MLP,
    layer={**LAYER, "ffn_up.weight": (FF, N), "ffn_up.bias": N, "ffn_down.weight": (N, FF), "ffn_down.bias": FF},
    variant="swapped",
)
MLP_NORM = replace(
    MLP,
    tensors={**CLIP, **two_matrices("mm.0", "mm.3", N, 64), **norm("mm.1", FF), **norm("mm.4", 64)},
    variant="norms",
)
MOBILE_KEYS = {**KEYS, "image_size": 96}
MOBILE_CLIP = {**CLIP, "v.position_embd.weight": (N, 577)}


def block(number: int, n: int) -> dict[str, Shape]:
    """Return the tensors of a block of MobileVLM."""
    name = f"mm.model.mb_block.{number}.block"
    return {
        f"{name}.0.0.weight": (3, 3, 1, n),
        **norm(f"{name}.0.1", n),
        **two_matrices(f"{name}.1.fc1", f"{name}.1.fc2", n, n),
        f"{name}.2.0.weight": (n, n),
        **norm(f"{name}.2.1", n),
    }


LDP = TinyProjector(
    "ldp",
    MOBILE_KEYS,
    LAYER,
    {**MOBILE_CLIP, **two_matrices("mm.model.mlp.1", "mm.model.mlp.3", N, 64), **block(1, 64), **block(2, 64)},
    n_embd=64,
    half=(".block.0.0.weight",),
)
LDPV2 = TinyProjector(
    "ldpv2",
    MOBILE_KEYS,
    LAYER,
    {
        **MOBILE_CLIP,
        **two_matrices("mm.model.mlp.0", "mm.model.mlp.2", N, 64),
        "mm.model.peg.0.weight": (3, 3, 1, 64),
        "mm.model.peg.0.bias": 64,
    },
    n_embd=64,
    half=("peg.0.weight",),
)
ADAPTER = TinyProjector(
    "adapter",
    {**KEYS, "image_size": 32, "clip.use_gelu": True},
    LAYER,
    {
        "v.patch_embd.weight": (4, 4, 3, N),
        "v.patch_embd.bias": N,
        "v.position_embd.weight": (N, 64),
        "adapter.conv.weight": (2, 2, N, 48),
        "adapter.conv.bias": 48,
        "adapter.linear.linear.weight": (48, 40),
        **norm("adapter.linear.norm1", 40),
        "adapter.linear.gate.weight": (40, FF),
        "adapter.linear.dense_h_to_4h.weight": (40, FF),
        "adapter.linear.dense_4h_to_h.weight": (FF, 64),
        "adapter.boi": 64,
        "adapter.eoi": 64,
    },
    n_embd=64,
)

COGVLM = TinyProjector(
    "cogvlm",
    {**KEYS, "image_size": 32, "clip.use_gelu": True},
    PLAIN,
    {
        "v.patch_embd.weight": (4, 4, 3, N),
        "v.patch_embd.bias": N,
        "v.class_embd": N,
        "v.position_embd.weight": (N, 65),
        "mm.model.fc.weight": (N, 64),
        "mm.post_fc_norm.weight": 64,
        "mm.post_fc_norm.bias": 64,
        "mm.up.weight": (64, FF),
        "mm.gate.weight": (64, FF),
        "mm.down.weight": (FF, 64),
        "v.boi": 64,
        "v.eoi": 64,
    },
    n_embd=64,
)

PROJECTORS = [MLP, TILED, FEATURES, SWAPPED, MLP_NORM, LDP, LDPV2, ADAPTER, COGVLM]
