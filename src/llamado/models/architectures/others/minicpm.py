"""The minicpm architecture: MiniCPM 1B, 2B, 4B, MiniCPM-MoE."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from llamado.models.decoder import Decoder
from llamado.models.hparams import (
    HyperParameters,
    read_experts,
)
from llamado.models.keys import Keys
from llamado.models.parts.experts import take_experts
from llamado.models.parts.feedforward import FeedForward
from llamado.models.weights import RoleWeights


class MiniCpmModel(Decoder):
    """Llama with scale factors of embeddings, block outputs and logits (arXiv 2404.06395).

    Older files do not contain the factors.
    """

    def _read_hparams(self, keys: Keys, n_vocab: int) -> HyperParameters:
        hp = super()._read_hparams(keys, n_vocab)
        if keys.has_experts():
            hp = replace(hp, experts=read_experts(keys, hp.n_ff[0], normalized=True))
        depth, logits = depth_scale(hp.n_layer), keys.float_("logit_scale", 256.0 / hp.n_embd)
        return replace(
            hp,
            embedding_scale=keys.float_("embedding_scale", 12.0),
            residual_scale=keys.float_("residual_scale", depth) or 1.0,
            # The file holds the divisor of the logits.
            logit_scale=float(np.float32(1) / np.float32(logits or 1.0)),
        )

    def _take_feed_forward(self, w: RoleWeights, layer: int) -> FeedForward:
        return take_experts(w, self.hparams, layer)


def depth_scale(n_layer: int) -> float:
    """Return the factor of block outputs: 1.4 / sqrt(n_layer), in float32 as in llama.cpp."""
    return float(np.float32(1.4) / np.sqrt(np.float32(n_layer)))
