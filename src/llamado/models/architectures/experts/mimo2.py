"""The mimo2 architecture: MiMo-V2."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from llamado.ggml.graph import scale
from llamado.ggml.ops import RopeMode
from llamado.ggml.tensor import Tensor
from llamado.models.decoder import Decoder
from llamado.models.forward import Pass, Projection
from llamado.models.hparams import Gating, HyperParameters, RouterKind, read_swa_layers, swa_rope
from llamado.models.keys import Keys
from llamado.models.parts.attention import Attention
from llamado.models.weights import RoleWeights


class MiMo2Model(Decoder):
    """Value heads smaller than key heads, window layers with sinks and more KV heads, and sigmoid routing.

    Described in arXiv 2601.02780. The routing has a selection bias.
    """

    rope_mode = RopeMode.NEOX
    router = RouterKind(Gating.SIGMOID, normalized=True)

    def _read_hparams(self, keys: Keys, n_vocab: int) -> HyperParameters:
        hp = super()._read_hparams(keys, n_vocab)
        self._value_scale = keys.float_("attention.value_scale", 0.0)
        return replace(
            hp,
            n_swa=keys.int_("attention.sliding_window"),
            swa_layers=keys.of_layers(read_swa_layers(keys, keys.int_("block_count"), 0)),
            rope_swa=swa_rope(keys, hp.rope, freq_base=10000.0, freq_scale=1.0),
        )

    def _take_attention(self, w: RoleWeights, layer: int) -> Attention:
        attention = super()._take_attention(w, layer)
        matrices = attention.matrices
        if self._value_scale not in (0.0, 1.0):
            matrices = matrices._replace(out=_ScaledProjection(matrices.out, self._value_scale))
        return replace(attention, matrices=matrices, sinks=w.optional("attn_sinks.weight", matrices.heads.n))


class _ScaledProjection(NamedTuple):
    """A projection times a constant."""

    matrix: Projection
    factor: float

    def __call__(self, step: Pass, x: Tensor, name: str) -> Tensor:
        return scale(self.matrix(step, x, name), self.factor, name=name)
