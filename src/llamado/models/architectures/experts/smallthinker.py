"""The smallthinker architecture: SmallThinker 4B-A0.6B, 21B-A3B."""

from __future__ import annotations

from dataclasses import replace

from llamado.ggml.graph import add
from llamado.ggml.ops import GluOp, RopeMode
from llamado.ggml.tensor import Tensor
from llamado.models.decoder import Decoder
from llamado.models.forward import Pass
from llamado.models.hparams import HyperParameters, read_experts, read_swa_layers, swa_rope
from llamado.models.keys import Keys
from llamado.models.parts.attention import Attention
from llamado.models.parts.experts import Mixture
from llamado.models.weights import RoleWeights

_WINDOW, _PERIOD = 4096, 4


class SmallThinkerModel(Decoder):
    """ReGLU experts, selected by the layer's input before attention (arXiv 2507.20984).

    In the larger model, three of four layers have rotary positions and a sliding window of 4096 tokens; the size in the
    file is ignored.
    """

    rope_mode = RopeMode.NEOX

    def _read_hparams(self, keys: Keys, n_vocab: int) -> HyperParameters:
        hp = super()._read_hparams(keys, n_vocab)
        experts = read_experts(keys, hp.n_ff[0], from_file=True)
        hp = replace(hp, experts=replace(experts, normalized=True, scale=1.0))
        if not keys.int_("attention.sliding_window", 0):
            return hp
        layers = read_swa_layers(keys, hp.n_layer, _PERIOD, dense_first=True)
        return replace(hp, n_swa=_WINDOW, swa_layers=layers, rope_swa=swa_rope(keys, hp.rope))

    def _take_attention(self, w: RoleWeights, layer: int) -> Attention:
        attention = super()._take_attention(w, layer)
        return attention if not self.hparams.n_swa or layer % _PERIOD else replace(attention, rope=None)

    def _take_feed_forward(self, w: RoleWeights, layer: int) -> Mixture:
        hp = self.hparams
        assert hp.experts is not None
        return Mixture.take(w, hp.n_embd, hp.experts, GluOp.REGLU)

    def _layer(self, step: Pass, layer: int, x: Tensor) -> Tensor | None:
        w, i = self._layers[layer], layer
        assert w.attn_norm is not None and w.ffn_norm is not None and isinstance(w.feed_forward, Mixture)
        attended = w.attention(step, i, w.attn_norm(step, x, f"attn_norm-{i}"))
        if attended is None:
            return None
        attended, x = step.keep_outputs(i, attended, x)
        y = add(attended, x, f"ffn_inp-{i}")
        h = w.feed_forward(step, i, w.ffn_norm(step, y, f"ffn_norm-{i}"), router_input=x)
        return add(h, y, f"l_out-{i}")
