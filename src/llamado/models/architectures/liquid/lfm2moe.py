"""The lfm2moe architecture: LFM2's mixtures of experts."""

from __future__ import annotations

from dataclasses import replace

from llamado.models.architectures.liquid.lfm2 import Lfm2Model
from llamado.models.hparams import HyperParameters, RouterKind
from llamado.models.keys import Keys


class Lfm2MoeModel(Lfm2Model):
    """LFM2 with a mixture of experts after the dense first layers."""

    router = RouterKind(from_file=True)

    def _with_window(self, keys: Keys, hp: HyperParameters) -> HyperParameters:
        return hp

    def _read_hparams(self, keys: Keys, n_vocab: int) -> HyperParameters:
        hp = super()._read_hparams(keys, n_vocab)
        assert hp.experts is not None
        return replace(hp, experts=replace(hp.experts, normalized=True))
