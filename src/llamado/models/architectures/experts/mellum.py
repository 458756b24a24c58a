"""The mellum architecture: Mellum 2."""

from __future__ import annotations

from dataclasses import replace

from llamado.models.architectures.qwen.qwen3moe import Qwen3MoeModel
from llamado.models.hparams import (
    HyperParameters,
    read_swa_layers,
)
from llamado.models.keys import Keys


class MellumModel(Qwen3MoeModel):
    """Qwen3 MoE with optional sliding windows.

    If the file gives a window, every fourth layer has full attention, and only those use the extended context rope.
    """

    def _read_hparams(self, keys: Keys, n_vocab: int) -> HyperParameters:
        hp = super()._read_hparams(keys, n_vocab)
        n_swa = keys.int_("attention.sliding_window", 0)
        if not n_swa:
            return hp
        return replace(
            hp,
            n_swa=n_swa,
            swa_layers=read_swa_layers(keys, hp.n_layer, 4),
            rope_swa=replace(hp.rope, freq_scale=1.0, ext_factor=0.0, attn_factor=1.0),
        )
