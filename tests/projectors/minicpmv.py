"""Small projectors of MiniCPM-V."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from projectors.llava import norm
from projectors.siglip import KEYS, LAYER, TENSORS, N
from projectors.spec import Shape, TinyProjector
from projectors.tiled import two_matrices

WIDTH = 128
TABLE: dict[str, Shape] = {**TENSORS, "v.position_embd.weight": (N, 4900)}
SLICES = ("<image>", "</image>", "<slice>", "</slice>")

RESAMPLER = TinyProjector(
    "resampler",
    {**KEYS, "image_size": 32, "clip.minicpmv_version": np.int32(3), "clip.use_gelu": True},
    LAYER,
    {
        **TABLE,
        "resampler.pos_embed_k": (WIDTH, 4),
        "resampler.query": (WIDTH, 64),
        "resampler.kv.weight": (N, WIDTH),
        "resampler.proj.weight": (WIDTH, WIDTH),
        **{
            f"resampler.attn.{name}.{which}": (WIDTH, WIDTH) if which == "weight" else WIDTH
            for name in ("q", "k", "v", "out")
            for which in ("weight", "bias")
        },
        **norm("resampler.ln_q", WIDTH),
        **norm("resampler.ln_kv", WIDTH),
        **norm("resampler.ln_post", WIDTH),
    },
    n_embd=WIDTH,
    tokens=SLICES,
)
OLD = replace(
    RESAMPLER,
    keys={k: v for k, v in RESAMPLER.keys.items() if "version" not in k} | {"clip.minicpmv_query_num": 8},
    tensors={**RESAMPLER.tensors, "resampler.query": (WIDTH, 8)},
    variant="old",
)
MINICPMV46 = TinyProjector(
    "minicpmv4_6",
    {**KEYS, "image_size": 32, "wa_layer_indexes": [1], "clip.use_gelu": True},
    LAYER,
    {
        **TABLE,
        **norm("v.vit_merger.ln1", N),
        **{
            f"v.vit_merger.attn_{name}.{which}": (N, N) if which == "weight" else N
            for name in ("q", "k", "v", "out")
            for which in ("weight", "bias")
        },
        **norm("v.vit_merger.ds_ln", 4 * N),
        **two_matrices("v.vit_merger.ds_ffn_up", "v.vit_merger.ds_ffn_down", 4 * N, N),
        **norm("mm.input_norm", 4 * N),
        **two_matrices("mm.up", "mm.down", 4 * N, 64),
    },
    n_embd=64,
    n_layer=3,
    tokens=SLICES,
)
FOUR_TIMES = replace(
    MINICPMV46,
    keys={**{k: v for k, v in MINICPMV46.keys.items() if k != "wa_layer_indexes"}, "projector.scale_factor": 2},
    tensors={k: v for k, v in MINICPMV46.tensors.items() if "vit_merger" not in k},
    variant="2x2",
)
PROJECTORS = [RESAMPLER, OLD, MINICPMV46, FOUR_TIMES]
