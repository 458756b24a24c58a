"""The nemotron_h architecture: Nemotron-H, Nemotron Nano 2."""

from __future__ import annotations

from llamado.ggml.graph import add
from llamado.ggml.ops import RopeMode, UnaryOp
from llamado.ggml.tensor import Tensor
from llamado.models.base import Model
from llamado.models.forward import Pass
from llamado.models.hparams import HyperParameters, read_hparams
from llamado.models.keys import Keys
from llamado.models.memory import LayerMemory, RecurrentState
from llamado.models.parts.attention import Attention, AttentionMatrices, Mixer
from llamado.models.parts.feedforward import FeedForward, UngatedFeedForward
from llamado.models.parts.mamba import Mamba2, StateSpace
from llamado.models.parts.norms import RmsNorm
from llamado.models.weights import RoleWeights, Weights


class NemotronHModel(Model):
    """One block per layer, x + f(norm(x)): Mamba-2, attention without positions, or squared ReLU (arXiv 2504.03624)."""

    def _read_hparams(self, keys: Keys, n_vocab: int) -> HyperParameters:
        self._sizes = StateSpace.read(keys, grouped=True)
        names = ("attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon")
        eps = next((name for name in names if keys.has(name)), names[0])
        return read_hparams(keys, n_vocab=n_vocab, rope_mode=RopeMode.NORMAL, norm_eps=eps, recurrent=True)

    def _take_weights(self, weights: Weights) -> None:
        layers = [weights.layer(i) for i in range(self.hparams.n_layer)]
        self._norms = [RmsNorm.take(w, "attn_norm", self.hparams.n_embd) for w in layers]
        self._mixers: dict[int, Mixer] = {}
        self._networks: dict[int, FeedForward] = {}
        for i, w in enumerate(layers):
            if self.hparams.n_ff[i]:
                self._networks[i] = self._take_feed_forward(w, i)
            else:
                self._mixers[i] = self._take_mixer(w, i)

    def _take_mixer(self, w: RoleWeights, layer: int) -> Mixer:
        hp = self.hparams
        if not hp.n_head_kv[layer]:
            return Mamba2.take(w, self._sizes, hp.n_embd)
        return Attention(matrices=AttentionMatrices.take(w, hp, layer), scale=hp.attention_scale, rope=None)

    def _take_feed_forward(self, w: RoleWeights, layer: int) -> FeedForward:
        return UngatedFeedForward.take(w, self.hparams.n_embd, self.hparams.n_ff[layer], UnaryOp.RELU, squared=True)

    def layer_memory(self, layer: int) -> LayerMemory:
        if layer in self._networks:
            return RecurrentState(())  # none
        if not self.hparams.n_head_kv[layer]:
            return self._sizes.layer_memory(self._sizes.n_mixed)
        return super().layer_memory(layer)

    def _layer(self, step: Pass, layer: int, x: Tensor) -> Tensor | None:
        h = self._norms[layer](step, x, f"attn_norm-{layer}")
        if layer in self._mixers:
            mixed = self._mixers[layer](step, layer, h)
            if mixed is None:
                return None
            mixed, x = step.keep_outputs(layer, mixed, x)
            return add(mixed, x, f"l_out-{layer}")
        if step.is_cache_only(layer):
            return None
        h, x = step.keep_outputs(layer, h, x)
        return add(self._networks[layer](step, layer, h), x, f"l_out-{layer}")
