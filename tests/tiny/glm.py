"""GLM architectures."""

from __future__ import annotations

from tiny.llama import ATTENTION, BIASES, FUSED, GATED_FUSED, HEAD, KEYS, POST_NORMS
from tiny.spec import Tiny

PARTLY_ROTATED = {**KEYS, "rope.dimension_count": HEAD // 2}

MODELS = (
    Tiny("chatglm", PARTLY_ROTATED, {**FUSED, "attn_qkv.bias": 8 * HEAD, **GATED_FUSED}),
    Tiny("glm4", PARTLY_ROTATED, {**ATTENTION, **BIASES, **GATED_FUSED, **POST_NORMS}),
    Tiny(
        "glm4",
        {**PARTLY_ROTATED, "rope.dimension_sections": [2, 3, 3, 0]},
        {**ATTENTION, **GATED_FUSED, **POST_NORMS},
        variant="sections",
    ),
)
