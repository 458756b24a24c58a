"""The text models of Qwen2-VL, Qwen2.5-VL and PaddleOCR-VL."""

from __future__ import annotations

from llamado.models.architectures.qwen.qwen2 import Qwen2Model
from llamado.models.hparams import HyperParameters, mrope_text_mode, read_hparams
from llamado.models.keys import Keys


class Qwen2VlModel(Qwen2Model):
    """Qwen2 with M-RoPE (arXiv 2409.12191), which in text is plain rope."""

    def _read_hparams(self, keys: Keys, n_vocab: int) -> HyperParameters:
        return read_hparams(keys, n_vocab=n_vocab, rope_mode=mrope_text_mode(keys, self.rope_mode))
