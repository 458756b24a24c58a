"""Small projectors of DeepSeek-OCR."""

from __future__ import annotations

from projectors.siglip import FF, LAYER, N
from projectors.spec import Shape, TinyProjector

OUT, SAM, SAM_FF, N_SAM, N_HEAD = 64, 16, 24, 3, 2

SAM_LAYER: dict[str, Shape] = {
    **{f"{name}.{which}": SAM for name in ("pre_ln", "post_ln") for which in ("weight", "bias")},
    "attn.qkv.weight": (SAM, 3 * SAM),
    "attn.qkv.bias": 3 * SAM,
    "attn.out.weight": (SAM, SAM),
    "attn.out.bias": SAM,
    "attn.pos_w.weight": (SAM // N_HEAD, 27),
    "attn.pos_h.weight": (SAM // N_HEAD, 27),
    "mlp.lin1.weight": (SAM, SAM_FF),
    "mlp.lin1.bias": SAM_FF,
    "mlp.lin2.weight": (SAM_FF, SAM),
    "mlp.lin2.bias": SAM,
}
SAM_TENSORS: dict[str, Shape] = {
    "v.sam.patch_embd.weight": (16, 16, 3, SAM),
    "v.sam.patch_embd.bias": SAM,
    "v.sam.pos_embd.weight": (SAM, 64, 64),
    **{f"v.sam.blk.{i}.{name}": shape for i in range(N_SAM) for name, shape in SAM_LAYER.items()},
    # The layer whose attention is of the whole picture.
    **{f"v.sam.blk.2.attn.pos_{axis}.weight": (SAM // N_HEAD, 127) for axis in "wh"},
    "v.sam.neck.0.weight": (1, 1, SAM, 12),
    "v.sam.neck.1.weight": 12,
    "v.sam.neck.1.bias": 12,
    "v.sam.neck.2.weight": (3, 3, 12, 12),
    "v.sam.neck.3.weight": 12,
    "v.sam.neck.3.bias": 12,
    "v.sam.net_2.weight": (3, 3, 12, 20),
    "v.sam.net_3.weight": (3, 3, 20, N),
}
KEYS = {
    "embedding_length": N,
    "feed_forward_length": FF,
    "attention.head_count": 4,
    "patch_size": 16,
    "image_size": 1024,
    "window_size": 14,
    "sam.block_count": N_SAM,
    "sam.head_count": N_HEAD,
    "sam.embedding_length": SAM,
    "clip.use_gelu": True,
}
ENDS: dict[str, Shape] = {"v.view_seperator": OUT, "mm.model.fc.bias": OUT}

DEEPSEEKOCR = TinyProjector(
    "deepseekocr",
    KEYS,
    LAYER,
    {
        **SAM_TENSORS,
        **ENDS,
        "v.image_newline": OUT,
        "v.class_embd": N,
        "v.pre_ln.weight": N,
        "v.pre_ln.bias": N,
        "v.position_embd.weight": (N, 257),
        "mm.model.fc.weight": (2 * N, OUT),
    },
    n_embd=OUT,
)
DEEPSEEKOCR2 = TinyProjector(
    "deepseekocr2",
    {**KEYS, "attention.head_count_kv": 2},
    {
        "ln1.weight": N,
        "ln2.weight": N,
        "attn_q.weight": (N, N),
        "attn_q.bias": N,
        "attn_k.weight": (N, N // 2),
        "attn_k.bias": N // 2,
        "attn_v.weight": (N, N // 2),
        "attn_v.bias": N // 2,
        "attn_out.weight": (N, N),
        "ffn_gate.weight": (N, FF),
        "ffn_up.weight": (N, FF),
        "ffn_down.weight": (FF, N),
    },
    {
        **SAM_TENSORS,
        **ENDS,
        "v.post_ln.weight": N,
        "v.resample_query_768.weight": (N, 144),
        "v.resample_query_1024.weight": (N, 256),
        "mm.model.fc.weight": (N, OUT),
    },
    n_embd=OUT,
)

PROJECTORS = [DEEPSEEKOCR, DEEPSEEKOCR2]
