"""The modern-bert architecture: ModernBERT, granite-embedding-r2, gte-modernbert."""

from __future__ import annotations

from dataclasses import replace

from llamado.ggml.graph import gelu
from llamado.ggml.ops import GluOp, RopeMode
from llamado.ggml.tensor import Tensor
from llamado.models.decoder import LayerNormDecoder, NormNames
from llamado.models.encoder import Encoder
from llamado.models.errors import UnsupportedModel
from llamado.models.forward import Pass
from llamado.models.hparams import HyperParameters, Pooling, swa_rope, with_window
from llamado.models.keys import Keys
from llamado.models.parts.feedforward import FeedForwardKind
from llamado.models.parts.norms import Norm
from llamado.models.weights import RoleWeights, Weights

_ACTIVATIONS = {
    "gelu": GluOp.GEGLU,
    "geglu": GluOp.GEGLU,
    "silu": GluOp.SWIGLU,
    "swish": GluOp.SWIGLU,
    "swiglu": GluOp.SWIGLU,
    "reglu": GluOp.REGLU,
}


class ModernBertModel(Encoder, LayerNormDecoder):
    """Pre-norm encoder with rotary positions and a window around each token (arXiv 2412.13663).

    Every third layer, from the first on, has full attention. The first layer has no attention norm, because the
    embeddings are normed.
    """

    rope_mode = RopeMode.NEOX
    has_norm_bias = False

    def _read_hparams(self, keys: Keys, n_vocab: int) -> HyperParameters:
        hp = super()._read_hparams(keys, n_vocab)
        name = keys.str_("hidden_activation", "gelu")
        if name not in _ACTIVATIONS:
            raise UnsupportedModel(
                f"metadata key '{keys.name('hidden_activation')}' is '{name}'; {', '.join(_ACTIVATIONS)} are supported"
            )
        self.feed_forward = FeedForwardKind(_ACTIVATIONS[name], fused=True)
        self._means = keys.int_("classifier.pooling_type", Pooling.MEAN.value) == Pooling.MEAN
        rope = swa_rope(keys, hp.rope, freq_base=10000.0, freq_scale=1.0)
        hp = with_window(keys, hp, 3, rope=rope, optional=True, dense_first=True)
        return replace(hp, swa_symmetric=bool(hp.n_swa))

    def _take_head(self, weights: Weights) -> None:
        self._output_norm = self._take_norm(weights.output, "output_norm", self.hparams.n_embd)
        self._cls_norm: Norm | None = None
        if not (weights.has("cls.weight") or weights.has("cls.output.weight")):
            return
        self._take_classifier(weights)
        if weights.has("cls.norm.weight"):
            self._cls_norm = self._take_norm(weights.output, "cls.norm", self.hparams.n_embd)

    def _take_weights(self, weights: Weights) -> None:
        self._embd_norm = self._take_norm(weights.input, "token_embd_norm", self.hparams.n_embd)
        super()._take_weights(weights)

    def _norm_names(self, w: RoleWeights, layer: int) -> NormNames:
        return self.norms if layer > 0 or w.has("attn_norm.weight") else NormNames(attn=None)

    def _embed(self, step: Pass) -> Tensor:
        return self._embd_norm(step, super()._embed(step), "inp_norm")

    def _scores(self, step: Pass, x: Tensor) -> Tensor:
        h = self._text(step, x)
        if self._dense is not None:
            h = gelu(self._dense(step, h, "cls"))
            h = h if self._cls_norm is None else self._cls_norm(step, h, "cls_norm")
        return h if self._scorer is None else self._scorer(step, h, "result_scores")
