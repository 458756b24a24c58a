"""Small projector with ConvNeXt."""

from __future__ import annotations

from projectors.spec import Shape, TinyProjector

WIDTHS = 16, 24
OUT = 64


def block(name: str, n: int) -> dict[str, Shape]:
    return {
        f"{name}.dw.weight": (7, 7, 1, n),
        **{f"{name}.{part}.bias": n for part in ("dw", "ln", "pw2")},
        f"{name}.ln.weight": n,
        f"{name}.pw1.weight": (n, 4 * n),
        f"{name}.pw1.bias": 4 * n,
        f"{name}.grn.weight": 4 * n,
        f"{name}.grn.bias": 4 * n,
        f"{name}.pw2.weight": (4 * n, n),
    }


YASA2 = TinyProjector(
    "yasa2",
    {
        "embedding_length": WIDTHS[1],
        "feed_forward_length": 4 * WIDTHS[1],
        "attention.head_count": 1,
        "patch_size": 4,
        "image_size": 136,
    },
    {},
    {
        "v.patch_embd.weight": (4, 4, 3, WIDTHS[0]),
        "v.patch_embd.bias": WIDTHS[0],
        "v.patch_ln.weight": WIDTHS[0],
        "v.patch_ln.bias": WIDTHS[0],
        **block("v.stage.0.blk.0", WIDTHS[0]),
        "v.stage.1.down.ln.weight": WIDTHS[0],
        "v.stage.1.down.ln.bias": WIDTHS[0],
        "v.stage.1.down.conv.weight": (2, 2, *WIDTHS),
        "v.stage.1.down.conv.bias": WIDTHS[1],
        **block("v.stage.1.blk.0", WIDTHS[1]),
        **block("v.stage.1.blk.1", WIDTHS[1]),
        "v.vision_pos_embed": (WIDTHS[1], 17 * 17),
        "mm.0.weight": (WIDTHS[1], 32),
        "mm.0.bias": 32,
        "mm.2.weight": (32, OUT),
        "mm.2.bias": OUT,
    },
    n_embd=OUT,
    n_layer=0,
    half=(".dw.weight",),
    tokens=("<image>", "</image>"),
)

PROJECTORS = [YASA2]
