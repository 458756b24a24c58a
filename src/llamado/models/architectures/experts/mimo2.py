"""The mimo2 architecture: MiMo-V2."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from llamado.ggml.graph import scale
from llamado.ggml.ops import RopeMode
from llamado.ggml.tensor import Tensor
from llamado.models.decoder import Decoder
from llamado.models.forward import Pass, Projection
from llamado.models.hparams import Gating, HyperParameters, read_experts, read_swa_layers
from llamado.models.keys import Keys
from llamado.models.parts.attention import Attention, AttentionMatrices
from llamado.models.parts.experts import take_experts
from llamado.models.parts.feedforward import FeedForward
from llamado.models.weights import RoleWeights


class MiMo2Model(Decoder):
    """Value heads smaller than key heads, window layers with sinks and more KV heads, and sigmoid routing.

    Described in arXiv 2601.02780. The routing has a selection bias.
    """

    rope_mode = RopeMode.NEOX

    def _read_hparams(self, keys: Keys, n_vocab: int) -> HyperParameters:
        hp = super()._read_hparams(keys, n_vocab)
        self._value_scale = keys.float_("attention.value_scale", 0.0)
        experts = read_experts(keys, hp.n_ff[0], gating=Gating.SIGMOID, normalized=True)
        return replace(
            hp,
            n_swa=keys.int_("attention.sliding_window"),
            swa_layers=keys.of_layers(read_swa_layers(keys, keys.int_("block_count"), 0)),
            rope_swa=replace(hp.rope, freq_base=keys.float_("rope.freq_base_swa", 10000.0), freq_scale=1.0),
            experts=experts,
        )

    def _take_attention(self, w: RoleWeights, layer: int) -> Attention:
        attention = super()._take_attention(w, layer)
        heads, project, out = attention.matrices
        if self._value_scale not in (0.0, 1.0):
            out = _ScaledProjection(out, self._value_scale)
        sinks = w.optional("attn_sinks.weight", heads.n)
        return replace(attention, matrices=AttentionMatrices(heads, project, out), sinks=sinks)

    def _take_feed_forward(self, w: RoleWeights, layer: int) -> FeedForward:
        return take_experts(w, self.hparams, layer)


class _ScaledProjection(NamedTuple):
    """A projection times a constant."""

    matrix: Projection
    factor: float

    def __call__(self, step: Pass, x: Tensor, name: str) -> Tensor:
        return scale(self.matrix(step, x, name), self.factor, name=name)
