"""The bert architecture: MiniLM, BGE, E5, GTE …, and rerankers with a classifier."""

from __future__ import annotations

from llamado.models.encoder import PostNormEncoder
from llamado.models.weights import Weights


class BertModel(PostNormEncoder):
    """Post-norm encoder with learned positions and GELU feed-forward networks (arXiv 1810.04805)."""

    def _take_weights(self, weights: Weights) -> None:
        hp = self.hparams
        self._positions = weights.input.require("position_embd.weight", hp.n_embd, hp.n_ctx_train)
        super()._take_weights(weights)
