"""The deci architecture: Nemotron 51B, Nemotron Super 49B and Ultra 253B, DeciLM."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from llamado.ggml.tensor import Tensor
from llamado.models.decoder import Decoder, Layer
from llamado.models.errors import InvalidModel
from llamado.models.forward import Linear, Pass
from llamado.models.hparams import HyperParameters, read_hparams
from llamado.models.keys import Keys
from llamado.models.memory import LayerMemory
from llamado.models.memory.layers import SharedMemory
from llamado.models.parts.attention import Mixer
from llamado.models.weights import RoleWeights


class DeciModel(Decoder):
    """Llama in which layers may have a matrix in place of attention, no attention, or nothing at all.

    Described in arXiv 2411.19146.
    """

    def _read_hparams(self, keys: Keys, n_vocab: int) -> HyperParameters:
        hp = read_hparams(keys, n_vocab=n_vocab, rope_mode=self.rope_mode, recurrent=True)
        if not hp.n_head_kv[0]:
            raise InvalidModel(f"metadata key '{keys.name('attention.head_count_kv')}' gives the first layer no heads")
        return replace(hp, attention_scale=keys.float_("attention.scale", 0.0) or hp.attention_scale)

    def _take_layer(self, w: RoleWeights, layer: int) -> Layer:
        hp = self.hparams
        attention: Mixer = MissingBlock()
        if hp.n_head_kv[layer]:
            attention = self._take_attention(w, layer)
        elif hp.n_head[layer]:
            attention = LinearMixer(w.linear("attn_output", hp.n_embd, hp.n_embd))
        network = bool(hp.n_ff[layer])
        return Layer(
            attn_norm=self._take_norm(w, "attn_norm", hp.n_embd) if hp.n_head[layer] else None,
            attention=attention,
            ffn_norm=self._take_norm(w, "ffn_norm", hp.n_embd) if network else None,
            feed_forward=self._take_feed_forward(w, layer) if network else MissingBlock(),
        )

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
