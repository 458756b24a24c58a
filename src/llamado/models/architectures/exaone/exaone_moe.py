"""The exaone-moe architecture: K-EXAONE."""

from __future__ import annotations

from llamado.models.architectures.experts.dots1 import Dots1Model
from llamado.models.hparams import HyperParameters, Rope, with_window
from llamado.models.keys import Keys


class ExaoneMoeModel(Dots1Model):
    """dots.llm1 with a sliding window in three of four layers; the fourth has no positions."""

    def _read_hparams(self, keys: Keys, n_vocab: int) -> HyperParameters:
        return with_window(keys, super()._read_hparams(keys, n_vocab), 4)

    def _layer_rope(self, layer: int) -> Rope | None:
        return self.hparams.rope if self.hparams.is_swa(layer) else None
