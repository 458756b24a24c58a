"""Small projectors of models that read documents: PaddleOCR-VL and dots.ocr."""

from __future__ import annotations

from projectors.glm4v import RMS_LAYER
from projectors.qwen_vl import KEYS, MERGED, OUT, POST_NORM
from projectors.siglip import LAYER, N
from projectors.spec import Shape, TinyProjector

LIMITS = {"image_min_pixels": 1024, "image_max_pixels": 32768}
INPUT: dict[str, Shape] = {
    "v.patch_embd.weight": (8, 8, 3, N),
    "v.patch_embd.bias": N,
    "mm.input_norm.weight": N,
    "mm.input_norm.bias": N,
}

PADDLEOCR = TinyProjector(
    "paddleocr",
    {**KEYS, **LIMITS, "clip.use_gelu": True},
    LAYER,
    {
        **INPUT,
        **POST_NORM,
        "v.position_embd.weight": (N, 8 * 8),
        "mm.1.weight": (MERGED, MERGED),
        "mm.1.bias": MERGED,
        "mm.2.weight": (MERGED, OUT),
        "mm.2.bias": OUT,
    },
    n_embd=OUT,
    text="qwen2vl",
    tokens=("<|IMAGE_START|>", "<|IMAGE_END|>"),
)
DOTS_OCR = TinyProjector(
    "dots_ocr",
    {**KEYS, **LIMITS, "projector.scale_factor": 2, "clip.use_silu": True},
    RMS_LAYER,
    {
        **INPUT,
        "mm.post_norm.weight": N,
        "mm.0.weight": (MERGED, MERGED),
        "mm.0.bias": MERGED,
        "mm.2.weight": (MERGED, OUT),
        "mm.2.bias": OUT,
    },
    n_embd=OUT,
    tokens=("<|img|>", "<|endofimg|>"),
)

PROJECTORS = [PADDLEOCR, DOTS_OCR]
