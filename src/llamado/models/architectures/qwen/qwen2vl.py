"""The text models of Qwen2-VL, Qwen2.5-VL and PaddleOCR-VL."""

from __future__ import annotations

from llamado.models.architectures.qwen.qwen2 import Qwen2Model


class Qwen2VlModel(Qwen2Model):
    """Qwen2 with M-RoPE (arXiv 2409.12191), which in text is plain rope."""

    has_mrope = True
