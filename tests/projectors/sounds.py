"""Small projectors of sounds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llamado.media.media import MediaKind
from projectors.spec import Shape, TinyProjector

N, FF, MEL, OUT = 80, 96, 16, 64
"""Widths. 80 is no power of two: llama.cpp rounds the length of stacked positions up in a way that only fails then."""

LAYER: dict[str, Shape] = {
    **{f"{name}.{which}": N for name in ("ln1", "ln2") for which in ("weight", "bias")},
    **{f"attn_{name}.weight": (N, N) for name in ("q", "k", "v", "out")},
    **{f"attn_{name}.bias": N for name in ("q", "v", "out")},
    "ffn_up.weight": (N, FF),
    "ffn_up.bias": FF,
    "ffn_down.weight": (FF, N),
    "ffn_down.bias": N,
}
KEYS = {"embedding_length": N, "feed_forward_length": FF, "attention.head_count": 5, "num_mel_bins": MEL}
WHISPER: dict[str, Shape] = {
    "a.conv1d.1.weight": (3, MEL, N),
    "a.conv1d.1.bias": (1, N),
    "a.conv1d.2.weight": (3, N, N),
    "a.conv1d.2.bias": (1, N),
    "a.position_embd.weight": (N, 1500),
    "a.post_ln.weight": N,
    "a.post_ln.bias": N,
}


def linear(name: str, n_in: int, n_out: int, *, bias: bool = True) -> dict[str, Shape]:
    """Return the tensors of a matrix with a bias."""
    return {f"{name}.weight": (n_in, n_out), **({f"{name}.bias": n_out} if bias else {})}


def norm(name: str, n: int, *, bias: bool = True) -> dict[str, Shape]:
    """Return the tensors of a norm."""
    return {f"{name}.weight": n, **({f"{name}.bias": n} if bias else {})}


def whisper(projector: str, tensors: Mapping[str, Shape], *tokens: str, **keys: Any) -> TinyProjector:
    """Return a projector with a Whisper encoder."""
    return TinyProjector(
        projector,
        {**KEYS, **{f"projector.{key}": value for key, value in keys.items()}},
        LAYER,
        {**WHISPER, **tensors},
        n_embd=OUT,
        kind=MediaKind.AUDIO,
        stack="a.blk",
        tokens=tokens,
    )


ULTRAVOX = whisper(
    "ultravox",
    {
        **linear("mm.a.mlp.1", 8 * N, 96, bias=False),
        **linear("mm.a.mlp.2", 48, OUT, bias=False),
        **norm("mm.a.norm_pre", 8 * N, bias=False),
        **norm("mm.a.norm_mid", 48, bias=False),
    },
    stack_factor=8,
)
VOXTRAL = whisper(
    "voxtral",
    {**linear("mm.a.mlp.1", 4 * N, 96, bias=False), **linear("mm.a.mlp.2", 96, OUT, bias=False)},
    "[BEGIN_AUDIO]",
    stack_factor=4,
)
QWEN2A = whisper("qwen2a", linear("mm.a.fc", N, OUT), "<|audio_bos|>", "<|audio_eos|>")
QWEN25O = whisper("qwen2.5o", linear("mm.a.fc", N, OUT), "<|audio_bos|>", "<|audio_eos|>")
MUSIC_FLAMINGO = whisper("musicflamingo", {**linear("mm.a.mlp.1", N, 96), **linear("mm.a.mlp.2", 96, OUT)}, "<sound>")
MERALION = whisper(
    "meralion",
    {
        **norm("mm.a.norm_pre", 15 * N),
        **linear("mm.a.mlp.0", 15 * N, 96),
        **linear("mm.a.mlp.1", 96, 80),
        **linear("mm.a.mlp.2", 96, 80),
        **linear("mm.a.mlp.3", 80, OUT),
    },
    stack_factor=15,
)
GLMA = whisper(
    "glma",
    {
        **norm("mm.a.norm_pre", N),
        **linear("mm.a.mlp.1", 4 * N, 96),
        **linear("mm.a.mlp.2", 96, OUT),
        "v.boi": OUT,
        "v.eoi": OUT,
    },
    stack_factor=4,
)

QWEN3A = TinyProjector(
    "qwen3a",
    KEYS,
    {**LAYER, "attn_k.bias": N},
    {
        "a.conv2d.1.weight": (3, 3, 1, 12),
        "a.conv2d.1.bias": (1, 1, 12),
        "a.conv2d.2.weight": (3, 3, 12, 12),
        "a.conv2d.2.bias": (1, 1, 12),
        "a.conv2d.3.weight": (3, 3, 12, 20),
        "a.conv2d.3.bias": (1, 1, 20),
        "a.conv_out.weight": (2 * 20, N),
        "a.position_embd.weight": (N, 20),
        "a.post_ln.weight": N,
        "a.post_ln.bias": N,
        **linear("mm.a.mlp.1", N, 96),
        **linear("mm.a.mlp.2", 96, OUT),
    },
    n_embd=OUT,
    kind=MediaKind.AUDIO,
    stack="a.blk",
    tokens=("<|audio_start|>", "<|audio_end|>"),
)
DOTS3NOTE = TinyProjector(
    "dots3note_a",
    {**KEYS, "clip.use_silu": True},
    {
        **{f"{name}.weight": N for name in ("ln1", "ln2")},
        **{f"attn_{name}.weight": (N, N) for name in ("q", "k", "v", "out")},
        **{f"attn_{name}.bias": N for name in ("q", "v", "out")},
        **linear("ffn_up", N, FF),
        **linear("ffn_gate", N, FF),
        **linear("ffn_down", FF, N),
    },
    {
        **{name: shape for name, shape in QWEN3A.tensors.items() if name.startswith("a.conv")},
        "a.post_ln.weight": N,
        **norm("mm.a.norm_pre", N),
        **linear("mm.a.mlp.1", N, 96),
        **linear("mm.a.mlp.3", 96, OUT),
    },
    n_embd=OUT,
    kind=MediaKind.AUDIO,
    stack="a.blk",
    tokens=("<|audio_comp_start|>", "<|audio_comp_end|>"),
)
MIMO_LOCAL: dict[str, Shape] = {
    **norm("ln1", N, bias=False),
    **norm("ln2", N, bias=False),
    **linear("attn_q", N, N),
    **linear("attn_k", N, N),
    **linear("attn_v", N, N),
    **linear("attn_out", N, N, bias=False),
    **linear("ffn_gate", N, FF, bias=False),
    **linear("ffn_up", N, FF, bias=False),
    **linear("ffn_down", FF, N, bias=False),
}
MIMO = TinyProjector(
    "mimo_audio",
    {
        **KEYS,
        "wa_pattern_mode": [-1, 0, -1, 0],
        "window_size": 6,
        "rvq.num_quantizers": 3,
        "rvq.codebook_size": [16, 12, 8],
        "local_block_count": 2,
        "local_group_size": 4,
    },
    LAYER,
    {
        **{name: shape for name, shape in WHISPER.items() if "position" not in name},
        "a.downsample.conv.weight": (2, N, N),
        **norm("a.downsample.norm", N),
        "a.rvq.codebook.weight": (N, 16, 3),
        "mm.a.code_embd.weight": (N, 20, 3),
        **{f"mm.a.local_blk.{i}.{name}": shape for i in range(2) for name, shape in MIMO_LOCAL.items()},
        **norm("mm.a.local_norm", N, bias=False),
        **linear("mm.a.mlp.1", 4 * N, 96, bias=False),
        **linear("mm.a.mlp.2", 96, OUT, bias=False),
    },
    n_embd=OUT,
    kind=MediaKind.AUDIO,
    n_layer=4,
    stack="a.blk",
    tokens=("<|mimo_audio_start|>", "<|mimo_audio_end|>"),
)
GEMMA4UA = TinyProjector(
    "gemma4ua",
    {**KEYS, "num_mel_bins": 640},
    {},
    linear("mm.a.input_projection", 640, OUT, bias=False),
    n_embd=OUT,
    kind=MediaKind.AUDIO,
    n_layer=0,
    stack="a.blk",
    tokens=("<|audio>", "<audio|>"),
)

SUBSAMPLING: dict[str, Shape] = {
    "a.conv1d.0.weight": (3, 3, 1, 12),
    "a.conv1d.2.weight": (3, 3, 1, 12),
    "a.conv1d.3.weight": (1, 1, 12, 12),
    "a.conv1d.5.weight": (3, 3, 1, 12),
    "a.conv1d.6.weight": (1, 1, 12, 12),
    **{f"a.conv1d.{i}.bias": (1, 1, 12) for i in (0, 2, 3, 5, 6)},
}


def conformer(n: int, n_head: int, *, bias: bool = True) -> dict[str, Shape]:
    """Return the tensors of a conformer's layer."""
    found: dict[str, Shape] = {
        "pos_bias_u": (n // n_head, n_head),
        "pos_bias_v": (n // n_head, n_head),
        "linear_pos.weight": (n, n),
        "conv_dw.weight": (9, n),
        "conv_norm.weight": n,
        "conv_norm.bias": n,
    }
    for name in ("ffn_norm", "ffn_norm_1", "ln1", "ln2", "norm_conv"):
        found |= norm(name, n)
    for name in ("attn_q", "attn_k", "attn_v", "attn_out"):
        found |= linear(name, n, n, bias=bias)
    for suffix in ("", "_1"):
        found |= linear(f"ffn_up{suffix}", n, FF, bias=bias) | linear(f"ffn_down{suffix}", FF, n, bias=bias)
    return found | linear("conv_pw1", n, 2 * n, bias=bias) | linear("conv_pw2", n, n, bias=bias)


LFM2A = TinyProjector(
    "lfm2a",
    # llama.cpp has positions of this width only.
    {"embedding_length": 512, "feed_forward_length": FF, "attention.head_count": 8, "num_mel_bins": MEL},
    {**conformer(512, 8), "conv_dw.bias": 512},
    {
        **SUBSAMPLING,
        **linear("a.pre_encode.out", 2 * 12, 512),
        "a.position_embd.weight": (OUT, 2000),
        **norm("mm.a.mlp.0", 512),
        **linear("mm.a.mlp.1", 512, 96),
        **linear("mm.a.mlp.3", 96, OUT),
    },
    n_embd=OUT,
    kind=MediaKind.AUDIO,
    stack="a.blk",
)

PARAKEET = TinyProjector(
    "parakeet",
    {**KEYS, "subsampling_factor": 8, "conv_kernel_size": 9},
    {**conformer(N, 5, bias=False), "conv_norm_mean": N, "conv_norm_var": N},
    {
        **SUBSAMPLING,
        **linear("a.pre_encode.out", 2 * 12, N),
        **norm("mm.a.norm_pre", N, bias=False),
        **linear("mm.a.mlp.1", N, 96, bias=False),
        **linear("mm.a.mlp.2", 96, OUT, bias=False),
        "a.window": 400,
        "a.mel_filters": (257, MEL),
        # Of the encoder of pictures, which llama.cpp looks for as well.
        **{f"mm.model.mlp.{i}.weight": (8, 8) for i in (0, 1, 3)},
    },
    n_embd=OUT,
    kind=MediaKind.AUDIO,
    stack="a.blk",
)


def query_layer(name: str, n: int, n_seen: int) -> dict[str, Shape]:
    """Return the tensors of an attention of queries."""
    seen = {**linear(f"{name}_k", n_seen, n), **linear(f"{name}_v", n_seen, n)}
    return {**linear(f"{name}_q", n, n), **seen, **linear(f"{name}_out", n, n), **norm(f"{name}_norm", n)}


def granite(variant: str, *features: int) -> TinyProjector:
    """Return a projector of Granite Speech that sees the outputs of layers."""
    layer = {name: shape for name, shape in conformer(N, 5).items() if not name.startswith(("pos_bias", "linear_pos"))}
    layer = {name: shape for name, shape in layer.items() if name not in ("attn_q.bias", "attn_k.bias", "attn_v.bias")}
    projector: dict[str, Shape] = {}
    for i in range(2):
        tensors = {
            **query_layer("self_attn", N, N),
            **query_layer("cross_attn", N, N * (len(features) + 1)),
            **linear("ffn_up", N, FF),
            **linear("ffn_down", FF, N),
            **norm("ffn_norm", N),
        }
        projector |= {f"a.proj_blk.{i}.{name}": shape for name, shape in tensors.items()}
    return TinyProjector(
        "granite_speech",
        {
            **KEYS,
            "chunk_size": 20,
            "conv_kernel_size": 15,
            "max_pos_emb": 32,
            "projector.window_size": 15,
            "projector.downsample_rate": 5,
            "projector.head_count": 5,
            **({"feature_layer": list(features)} if features else {}),
        },
        {**layer, "conv_dw.weight": (15, N), "attn_rel_pos_emb": (N // 5, 65)},
        {
            **linear("a.input_projection", MEL, N),
            **linear("a.enc_ctc_out", N, 48),
            **linear("a.enc_ctc_out_mid", 48, N),
            "a.proj_query": (N, 3),
            **norm("a.proj_norm", N),
            **linear("a.proj_linear", N, OUT),
            **projector,
        },
        n_embd=OUT,
        kind=MediaKind.AUDIO,
        stack="a.blk",
        variant=variant,
    )


GEMMA4A_LAYER: dict[str, Shape] = {
    **{f"{name}.weight": N for name in ("ffn_norm", "ffn_norm_1", "ffn_post_norm", "ffn_post_norm_1", "ln2")},
    **{f"{name}.weight": N for name in ("attn_pre_norm", "attn_post_norm", "conv_norm", "norm_conv")},
    **{f"attn_{name}.weight": (N, N) for name in ("q", "k", "v", "out", "k_rel")},
    **{f"ffn_up{suffix}.weight": (N, FF) for suffix in ("", "_1")},
    **{f"ffn_down{suffix}.weight": (FF, N) for suffix in ("", "_1")},
    "per_dim_scale.weight": N // 5,
    "conv_pw1.weight": (N, 2 * N),
    "conv_dw.weight": (5, N),
    "conv_pw2.weight": (N, N),
    **{f"attn_q.{limit}": 1 for limit in ("input_min", "input_max", "output_min", "output_max")},
    **{f"ffn_down.{limit}": 1 for limit in ("input_min", "input_max")},
}
GEMMA4A = TinyProjector(
    "gemma4a",
    KEYS,
    GEMMA4A_LAYER,
    {
        "a.conv1d.0.weight": (3, 3, 1, 12),
        "a.conv1d.0.norm.weight": 12,
        "a.conv1d.1.weight": (3, 3, 12, 8),
        "a.conv1d.1.norm.weight": 8,
        **linear("a.input_projection", 4 * 8, N, bias=False),
        **linear("a.pre_encode.out", N, 72),
        **linear("mm.a.input_projection", 72, OUT, bias=False),
    },
    n_embd=OUT,
    kind=MediaKind.AUDIO,
    stack="a.blk",
    tokens=("<|audio>", "<audio|>"),
)

SOUNDS = [
    *(ULTRAVOX, VOXTRAL, QWEN2A, QWEN25O, MUSIC_FLAMINGO, MERALION, GLMA),
    *(QWEN3A, LFM2A, PARAKEET, granite(""), granite("features", 0, 1), GEMMA4A, GEMMA4UA, DOTS3NOTE, MIMO),
]
