"""The qwen architecture: the first Qwen."""

from __future__ import annotations

from dataclasses import replace

from llamado.models.architectures.qwen.qwen2 import Qwen2Model
from llamado.models.hparams import HyperParameters
from llamado.models.keys import Keys


class QwenModel(Qwen2Model):
    """Qwen2; files give twice the feed-forward width (arXiv 2309.16609)."""

    def _read_hparams(self, keys: Keys, n_vocab: int) -> HyperParameters:
        hp = super()._read_hparams(keys, n_vocab)
        return replace(hp, n_ff=tuple(n // 2 for n in hp.n_ff))
