"""Vision encoder of dots3-note: that of dots.ocr with experts in some layers (clip.cpp, models/dotsocr.cpp)."""

from __future__ import annotations

from llamado.models.encoders.any_size.paddleocr import DotsOcrEncoder
from llamado.models.encoders.parts.transformer import TransformerOptions


class Dots3NoteEncoder(DotsOcrEncoder):
    """dots3-note: as dots.ocr; the feed-forward networks of some layers are experts."""

    merge_key = "spatial_merge_size"

    def _transformer_options(self) -> TransformerOptions:
        return {**super()._transformer_options(), "n_experts_used": self.keys.int_("expert_used_count")}
