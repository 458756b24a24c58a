"""Small projector with MobileNetV5."""

from __future__ import annotations

from projectors.spec import Shape, TinyProjector

N, OUT = 16, 64


def edge(name: str, n_in: int, n_out: int) -> dict[str, Shape]:
    return {
        f"{name}.conv_exp.weight": (3, 3, n_in, 24),
        f"{name}.bn1.weight": 24,
        f"{name}.conv_pwl.weight": (1, 1, 24, n_out),
        f"{name}.bn2.weight": n_out,
    }


def inverted(name: str, n_in: int, n_out: int, start: int = 0, middle: int = 0) -> dict[str, Shape]:
    made: dict[str, Shape] = {
        f"{name}.pw_exp.conv.weight": (1, 1, n_in, 40),
        f"{name}.pw_exp.bn.weight": 40,
        f"{name}.pw_proj.conv.weight": (1, 1, 40, n_out),
        f"{name}.pw_proj.bn.weight": n_out,
        f"{name}.layer_scale.gamma": (1, 1, n_out),
    }
    if start:
        made |= {f"{name}.dw_start.conv.weight": (start, start, 1, n_in), f"{name}.dw_start.bn.weight": n_in}
    if middle:
        made |= {f"{name}.dw_mid.conv.weight": (middle, middle, 1, 40), f"{name}.dw_mid.bn.weight": 40}
    return made


def attention(name: str, n: int, *, is_shrinking: bool) -> dict[str, Shape]:
    made: dict[str, Shape] = {
        f"{name}.norm.weight": n,
        f"{name}.attn.query.proj.weight": (1, 1, n, 32),
        f"{name}.attn.key.proj.weight": (1, 1, n, 8),
        f"{name}.attn.value.proj.weight": (1, 1, n, 8),
        f"{name}.attn.output.proj.weight": (1, 1, 32, n),
        f"{name}.layer_scale.gamma": (1, 1, n),
    }
    for part in ("key", "value") if is_shrinking else ():
        made |= {f"{name}.attn.{part}.down_conv.weight": (3, 3, 1, n), f"{name}.attn.{part}.norm.weight": n}
    return made


GEMMA3NV = TinyProjector(
    "gemma3nv",
    {
        "embedding_length": OUT,
        "feed_forward_length": 64,
        "attention.head_count": 4,
        "patch_size": 2,
        "image_size": 512,
        "attention.layer_norm_epsilon": 1e-6,
    },
    {},
    {
        "v.conv_stem.conv.weight": (3, 3, 3, N),
        "v.conv_stem.conv.bias": (1, 1, N),
        "v.conv_stem.bn.weight": N,
        **edge("v.blk.0.0", N, 24),
        **edge("v.blk.0.1", 24, 24),
        **inverted("v.blk.1.0", 24, 32, start=3, middle=5),
        **inverted("v.blk.1.1", 32, 32, start=5),
        **inverted("v.blk.2.0", 32, 48, start=5, middle=5),
        **attention("v.blk.2.1", 48, is_shrinking=True),
        **inverted("v.blk.2.2", 48, 48),
        **inverted("v.blk.3.0", 48, 56, middle=3),
        **attention("v.blk.3.1", 56, is_shrinking=False),
        "v.msfa.ffn.pw_exp.conv.weight": (1, 1, 104, 72),
        "v.msfa.ffn.pw_exp.bn.weight": 72,
        "v.msfa.ffn.pw_proj.conv.weight": (1, 1, 72, OUT),
        "v.msfa.ffn.pw_proj.bn.weight": OUT,
        "v.msfa.norm.weight": OUT,
        "mm.input_projection.weight": (OUT, OUT),
        "mm.soft_emb_norm.weight": OUT,
    },
    n_embd=OUT,
    n_layer=0,
    half=("dw_start.conv", "dw_mid.conv", "down_conv"),
    tokens=("<start_of_image>", "<end_of_image>"),
)

PROJECTORS = [GEMMA3NV]
