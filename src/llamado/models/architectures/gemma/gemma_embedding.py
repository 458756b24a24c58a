"""The gemma-embedding architecture: EmbeddingGemma."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from llamado.ggml.ops import RopeMode
from llamado.ggml.tensor import Tensor
from llamado.models.architectures.gemma.gemma3 import Gemma3Model
from llamado.models.encoder import Encoder
from llamado.models.forward import Pass
from llamado.models.hparams import HyperParameters, read_hparams, read_swa_layers, swa_rope
from llamado.models.keys import Keys
from llamado.models.weights import Weights


class GemmaEmbeddingModel(Encoder, Gemma3Model):
    """Gemma 3 with bidirectional attention, in full or within a window (arXiv 2509.20354).

    Two matrices follow the last norm. There is no activation between them, so they commute with mean pooling.
    """

    def _read_hparams(self, keys: Keys, n_vocab: int) -> HyperParameters:
        hp = read_hparams(keys, n_vocab=n_vocab, rope_mode=RopeMode.NEOX)
        return replace(
            hp,
            causal=False,
            embedding_scale=float(np.sqrt(np.float32(hp.n_embd))),
            n_swa=keys.int_("attention.sliding_window"),
            swa_symmetric=True,
            swa_layers=read_swa_layers(keys, hp.n_layer, 6),
            rope_swa=swa_rope(keys, hp.rope, freq_base=10000.0, freq_scale=1.0),
        )

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
