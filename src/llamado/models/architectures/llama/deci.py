"""The deci architecture: Nemotron 51B, Nemotron Super 49B and Ultra 253B, DeciLM."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from llamado.ggml.tensor import Tensor
from llamado.models.decoder import Decoder, NormNames
from llamado.models.errors import InvalidModel
from llamado.models.forward import Linear, Pass
from llamado.models.hparams import HyperParameters
from llamado.models.keys import Keys
from llamado.models.memory import LayerMemory
from llamado.models.memory.layers import SharedMemory
from llamado.models.parts.attention import Mixer
from llamado.models.parts.feedforward import FeedForward
from llamado.models.weights import RoleWeights


class DeciModel(Decoder):
    """Llama in which layers may have a matrix in place of attention, no attention, or nothing at all.

    Described in arXiv 2411.19146.
    """

    is_recurrent = True

    def _read_hparams(self, keys: Keys, n_vocab: int) -> HyperParameters:
        hp = super()._read_hparams(keys, n_vocab)
        if not hp.n_head_kv[0]:
            raise InvalidModel(f"metadata key '{keys.name('attention.head_count_kv')}' gives the first layer no heads")
        return replace(hp, attention_scale=keys.float_("attention.scale", 0.0) or hp.attention_scale)

    def _norm_names(self, w: RoleWeights, layer: int) -> NormNames:
        hp = self.hparams
        return NormNames("attn_norm" if hp.n_head[layer] else None, "ffn_norm" if hp.n_ff[layer] else None)

    def _take_mixer(self, w: RoleWeights, layer: int) -> Mixer:
        hp = self.hparams
        if hp.n_head_kv[layer]:
            return self._take_attention(w, layer)
        return LinearMixer(w.linear("attn_output", hp.n_embd, hp.n_embd)) if hp.n_head[layer] else MissingBlock()

    def _take_feed_forward(self, w: RoleWeights, layer: int) -> FeedForward:
        return super()._take_feed_forward(w, layer) if self.hparams.n_ff[layer] else MissingBlock()

    def layer_memory(self, layer: int) -> LayerMemory:
        """Keys and values, if the layer has attention."""
        return super().layer_memory(layer) if self.hparams.n_head_kv[layer] else SharedMemory(0)

    def _layer(self, step: Pass, layer: int, x: Tensor) -> Tensor | None:
        hp, w = self.hparams, self._layers[layer]
        if hp.n_head[layer] and hp.n_ff[layer]:
            return super()._layer(step, layer, x)
        if step.is_cache_only(layer):
            return None
        (x,) = step.keep_outputs(layer, x)
        if w.ffn_norm is None:  # without a feed-forward network the attention output is unused, as in llama.cpp
            return x
        return self._add(w.feed_forward(step, layer, w.ffn_norm(step, x, f"ffn_norm-{layer}")), x, f"l_out-{layer}")


class LinearMixer(NamedTuple):
    """A matrix in place of attention."""

    matrix: Linear

    def __call__(self, step: Pass, layer: int, x: Tensor) -> Tensor | None:
        return None if step.is_cache_only(layer) else self.matrix(step, x, f"attn_out-{layer}")


class MissingBlock(NamedTuple):
    """Placeholder for a missing attention or feed-forward network."""

    def __call__(self, step: Pass, layer: int, x: Tensor) -> Tensor:
        raise AssertionError(f"layer {layer} has no such block")
