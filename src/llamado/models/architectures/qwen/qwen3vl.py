"""The text models of Qwen3-VL, dense and with experts."""

from __future__ import annotations

from dataclasses import replace

from llamado.models.architectures.qwen.qwen3 import Qwen3Model
from llamado.models.architectures.qwen.qwen3moe import Qwen3MoeModel
from llamado.models.hparams import HyperParameters, interleaved_mrope
from llamado.models.keys import Keys


class Qwen3VlModel(Qwen3Model):
    """Qwen3 with interleaved M-RoPE, which in text is plain rope."""

    def _read_hparams(self, keys: Keys, n_vocab: int) -> HyperParameters:
        hp = super()._read_hparams(keys, n_vocab)
        return replace(hp, rope=interleaved_mrope(keys, hp.rope))


class Qwen3VlMoeModel(Qwen3MoeModel):
    """Qwen3 MoE with interleaved M-RoPE."""

    def _read_hparams(self, keys: Keys, n_vocab: int) -> HyperParameters:
        hp = super()._read_hparams(keys, n_vocab)
        return replace(hp, rope=interleaved_mrope(keys, hp.rope))
