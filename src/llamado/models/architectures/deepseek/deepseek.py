"""The deepseek architecture: DeepSeek MoE 16B, the predecessor of latent attention."""

from __future__ import annotations

from dataclasses import replace

from llamado.models.decoder import Decoder
from llamado.models.hparams import HyperParameters, RouterKind
from llamado.models.keys import Keys


class DeepseekModel(Decoder):
    """Llama with fine-grained experts and shared experts after the dense first layers (arXiv 2401.06066)."""

    router = RouterKind(from_file=True)

    def _read_hparams(self, keys: Keys, n_vocab: int) -> HyperParameters:
        hp = super()._read_hparams(keys, n_vocab)
        assert hp.experts is not None
        return replace(hp, experts=replace(hp.experts, normalized=False))
