"""Encoders: they read a whole text at once and return a vector for each token.

Attention is bidirectional within a text; the caller's mask ensures it. Keys and values go through a memory like a
decoder's, in which each text has its own cells, so many texts can share a batch.
"""

from __future__ import annotations

from typing import ClassVar, NamedTuple

from llamado.ggml.graph import add, get_rows, tanh, view_1d
from llamado.ggml.ops import RopeMode
from llamado.ggml.tensor import Tensor
from llamado.models.base import Model
from llamado.models.batch import Output
from llamado.models.errors import UnsupportedModel
from llamado.models.forward import Linear, Pass
from llamado.models.hparams import HyperParameters, Pooling, read_hparams
from llamado.models.keys import Keys
from llamado.models.parts.attention import Attention, AttentionMatrices, Mixer
from llamado.models.parts.feedforward import GELU, FeedForward, FeedForwardKind
from llamado.models.parts.norms import LayerNorm
from llamado.models.weights import RoleWeights, Weights


class Encoder(Model):
    """Base of encoders: hidden states and, with a classifier, scores."""

    _dense: Linear | None = None
    _scorer: Linear | None = None
    _n_scores = 0
    _means = False

    def _take_classifier(self, weights: Weights) -> None:
        """Take the matrices of a classifier, if the file has one. Raises InvalidModel."""
        hp, w = self.hparams, weights.output
        if w.has("cls.weight"):
            self._dense = w.linear("cls", hp.n_embd, hp.n_embd)
        if w.has("cls.output.weight"):
            self._n_scores = weights.ne("cls.output.weight")[1]
            self._scorer = w.linear("cls.output", hp.n_embd, self._n_scores)

    def _head(self, step: Pass, x: Tensor) -> Tensor:
        raise UnsupportedModel(
            f"a {self.architecture} model computes embeddings, not text: start it with `llamado serve --embeddings` "
            "(or --reranking)"
        )

    def _scores(self, step: Pass, x: Tensor) -> Tensor:
        h = self._text(step, x)
        if self._dense is not None:
            h = tanh(self._dense(step, h, "cls"))
        return h if self._scorer is None else self._scorer(step, h, "result_scores")

    def _text(self, step: Pass, x: Tensor) -> Tensor:
        """Return the classifier's input: a token's hidden state, or the mean over its text."""
        h = self._hidden(step, x)
        return step.mean_of_texts(h) if self._means else h

    @property
    def scores_from_mean(self) -> bool:
        return self._means

    def width(self, output: Output) -> int:
        return self._n_scores if output is Output.SCORES and self._n_scores else super().width(output)

    @property
    def generates(self) -> bool:
        return False


class PostNormLayer(NamedTuple):
    """norm(x + attention(x)), then norm(x + ffn(x))."""

    attention: Mixer
    attn_norm: LayerNorm
    feed_forward: FeedForward
    out_norm: LayerNorm


class PostNormEncoder(Encoder):
    """Post-norm encoder as in the original transformer (arXiv 1706.03762), with a norm of the embeddings.

    Token-type embeddings and learned positions are added if the file has them. `has_rope`: attention has rotary
    positions; `feed_forward`: kind of the networks.
    """

    has_rope: ClassVar[bool] = False
    feed_forward: ClassVar[FeedForwardKind] = GELU
    _positions: Tensor | None = None

    def _read_hparams(self, keys: Keys, n_vocab: int) -> HyperParameters:
        self._means = keys.int_("classifier.pooling_type", -1) == Pooling.MEAN
        self._n_types = keys.int_("tokenizer.ggml.token_type_count")
        return read_hparams(keys, n_vocab=n_vocab, rope_mode=RopeMode.NEOX, norm_eps="attention.layer_norm_epsilon")

    def _take_head(self, weights: Weights) -> None:
        self._take_classifier(weights)

    def _take_weights(self, weights: Weights) -> None:
        hp = self.hparams
        self._types = weights.input.optional("token_types.weight", hp.n_embd, self._n_types)
        self._embd_norm = LayerNorm.take(weights.input, "token_embd_norm", hp.n_embd)
        self._layers = [self._take_layer(weights.layer(i), i) for i in range(hp.n_layer)]

    def _take_layer(self, w: RoleWeights, layer: int) -> PostNormLayer:
        """Take a layer's weights. Raises InvalidModel."""
        n_embd = self.hparams.n_embd
        return PostNormLayer(
            attention=self._take_attention(w, layer),
            attn_norm=LayerNorm.take(w, "attn_output_norm", n_embd),
            feed_forward=self._take_feed_forward(w, layer),
            out_norm=LayerNorm.take(w, "layer_output_norm", n_embd),
        )

    def _take_attention(self, w: RoleWeights, layer: int) -> Attention:
        """Take a layer's attention. Raises InvalidModel."""
        hp = self.hparams
        matrices = AttentionMatrices.take(w, hp, layer)
        return Attention(matrices=matrices, scale=hp.attention_scale, rope=hp.rope if self.has_rope else None)

    def _take_feed_forward(self, w: RoleWeights, layer: int) -> FeedForward:
        """Take a layer's feed-forward network. Raises InvalidModel."""
        return self.feed_forward.take(w, self.hparams.n_embd, self.hparams.n_ff[layer])

    def _embed(self, step: Pass) -> Tensor:
        x = super()._embed(step)
        if self._types is not None:  # all tokens are of the first type, "sentence A"
            x = add(x, view_1d(self._types, self.hparams.n_embd))
        if self._positions is not None:
            x = add(get_rows(self._positions, step.positions()), x, "inp_embd")
        return self._embd_norm(step, x, "inp_norm")

    def _layer(self, step: Pass, layer: int, x: Tensor) -> Tensor | None:
        w, i = self._layers[layer], layer
        attended = w.attention(step, i, x)
        if attended is None:
            return None
        h, x = step.keep_outputs(i, attended, x)
        x = self._between(step, i, w.attn_norm(step, add(h, x, f"attn_inp-{i}"), f"ffn_inp-{i}"), x)
        h = w.feed_forward(step, i, x)
        return w.out_norm(step, add(h, x, f"ffn_sum-{i}"), f"l_out-{i}")

    def _between(self, step: Pass, layer: int, h: Tensor, x: Tensor) -> Tensor:
        """Return the input of a layer's network: `h` is the normed attention output, `x` the layer input."""
        return h

    def _hidden(self, step: Pass, x: Tensor) -> Tensor:
        return x
