"""Small projectors with the encoders of MiMo-VL, Hunyuan-VL, MiniMax-M3 and Muse Glimmer."""

from __future__ import annotations

from projectors.qwen_vl import KEYS, MERGED, OUT, PATCHES, POST_NORM
from projectors.siglip import FF, LAYER, N
from projectors.spec import Shape, TinyProjector

HEAD = 16
SINKS: dict[str, Shape] = {"attn_sinks": 4}

MIMOVL = TinyProjector(
    "mimovl",
    {
        **KEYS,
        "attention.head_count": 4,
        "attention.head_count_kv": 2,
        "window_size": 20,
        "wa_pattern_mode": [0, 1, 1, -1, 0, 1],
        "image_min_pixels": 1024,
        "image_max_pixels": 65536,
        "clip.use_silu": True,
    },
    {
        "ln1.weight": N,
        "ln2.weight": N,
        "attn_qkv.weight": (N, 8 * HEAD),
        "attn_qkv.bias": 8 * HEAD,
        "attn_out.weight": (4 * HEAD, N),
        "attn_out.bias": N,
        **SINKS,
        "ffn_up.weight": (N, FF),
        "ffn_up.bias": FF,
        "ffn_gate.weight": (N, FF),
        "ffn_gate.bias": FF,
        "ffn_down.weight": (FF, N),
        "ffn_down.bias": N,
    },
    {**PATCHES, **POST_NORM, "mm.0.weight": (MERGED, MERGED), "mm.2.weight": (MERGED, OUT)},
    n_embd=OUT,
    layers={3: {"attn_sinks": None}},
    n_layer=6,
    text="qwen2vl",
    tokens=("<|vision_start|>", "<|vision_end|>"),
)
HUNYUANVL = TinyProjector(
    "hunyuanvl",
    {**KEYS, "patch_size": 4, "image_min_pixels": 1024, "image_max_pixels": 16384},
    LAYER,
    {
        "v.patch_embd.weight": (4, 4, 3, N),
        "v.patch_embd.bias": N,
        "v.position_embd.weight": (N, 8 * 8),
        "v.image_newline": 96,
        "mm.pre_norm.weight": N,
        "mm.0.weight": (2, 2, N, 48),
        "mm.0.bias": 48,
        "mm.2.weight": (1, 1, 48, 96),
        "mm.2.bias": 96,
        "mm.model.fc.weight": (96, OUT),
        "mm.model.fc.bias": OUT,
        "mm.post_norm.weight": OUT,
        "mm.image_begin": OUT,
        "mm.image_end": OUT,
    },
    n_embd=OUT,
    text="hunyuan_vl",
    tokens=("<｜hy_place▁holder▁no▁100｜>", "<｜hy_place▁holder▁no▁101｜>"),
)
MINIMAX_M3 = TinyProjector(
    "minimax_m3",
    {**KEYS, "attention.head_count": 1},
    LAYER,
    {
        **PATCHES,
        "v.pre_ln.weight": N,
        "v.pre_ln.bias": N,
        "mm.1.weight": (N, 48),
        "mm.1.bias": 48,
        "mm.2.weight": (48, 40),
        "mm.2.bias": 40,
        "mm.merger.fc1.weight": (160, 96),
        "mm.merger.fc1.bias": 96,
        "mm.merger.fc2.weight": (96, OUT),
        "mm.merger.fc2.bias": OUT,
    },
    n_embd=OUT,
    tokens=("]<]start of image[>[", "]<]end of image[>["),
)
MUSE_GLIMMER = TinyProjector(
    "muse-glimmer",
    KEYS,
    LAYER,
    {
        "v.patch_embd.weight": (8, 8, 3, N),
        "v.patch_embd.bias": N,
        "v.position_embd.weight": (N, 5 * 5),
        "v.pre_ln.weight": N,
        "v.pre_ln.bias": N,
        **POST_NORM,
        "mm.0.weight": (MERGED, 80),
        "mm.1.weight": (80, 96),
        "mm.2.weight": (96, OUT),
    },
    n_embd=OUT,
    n_layer=6,
    text="qwen2vl",
    tokens=("<|image_start|>", "<|image_end|>"),
)

PROJECTORS = [MIMOVL, HUNYUANVL, MINIMAX_M3, MUSE_GLIMMER]
