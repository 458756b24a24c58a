"""The llama4 architecture: Llama 4 Scout and Maverick."""

from __future__ import annotations

from dataclasses import replace

from llamado.models.decoder import Decoder
from llamado.models.errors import UnsupportedModel
from llamado.models.hparams import Gating, HyperParameters, Rope, RouterKind, Temperature, read_swa_layers, swa_rope
from llamado.models.keys import Keys
from llamado.models.memory import KeysValues, LayerMemory
from llamado.models.parts.attention import Attention
from llamado.models.parts.experts import Mixture
from llamado.models.parts.feedforward import FeedForward
from llamado.models.parts.norms import UnitNorm
from llamado.models.weights import RoleWeights

_CHUNK = 8192
_ROTATED = 4
"""Every n-th layer has no positions."""
_TEMPERATURE = Temperature(0.1, _CHUNK, 1.0)
_EXPERTS_OF_MAVERICK = 128


class Llama4Model(Decoder):
    """Chunked attention, or full attention without positions in every fourth layer.

    Each token uses one routed expert, whose input is weighted, and a shared expert.
    """

    router = RouterKind(Gating.SIGMOID)

    def _read_hparams(self, keys: Keys, n_vocab: int) -> HyperParameters:
        hp = super()._read_hparams(keys, n_vocab)
        if keys.int_("attention.sliding_window", _CHUNK) == 0:
            raise UnsupportedModel(
                f"metadata key '{keys.name('attention.sliding_window')}' is 0; "
                "llama4 without chunked attention is not supported"
            )
        self._mixture_every = keys.int_("interleave_moe_layer_step")
        layers = read_swa_layers(keys, hp.n_layer, 4)
        return replace(hp, n_swa=_CHUNK, swa_layers=layers, rope_swa=swa_rope(keys, hp.rope))

    def _layer_rope(self, layer: int) -> Rope | None:
        return self.hparams.rope_of(layer) if (layer + 1) % _ROTATED else None

    def _take_attention(self, w: RoleWeights, layer: int) -> Attention:
        found, experts = super()._take_attention(w, layer), self.hparams.experts
        assert experts is not None
        if found.rope is None:
            return replace(found, temperature=_TEMPERATURE)
        norm = UnitNorm() if experts.n != _EXPERTS_OF_MAVERICK else None
        return replace(found, q_norm=norm, k_norm=norm, norm_after_rope=True)

    def _take_feed_forward(self, w: RoleWeights, layer: int) -> FeedForward:
        hp = self.hparams
        assert hp.experts is not None
        if not self._mixture_every or (layer + 1) % self._mixture_every:
            return self.feed_forward.take(w, hp.n_embd, hp.n_ff[layer])
        shared = self.feed_forward.take(w, hp.n_embd, hp.experts.n_ff, suffix="_shexp")
        return Mixture.take(w, hp.n_embd, hp.experts, weigh_input=True, shared=shared)

    def layer_memory(self, layer: int) -> LayerMemory:
        """Keys and values of all tokens, or of those of a chunk."""
        hp = self.hparams
        k, v = hp.n_embd_k(layer), hp.n_embd_v(layer)
        return KeysValues(k, v, hp.n_swa, chunked=True) if hp.is_swa(layer) else KeysValues(k, v)
