"""The refact architecture: Refact 1.6B."""

from __future__ import annotations

from dataclasses import replace

from llamado.models.decoder import Decoder
from llamado.models.hparams import HyperParameters
from llamado.models.keys import Keys


class RefactModel(Decoder):
    """Llama with ALiBi (arXiv 2108.12409) in place of rotary positions."""

    has_rope = False

    def _read_hparams(self, keys: Keys, n_vocab: int) -> HyperParameters:
        return replace(super()._read_hparams(keys, n_vocab), max_alibi_bias=8.0)
