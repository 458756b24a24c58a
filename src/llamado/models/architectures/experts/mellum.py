"""The mellum architecture: Mellum 2."""

from __future__ import annotations

from dataclasses import replace

from llamado.models.architectures.qwen.qwen3moe import Qwen3MoeModel
from llamado.models.hparams import HyperParameters, with_window
from llamado.models.keys import Keys


class MellumModel(Qwen3MoeModel):
    """Qwen3 MoE with optional sliding windows.

    If the file gives a window, every fourth layer has full attention, and only those use the extended context rope.
    """

    def _read_hparams(self, keys: Keys, n_vocab: int) -> HyperParameters:
        hp = super()._read_hparams(keys, n_vocab)
        rope = replace(hp.rope, freq_scale=1.0, ext_factor=0.0, attn_factor=1.0)
        return with_window(keys, hp, 4, rope=rope, optional=True)
