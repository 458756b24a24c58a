"""The gemma-embedding architecture: EmbeddingGemma."""

from __future__ import annotations

from dataclasses import replace

from llamado.ggml.tensor import Tensor
from llamado.models.architectures.gemma.gemma import GemmaModel
from llamado.models.decoder import PRE_AND_POST_NORMS
from llamado.models.encoder import Encoder
from llamado.models.forward import Pass
from llamado.models.hparams import HyperParameters, swa_rope, with_window
from llamado.models.keys import Keys
from llamado.models.parts.attention import QkNorm
from llamado.models.weights import Weights


class GemmaEmbeddingModel(Encoder, GemmaModel):
    """Gemma 3 with bidirectional attention, in full or within a window (arXiv 2509.20354).

    Two matrices follow the last norm. There is no activation between them, so they commute with mean pooling.
    """

    norms = PRE_AND_POST_NORMS
    qk_norm = QkNorm.HEADS

    def _read_hparams(self, keys: Keys, n_vocab: int) -> HyperParameters:
        hp = super()._read_hparams(keys, n_vocab)
        hp = with_window(keys, hp, 6, rope=swa_rope(keys, hp.rope, freq_base=10000.0, freq_scale=1.0))
        return replace(hp, causal=False, swa_symmetric=True)

    def _take_head(self, weights: Weights) -> None:
        hp, w = self.hparams, weights.output
        self._output_norm = self._take_norm(w, "output_norm", hp.n_embd)
        w.optional("output.weight", hp.n_embd, hp.n_vocab)  # unused
        self._dense_layers = []
        if w.has("dense_2.weight"):
            n = weights.ne("dense_2.weight")[1]
            self._dense_layers = [w.linear("dense_2", hp.n_embd, n), w.linear("dense_3", n, hp.n_embd)]

    def _hidden(self, step: Pass, x: Tensor) -> Tensor:
        h = super()._hidden(step, x)
        for matrix in self._dense_layers:
            h = matrix(step, h, "result_embd")
        return h
