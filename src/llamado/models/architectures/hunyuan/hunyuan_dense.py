"""The hunyuan-dense architecture: the dense models of Hunyuan, 0.5B to 7B."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from llamado.ggml.ops import RopeMode
from llamado.models.decoder import Decoder
from llamado.models.hparams import HyperParameters, override_freq_base
from llamado.models.keys import Keys
from llamado.models.parts.attention import QkNorm


class HunyuanDenseModel(Decoder):
    """Llama with query and key norms after the rotation."""

    rope_mode = RopeMode.NEOX
    has_mrope = True
    qk_norm = QkNorm.HEADS_AFTER_ROPE

    def _read_hparams(self, keys: Keys, n_vocab: int) -> HyperParameters:
        hp = super()._read_hparams(keys, n_vocab)
        alpha = keys.float_("rope.scaling.alpha", 0.0)
        if not alpha or hp.head_dim_k == 2:
            return hp
        # NTK-aware scaling: a larger base instead of scaled positions.
        power = np.float32(hp.head_dim_k) / np.float32(hp.head_dim_k - 2)
        base = np.float32(keys.float_("rope.freq_base", 10000.0)) * np.float32(alpha) ** power
        return replace(hp, rope=override_freq_base(keys, hp.rope, float(base)))


class MaincoderModel(HunyuanDenseModel):
    """Hunyuan with Llama's rope mode."""

    rope_mode = RopeMode.NORMAL
