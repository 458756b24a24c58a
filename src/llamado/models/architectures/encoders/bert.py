"""The bert architecture: an encoder that reads a whole text at once and gives a vector for each of its tokens.

Sentence embeddings (MiniLM, BGE, E5, GTE …) and, with a classifier behind it, rerankers. Every token sees every other
of its text: the caller's mask says so. Keys and values pass through a cache like a decoder's, where each text has cells
of its own; that lets many texts share a batch.
"""

from __future__ import annotations

from typing import NamedTuple

from llamado.ggml.graph import add, gelu, get_rows, reshape, tanh, view_1d
from llamado.ggml.ops import RopeMode
from llamado.ggml.tensor import Tensor
from llamado.models.base import Model
from llamado.models.batch import Output
from llamado.models.errors import UnsupportedModel
from llamado.models.forward import Linear, Pass
from llamado.models.hparams import HyperParameters, Pooling, read_hparams
from llamado.models.keys import Keys
from llamado.models.parts.norms import LayerNorm
from llamado.models.weights import Weights


class BertLayer(NamedTuple):
    q: Linear
    k: Linear
    v: Linear
    out: Linear
    attn_norm: LayerNorm
    up: Linear
    down: Linear
    out_norm: LayerNorm


class BertModel(Model):
    """Post-norm encoder with learned positions and a GELU feed-forward network."""

    architecture = "bert"

    def _read_hparams(self, keys: Keys, n_vocab: int) -> HyperParameters:
        hp = read_hparams(keys, n_vocab=n_vocab, rope_mode=RopeMode.NORMAL, norm_eps="attention.layer_norm_epsilon")
        if keys.int_("classifier.pooling_type", -1) == Pooling.MEAN:
            raise UnsupportedModel(
                f"metadata key '{keys.name('classifier.pooling_type')}' is {Pooling.MEAN.value}: classifiers of the "
                "mean of all tokens are not known here, only those of the first"
            )
        self._n_types = keys.int_("tokenizer.ggml.token_type_count")
        return hp

    def _take_head(self, weights: Weights) -> None:
        hp = self.hparams
        self._classifier: tuple[Linear, ...] = ()
        self._n_scores = hp.n_embd
        if weights.has("cls.weight"):
            self._classifier = (weights.output.linear("cls", hp.n_embd, hp.n_embd),)
        self._scorer: Linear | None = None
        if weights.has("cls.output.weight"):
            self._n_scores = weights.ne("cls.output.weight")[1]
            self._scorer = weights.output.linear("cls.output", hp.n_embd, self._n_scores)

    def _take_weights(self, weights: Weights) -> None:
        hp = self.hparams
        self._types = weights.input.maybe("token_types.weight", hp.n_embd, self._n_types)
        self._positions = weights.input.need("position_embd.weight", hp.n_embd, hp.n_ctx_train)
        self._embd_norm = LayerNorm.take(weights.input, "token_embd_norm", hp.n_embd)
        self._layers = []
        for i in range(hp.n_layer):
            w = weights.layer(i)
            n_q = hp.head_dim_k * hp.n_head[i]
            self._layers.append(
                BertLayer(
                    q=w.linear("attn_q", hp.n_embd, n_q),
                    k=w.linear("attn_k", hp.n_embd, hp.n_embd_k(i)),
                    v=w.linear("attn_v", hp.n_embd, hp.n_embd_v(i)),
                    out=w.linear("attn_output", n_q, hp.n_embd),
                    attn_norm=LayerNorm.take(w, "attn_output_norm", hp.n_embd),
                    up=w.linear("ffn_up", hp.n_embd, hp.n_ff[i]),
                    down=w.linear("ffn_down", hp.n_ff[i], hp.n_embd),
                    out_norm=LayerNorm.take(w, "layer_output_norm", hp.n_embd),
                )
            )

    def _embed(self, step: Pass) -> Tensor:
        x = super()._embed(step)
        if self._types is not None:  # all tokens are of the first type, "sentence A"
            x = add(x, view_1d(self._types, self.hparams.n_embd))
        x = add(get_rows(self._positions, step.positions()), x, "inp_embd")
        return self._embd_norm(step, x, "inp_norm")

    def _layer(self, step: Pass, layer: int, x: Tensor) -> Tensor | None:
        hp, w, i = self.hparams, self._layers[layer], layer
        n_tokens = step.shape.n_tokens
        q = reshape(w.q(step, x, f"Qcur-{i}"), hp.head_dim_k, hp.n_head[i], n_tokens, name=f"Qcur-{i}")
        k = reshape(w.k(step, x, f"Kcur-{i}"), hp.head_dim_k, hp.n_head_kv[i], n_tokens, name=f"Kcur-{i}")
        v = reshape(w.v(step, x, f"Vcur-{i}"), hp.head_dim_v, hp.n_head_kv[i], n_tokens, name=f"Vcur-{i}")
        attended = step.attend(i, q, k, v, hp.attention_scale)
        if attended is None:
            return None
        h, x = step.keep_outputs(i, w.out(step, attended, f"attn_out-{i}"), x)
        x = w.attn_norm(step, add(h, x, f"attn_inp-{i}"), f"ffn_inp-{i}")

        h = w.down(step, gelu(w.up(step, x, f"ffn_up-{i}"), f"ffn_gelu-{i}"), f"ffn_out-{i}")
        return w.out_norm(step, add(h, x, f"ffn_sum-{i}"), f"l_out-{i}")

    def _hidden(self, step: Pass, x: Tensor) -> Tensor:
        return x

    def _head(self, step: Pass, x: Tensor) -> Tensor:
        raise UnsupportedModel(
            "a bert model makes embeddings, not text: start it with `llamado serve --embeddings` (or --reranking)"
        )

    def _scores(self, step: Pass, x: Tensor) -> Tensor:
        for linear in self._classifier:
            x = tanh(linear(step, x, "cls"))
        return x if self._scorer is None else self._scorer(step, x, "result_scores")

    def width(self, output: Output) -> int:
        """See Model."""
        return self._n_scores if output is Output.SCORES else super().width(output)

    @property
    def generates(self) -> bool:
        """See Model."""
        return False
