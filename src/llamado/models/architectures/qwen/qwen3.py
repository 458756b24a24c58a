"""The qwen3 architecture: the dense models of Qwen3, embedding models and rerankers included."""

from __future__ import annotations

from llamado.ggml.graph import soft_max_ext
from llamado.ggml.ops import RopeMode
from llamado.ggml.tensor import Tensor
from llamado.models.batch import Output
from llamado.models.decoder import Decoder
from llamado.models.forward import Linear, Pass
from llamado.models.parts.attention import QkNorm
from llamado.models.weights import Weights


class Qwen3Model(Decoder):
    """Llama with query and key norms before the rotation (arXiv 2505.09388).

    Rerankers have only the logits of "yes" and "no"; the score is the probability of the first (arXiv 2506.05176).
    """

    rope_mode = RopeMode.NEOX
    qk_norm = QkNorm.HEADS

    def _take_head(self, weights: Weights) -> None:
        super()._take_head(weights)
        self._scorer: Linear | None = None
        if weights.has("cls.output.weight"):
            n = weights.ne("cls.output.weight")[1]
            self._scorer = weights.output.linear("cls.output", self.hparams.n_embd, n)

    def _scores(self, step: Pass, x: Tensor) -> Tensor:
        h = super()._scores(step, x)
        if self._scorer is not None:
            h = self._scorer(step, h, "result_scores")
        return soft_max_ext(h, None, 1.0, name="result_scores")

    def width(self, output: Output) -> int:
        if output is Output.SCORES and self._scorer is not None:
            return self._scorer.weight.ne[1]
        return super().width(output)
