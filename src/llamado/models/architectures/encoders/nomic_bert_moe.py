"""The nomic-bert-moe architecture: nomic-embed-text-v2-moe."""

from __future__ import annotations

from dataclasses import replace

from llamado.ggml.ops import UnaryOp
from llamado.models.encoder import PostNormEncoder
from llamado.models.hparams import HyperParameters, read_experts
from llamado.models.keys import Keys
from llamado.models.parts.experts import Mixture
from llamado.models.parts.feedforward import FeedForward
from llamado.models.weights import RoleWeights


class NomicBertMoeModel(PostNormEncoder):
    """BERT with rotary positions, and experts in every other layer (arXiv 2502.07972)."""

    has_rope = True

    def _read_hparams(self, keys: Keys, n_vocab: int) -> HyperParameters:
        hp = super()._read_hparams(keys, n_vocab)
        self._step = keys.int_("moe_every_n_layers", 0)
        return replace(hp, experts=read_experts(keys, hp.n_ff[0])) if self._step > 1 else hp

    def _take_feed_forward(self, w: RoleWeights, layer: int) -> FeedForward:
        hp = self.hparams
        if hp.experts is not None and layer % self._step == 1:
            return Mixture.take(w, hp.n_embd, hp.experts, UnaryOp.GELU)
        return super()._take_feed_forward(w, layer)
