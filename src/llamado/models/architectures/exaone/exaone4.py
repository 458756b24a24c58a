"""The exaone4 architecture: EXAONE 4.0."""

from __future__ import annotations

from dataclasses import replace

from llamado.ggml.ops import RopeMode
from llamado.models.decoder import POST_NORMS, Decoder
from llamado.models.hparams import HyperParameters, Rope, read_swa_layers
from llamado.models.keys import Keys
from llamado.models.parts.attention import QkNorm

_LAYERS_OF_32B = 64


class Exaone4Model(Decoder):
    """Post-norm blocks without pre-norms, with query and key norms (arXiv 2507.11407).

    In the 32B model, three of four layers have a sliding window; the fourth has full attention without positions.
    """

    rope_mode = RopeMode.NEOX
    norms = POST_NORMS
    qk_norm = QkNorm.HEADS

    def _read_hparams(self, keys: Keys, n_vocab: int) -> HyperParameters:
        hp = super()._read_hparams(keys, n_vocab)
        if hp.n_layer != _LAYERS_OF_32B:
            return hp
        n_swa = keys.int_("attention.sliding_window", 4096)
        return replace(hp, n_swa=n_swa, swa_layers=read_swa_layers(keys, hp.n_layer, 4))

    def _layer_rope(self, layer: int) -> Rope | None:
        hp = self.hparams
        return hp.rope if hp.is_swa(layer) or not hp.n_swa else None
