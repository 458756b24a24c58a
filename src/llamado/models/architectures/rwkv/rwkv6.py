"""The rwkv6 architecture: RWKV-6, Finch."""

from __future__ import annotations

from typing import NamedTuple

from llamado.ggml.graph import add, scale
from llamado.ggml.ops import RopeMode
from llamado.ggml.tensor import Tensor
from llamado.models.base import Model
from llamado.models.forward import Pass
from llamado.models.hparams import HyperParameters, read_hparams
from llamado.models.keys import Keys
from llamado.models.memory import LayerMemory, RecurrentState
from llamado.models.parts.norms import LayerNorm, Norm
from llamado.models.parts.recurrent.rwkv import ChannelMix, TimeMix, TimeMix6, token_shift
from llamado.models.weights import RoleWeights, Weights

_CHANNELS = 2
"""Index of the token-shift state of channel mixing."""


class _Block(NamedTuple):
    time_norm: LayerNorm
    time_mix: TimeMix
    channel_norm: LayerNorm
    channel_mix: ChannelMix


class Rwkv6Model(Model):
    """Time mixing with a state per head, and channel mixing; both use token shift.

    Files halve the weights after every `rescale_every_n_layers` layers, so the hidden state is halved there too.
    """

    def _read_hparams(self, keys: Keys, n_vocab: int) -> HyperParameters:
        self._size = keys.int_("wkv.head_size")
        self._rescaled = keys.int_("rescale_every_n_layers", 0)
        eps = "attention.layer_norm_epsilon"
        return read_hparams(keys, n_vocab=n_vocab, rope_mode=RopeMode.NORMAL, norm_eps=eps, recurrent=True)

    def _take_norm(self, w: RoleWeights, name: str, n: int) -> Norm:
        return LayerNorm.take(w, name, n)

    def _take_weights(self, weights: Weights) -> None:
        hp = self.hparams
        self._embd_norm = LayerNorm.take(weights.input, "token_embd_norm", hp.n_embd)
        self._blocks = [self._take_block(weights.layer(i), i) for i in range(hp.n_layer)]

    def _take_block(self, w: RoleWeights, layer: int) -> _Block:
        n_embd = self.hparams.n_embd
        return _Block(
            time_norm=LayerNorm.take(w, "attn_norm", n_embd),
            time_mix=self._take_time_mix(w, layer),
            channel_norm=LayerNorm.take(w, "attn_norm_2", n_embd),
            channel_mix=ChannelMix.take(w, n_embd, self.hparams.n_ff[layer]),
        )

    def _take_time_mix(self, w: RoleWeights, layer: int) -> TimeMix:
        return TimeMix6.take(w, self.hparams.n_embd, self._size, self.hparams.n_embd // self._size)

    def layer_memory(self, layer: int) -> LayerMemory:
        """The token before, for both kinds of mixing, and the state of the heads."""
        n_embd = self.hparams.n_embd
        return RecurrentState((n_embd, n_embd * self._size, n_embd))

    def _embed(self, step: Pass) -> Tensor:
        return self._embd_norm(step, super()._embed(step), "embd_norm")

    def _layer(self, step: Pass, layer: int, x: Tensor) -> Tensor | None:
        w, i = self._blocks[layer], layer
        x = add(w.time_mix(step, i, w.time_norm(step, x, f"attn_norm-{i}")), x, f"ffn_inp-{i}")
        h = w.channel_norm(step, x, f"ffn_norm-{i}")
        earlier = token_shift(step, i, _CHANNELS, h)
        if step.is_cache_only(i):
            return None
        h, earlier, x = step.keep_outputs(i, h, earlier, x)
        x = add(w.channel_mix(step, i, h, earlier), x, f"l_out-{i}")
        return scale(x, 0.5) if self._rescaled and (i + 1) % self._rescaled == 0 else x
