"""The baichuan architecture: Baichuan 1 and 2."""

from __future__ import annotations

from dataclasses import replace

from llamado.models.decoder import Decoder
from llamado.models.hparams import HyperParameters
from llamado.models.keys import Keys

_LAYERS_OF_7B, _LAYERS_OF_13B = 32, 40


class BaichuanModel(Decoder):
    """Llama; the 13B model has ALiBi in place of rotary positions (arXiv 2309.10305).

    As in llama.cpp, a model with any other number of layers has no positions.
    """

    def _read_hparams(self, keys: Keys, n_vocab: int) -> HyperParameters:
        hp = super()._read_hparams(keys, n_vocab)
        self.has_rope = hp.n_layer == _LAYERS_OF_7B
        return replace(hp, max_alibi_bias=8.0) if hp.n_layer == _LAYERS_OF_13B else hp
