"""The qwen3 architecture: the dense models of Qwen3, those that embed and rank among them."""

from __future__ import annotations

from llamado.ggml.graph import soft_max_ext
from llamado.ggml.ops import RopeMode
from llamado.ggml.tensor import Tensor
from llamado.models.batch import Output
from llamado.models.decoder import Decoder, Layer
from llamado.models.forward import Linear, Pass
from llamado.models.hparams import HyperParameters, read_hparams
from llamado.models.keys import Keys
from llamado.models.parts.attention import Attention, AttentionMatrices, Heads
from llamado.models.parts.norms import RmsNorm
from llamado.models.weights import RoleWeights, Weights


class Qwen3Model(Decoder):
    """As Llama, with a norm of each head's query and key before they are rotated (arXiv 2505.09388).

    Rerankers have, instead of a vocabulary's logits, those of "yes" and "no", of which the first one's probability is
    the score (arXiv 2506.05176).
    """

    architecture = "qwen3"

    def _read_hparams(self, keys: Keys, n_vocab: int) -> HyperParameters:
        return read_hparams(keys, n_vocab=n_vocab, rope_mode=RopeMode.NEOX)

    def _take_layer(self, w: RoleWeights, layer: int) -> Layer:
        hp, heads = self.hparams, Heads.of(self.hparams, layer)
        return Layer(
            attn_norm=RmsNorm.take(w, "attn_norm", hp.n_embd),
            attention=Attention(
                matrices=AttentionMatrices.take(w, hp, layer),
                q_norm=RmsNorm.take(w, "attn_q_norm", heads.dim_k),
                k_norm=RmsNorm.take(w, "attn_k_norm", heads.dim_k),
                scale=hp.attention_scale,
                rope=hp.rope,
            ),
            ffn_norm=RmsNorm.take(w, "ffn_norm", hp.n_embd),
            feed_forward=self._take_feed_forward(w, layer),
        )

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
        """See Model."""
        if output is Output.SCORES and self._scorer is not None:
            return self._scorer.weight.ne[1]
        return super().width(output)
