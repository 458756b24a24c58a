"""The eurobert architecture: EuroBERT; also neo-bert and llama-embed."""

from __future__ import annotations

from llamado.ggml.ops import RopeMode
from llamado.models.decoder import Decoder
from llamado.models.encoder import Encoder
from llamado.models.parts.feedforward import FUSED_SWIGLU
from llamado.models.weights import Weights


class EuroBertModel(Encoder, Decoder):
    """Llama with bidirectional attention (arXiv 2503.05500)."""

    rope_mode = RopeMode.NEOX
    _norm = "output_norm"

    def _take_head(self, weights: Weights) -> None:
        hp = self.hparams
        self._output_norm = self._take_norm(weights.output, self._norm, hp.n_embd)
        weights.output.optional("output.weight", hp.n_embd, hp.n_vocab)  # unused
        self._take_classifier(weights)


class NeoBertModel(EuroBertModel):
    """EuroBERT with one matrix for gate and up (arXiv 2502.19587)."""

    rope_mode = RopeMode.NORMAL
    _norm = "enc.output_norm"
    feed_forward = FUSED_SWIGLU


class LlamaEmbedModel(EuroBertModel):
    """EuroBERT with Llama's rotary embedding (llama-embed-nemotron)."""

    rope_mode = RopeMode.NORMAL
