"""The minicpm architecture: MiniCPM 1B, 2B, 4B, MiniCPM-MoE."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from llamado.models.decoder import Decoder
from llamado.models.hparams import HyperParameters, RouterKind
from llamado.models.keys import Keys


class MiniCpmModel(Decoder):
    """Llama with scale factors of embeddings, block outputs and logits (arXiv 2404.06395).

    Older files do not contain the factors.
    """

    router = RouterKind(normalized=True, optional=True)
    scales_embeddings = True

    def _read_hparams(self, keys: Keys, n_vocab: int) -> HyperParameters:
        hp = super()._read_hparams(keys, n_vocab)
        depth, logits = depth_scale(hp.n_layer), keys.float_("logit_scale", 256.0 / hp.n_embd)
        return replace(
            hp,
            embedding_scale=keys.float_("embedding_scale", 12.0),
            residual_scale=keys.float_("residual_scale", depth) or 1.0,
            # The file holds the divisor of the logits.
            logit_scale=float(np.float32(1) / np.float32(logits or 1.0)),
        )


def depth_scale(n_layer: int) -> float:
    """Return the factor of block outputs: 1.4 / sqrt(n_layer), in float32 as in llama.cpp."""
    return float(np.float32(1.4) / np.sqrt(np.float32(n_layer)))
