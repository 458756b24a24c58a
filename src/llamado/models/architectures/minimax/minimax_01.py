"""The minimax-01 architecture: MiniMax-Text-01 and MiniMax-M1."""

from __future__ import annotations

from dataclasses import replace

from llamado.ggml.graph import add, scale
from llamado.ggml.ops import RopeMode
from llamado.ggml.tensor import Tensor
from llamado.models.architectures.qwen.qwen35 import recurrent_layers
from llamado.models.decoder import Decoder
from llamado.models.forward import Pass
from llamado.models.hparams import HyperParameters, RouterKind
from llamado.models.keys import Keys
from llamado.models.memory import LayerMemory
from llamado.models.parts.attention import Mixer
from llamado.models.parts.recurrent.lightning import LightningAttention
from llamado.models.weights import RoleWeights


class Minimax01Model(Decoder):
    """Lightning attention in seven of eight layers.

    A block's output is added to its normed and scaled input instead of the residual stream.
    """

    rope_mode = RopeMode.NEOX
    router = RouterKind(normalized=True)

    def _read_hparams(self, keys: Keys, n_vocab: int) -> HyperParameters:
        hp = super()._read_hparams(keys, n_vocab)
        self._recurrent = recurrent_layers(keys, hp.n_layer, 8)
        assert hp.experts is not None
        experts = replace(hp.experts, n_ff=hp.n_ff[0])
        return replace(hp, experts=experts, residual_scale=keys.float_("residual_scale"))

    def _take_mixer(self, w: RoleWeights, layer: int) -> Mixer:
        hp = self.hparams
        if not self._recurrent[layer]:
            return self._take_attention(w, layer)
        rate = 1.0 - layer / max(hp.n_layer - 1, 1) + 1e-5
        return LightningAttention.take(w, hp.n_embd, hp.head_dim_k, hp.n_head[layer], rate)

    def _layer(self, step: Pass, layer: int, x: Tensor) -> Tensor | None:
        w, i, factor = self._layers[layer], layer, self.hparams.residual_scale
        assert w.attn_norm is not None and w.ffn_norm is not None
        seen = w.attn_norm(step, x, f"attn_norm-{i}")
        attended = w.attention(step, i, seen)
        if attended is None:
            return None
        h, seen = step.keep_outputs(i, attended, seen)
        seen = w.ffn_norm(step, add(h, scale(seen, factor), f"ffn_inp-{i}"), f"ffn_norm-{i}")
        return add(w.feed_forward(step, i, seen), scale(seen, factor), f"l_out-{i}")

    def layer_memory(self, layer: int) -> LayerMemory:
        """Keys and values, or the states of lightning attention."""
        mixer = self._layers[layer].attention
        return mixer.layer_memory() if isinstance(mixer, LightningAttention) else super().layer_memory(layer)
