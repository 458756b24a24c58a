"""The gemma3n architecture (text): AltUp streams, of which a layer computes one and predicts the others."""

from __future__ import annotations

from dataclasses import replace
from math import sqrt
from typing import NamedTuple

import numpy as np

from llamado.ggml.graph import (
    add,
    concat,
    cont,
    div,
    geglu_split,
    mean,
    mul,
    mul_mat,
    permute,
    relu,
    repeat,
    reshape,
    scale,
    sqr,
    sub,
    sum_rows,
    tanh,
    transpose,
    view_2d,
    view_3d,
)
from llamado.ggml.graph import sqrt as square_root
from llamado.ggml.ops import RopeMode
from llamado.ggml.tensor import Tensor
from llamado.models.base import Model
from llamado.models.forward import Linear, Pass
from llamado.models.hparams import HyperParameters, read_hparams, read_swa_layers
from llamado.models.keys import Keys
from llamado.models.memory import LayerMemory, SharedMemory
from llamado.models.parts.attention import Heads
from llamado.models.parts.norms import RmsNorm
from llamado.models.parts.per_layer import LayerEmbeddings, LayerInput
from llamado.models.parts.sharing import SharedKvAttention
from llamado.models.weights import RoleWeights, Weights

# Constants that files do not give (llama-hparams.h, gemma3n.cpp).
_STREAMS = 4
_N_INPUT = 256
_LAUREL_RANK = 64
_OWN_LAYERS = 20
"""Number of layers with their own keys and values."""
_SPARSE_LAYERS = 10
_DEVIATIONS = 1.6448533535003662
"""Threshold of gates in sparse layers, in standard deviations above the mean: one in twenty passes."""
_SOFTCAP = 30.0


class Streams(NamedTuple):
    """AltUp (arXiv 2301.13310): a layer computes one stream, and predicts and corrects the others."""

    router: Tensor
    router_norm: RmsNorm
    predict_by: Linear
    correct_by: Linear
    scale: Tensor

    @classmethod
    def take(cls, w: RoleWeights, n_embd: int) -> Streams:
        """Take the tensors `altup_…`. Raises InvalidModel."""
        n = _STREAMS
        return cls(
            w.require("altup_router.weight", n_embd, n),
            RmsNorm.take(w, "altup_router_norm", n_embd),
            w.linear("altup_predict_coef", n, n * n),
            w.linear("altup_correct_coef", n, n),
            w.require("altup_correct_scale.weight", n_embd),
        )

    def _modalities(self, step: Pass, layer: int, x: Tensor) -> Tensor:
        """Return the router's output: F32 [streams, n_tokens]."""
        h = scale(self.router_norm(step, x, f"router_inputs-{layer}"), 1.0 / x.ne[0])
        return tanh(step.mul_mat(self.router, h, f"modalities-{layer}"))

    def predict(self, step: Pass, layer: int, x: Tensor) -> Tensor:
        """Predict all streams [n_embd, n_tokens, streams] after the layer."""
        n, n_tokens = _STREAMS, x.ne[1]
        by = self.predict_by(step, self._modalities(step, layer, stream(x, 0)), f"predict_coefs-{layer}")
        mixed = mul_mat(cont(permute(x, 1, 2, 0, 3)), reshape(by, n, n, n_tokens))
        return add(cont(permute(mixed, 0, 2, 1, 3)), x, f"predictions-{layer}")

    def correct(self, step: Pass, layer: int, predicted: Tensor, computed: Tensor) -> Tensor:
        """Correct each prediction by a learned share of the first stream's error."""
        n_embd, n_tokens, n = predicted.ne[0], predicted.ne[1], _STREAMS
        by = self.correct_by(step, self._modalities(step, layer, computed), f"correct_coefs-{layer}")
        by = cont(transpose(scale(by, 1.0, 1.0)), 1, n_tokens, n)
        error = repeat(sub(computed, stream(predicted, 0)), n_embd, n_tokens, n, 1)
        return add(mul(error, by), predicted, f"corrected-{layer}")


def stream(x: Tensor, number: int) -> Tensor:
    """Return one of the streams: F32 [n_embd, n_tokens]."""
    return view_2d(x, x.ne[0], x.ne[1], x.nb[1], number * x.nb[2])


def _other_streams(x: Tensor) -> Tensor:
    """Return all streams but the first."""
    return view_3d(x, x.ne[0], x.ne[1], x.ne[2] - 1, x.nb[1], x.nb[2], x.nb[2])


def _match_length(x: Tensor, other: Tensor) -> Tensor:
    """Scale rows of x to the length of the other's rows."""
    length, wanted = (square_root(sum_rows(sqr(each))) for each in (x, other))
    return div(mul(x, wanted), length)


class Laurel(NamedTuple):
    """Low-rank residual (LAuReL, arXiv 2411.07501): norm(right(left x)) + x."""

    left: Linear
    right: Linear
    norm: RmsNorm

    @classmethod
    def take(cls, w: RoleWeights, n_embd: int) -> Laurel:
        """Take `laurel_l`, `laurel_r` and `laurel_post_norm`. Raises InvalidModel."""
        left, right = w.linear("laurel_l", n_embd, _LAUREL_RANK), w.linear("laurel_r", _LAUREL_RANK, n_embd)
        return cls(left, right, RmsNorm.take(w, "laurel_post_norm", n_embd))

    def __call__(self, step: Pass, layer: int, x: Tensor) -> Tensor:
        h = self.right(step, self.left(step, x, f"laurel_l-{layer}"), f"laurel_r-{layer}")
        return add(self.norm(step, h, f"laurel_norm-{layer}"), x, f"laurel_out-{layer}")


class SparseGatedFeedForward(NamedTuple):
    """down(gelu(gate x) · up x); if `sparse`, only gates far above their token's mean are non-zero."""

    gate: Linear
    up: Linear
    down: Linear
    sparse: bool

    @classmethod
    def take(cls, w: RoleWeights, n_embd: int, n_ff: int, *, sparse: bool) -> SparseGatedFeedForward:
        """Take `ffn_gate`, `ffn_up` and `ffn_down`. Raises InvalidModel."""
        gate, up = w.linear("ffn_gate", n_embd, n_ff), w.linear("ffn_up", n_embd, n_ff)
        return cls(gate, up, w.linear("ffn_down", n_ff, n_embd), sparse)

    def __call__(self, step: Pass, layer: int, x: Tensor) -> Tensor:
        up, gate = self.up(step, x, f"ffn_up-{layer}"), self.gate(step, x, f"ffn_gate-{layer}")
        if self.sparse:
            middle = mean(gate)
            variance = scale(sum_rows(sqr(sub(gate, middle))), 1.0 / (gate.ne[0] - 1))
            gate = relu(sub(gate, add(middle, scale(square_root(variance), _DEVIATIONS))))
        return self.down(step, geglu_split(gate, up, f"ffn_act-{layer}"), f"ffn_out-{layer}")


class Gemma3nLayer(NamedTuple):
    streams: Streams
    attn_norm: RmsNorm
    attention: SharedKvAttention
    attn_post_norm: RmsNorm
    laurel: Laurel
    ffn_norm: RmsNorm
    feed_forward: SparseGatedFeedForward
    ffn_post_norm: RmsNorm
    input: LayerInput


class Gemma3nModel(Model):
    """AltUp streams, per-layer embeddings, and layers that share keys and values."""

    def _read_hparams(self, keys: Keys, n_vocab: int) -> HyperParameters:
        hp = read_hparams(keys, n_vocab=n_vocab, rope_mode=RopeMode.NEOX)
        return replace(
            hp,
            embedding_scale=float(np.sqrt(np.float32(hp.n_embd))),
            attention_scale=1.0,
            final_logit_softcap=_SOFTCAP,
            n_swa=keys.int_("attention.sliding_window"),
            swa_layers=read_swa_layers(keys, hp.n_layer, 5),
            # Only the global layers use the extended context rope.
            rope_swa=replace(hp.rope, freq_base=keys.float_("rope.freq_base_swa", 10000.0), freq_scale=1.0),
        )

    def layer_memory(self, layer: int) -> LayerMemory:
        """Keys and values, or those of the last layer of the same kind that has its own."""
        if layer < _OWN_LAYERS:
            return super().layer_memory(layer)
        return SharedMemory(_OWN_LAYERS - (2 if self.hparams.is_swa(layer) else 1))

    def _take_weights(self, weights: Weights) -> None:
        hp, n = self.hparams, self.hparams.n_embd
        self._inputs = LayerEmbeddings.take(weights, n, _N_INPUT, hp.n_layer, hp.n_vocab)
        self._spread = weights.input.require("altup_proj.weight", n, n, _STREAMS - 1)
        self._merge = weights.output.require("altup_unembd_proj.weight", n, n, _STREAMS - 1)
        self._layers = [self._take_layer(weights.layer(i), i) for i in range(hp.n_layer)]

    def _take_layer(self, w: RoleWeights, layer: int) -> Gemma3nLayer:
        hp, n = self.hparams, self.hparams.n_embd
        return Gemma3nLayer(
            streams=Streams.take(w, n),
            attn_norm=RmsNorm.take(w, "attn_norm", n),
            attention=SharedKvAttention.take(
                w, n, Heads.of(hp, layer), hp.rope_of(layer), None, shares=layer >= _OWN_LAYERS
            ),
            attn_post_norm=RmsNorm.take(w, "post_attention_norm", n),
            laurel=Laurel.take(w, n),
            ffn_norm=RmsNorm.take(w, "ffn_norm", n),
            feed_forward=SparseGatedFeedForward.take(w, n, hp.n_ff[layer], sparse=layer < _SPARSE_LAYERS),
            ffn_post_norm=RmsNorm.take(w, "post_ffw_norm", n),
            input=LayerInput.take(w, n, _N_INPUT),
        )

    def _embed(self, step: Pass) -> Tensor:
        x = super()._embed(step)
        self._inputs.of(step, 0, x)
        n_embd, n_tokens, more = x.ne[0], x.ne[1], _STREAMS - 1
        others = mul_mat(self._spread, repeat(x, n_embd, n_tokens, more, 1), name="altup_added")
        return concat(x, _match_length(others, x), 2, name="inp_stacked")

    def _layer(self, step: Pass, layer: int, x: Tensor) -> Tensor | None:
        w, i = self._layers[layer], layer
        predicted = w.streams.predict(step, i, x)
        active = stream(predicted, 0)
        h = w.attn_norm(step, active, f"attn_norm-{i}")
        laurel = w.laurel(step, i, h)
        attended = w.attention(step, i, h)
        if attended is None:
            return None
        h = add(w.attn_post_norm(step, attended, f"attn_post_norm-{i}"), active, f"attn_gated-{i}")
        both = scale(add(h, laurel), 1.0 / sqrt(2.0), name=f"attn_laurel-{i}")
        h = w.feed_forward(step, i, w.ffn_norm(step, both, f"ffn_norm-{i}"))
        h = add(w.ffn_post_norm(step, h, f"ffn_post_norm-{i}"), both, f"attn_ffw_laurel-{i}")
        corrected = w.streams.correct(step, i, predicted, h)
        first = stream(corrected, 0)
        more = w.input(step, i, mul(first, w.streams.scale), self._inputs.of(step, i, x))
        x = concat(first, add(_other_streams(corrected), more), 2, name=f"l_out-{i}")
        return x if layer < self.hparams.n_layer - 1 else step.keep_outputs(i, self._merge_streams(step, x))[0]

    def _merge_streams(self, step: Pass, x: Tensor) -> Tensor:
        """Return the mean of all streams, each scaled to the length of the first."""
        others = _match_length(mul_mat(self._merge, _other_streams(x), name="altup_unembd"), stream(x, 0))
        total = stream(x, 0)
        for number in range(_STREAMS - 1):
            total = add(total, stream(others, number))
        return scale(total, 1.0 / _STREAMS, name="unembd_merged")
