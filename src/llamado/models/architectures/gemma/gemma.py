"""The gemma architecture: Gemma 1 and CodeGemma."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from llamado.ggml.ops import RopeMode
from llamado.models.decoder import Decoder
from llamado.models.hparams import HyperParameters
from llamado.models.keys import Keys
from llamado.models.parts.feedforward import GEGLU


class GemmaModel(Decoder):
    """Pre-norm decoder with wide heads, scaled embeddings and GEGLU networks (arXiv 2403.08295)."""

    rope_mode = RopeMode.NEOX
    scale_queries = True
    feed_forward = GEGLU

    def _read_hparams(self, keys: Keys, n_vocab: int) -> HyperParameters:
        hp = super()._read_hparams(keys, n_vocab)
        return replace(hp, embedding_scale=float(np.sqrt(np.float32(hp.n_embd))))
