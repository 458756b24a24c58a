"""The falcon-h1 architecture: Falcon-H1, Falcon-H1R."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from llamado.ggml.graph import add
from llamado.ggml.ops import RopeMode
from llamado.ggml.tensor import Tensor
from llamado.models.decoder import Decoder
from llamado.models.forward import Pass
from llamado.models.hparams import HyperParameters
from llamado.models.keys import Keys
from llamado.models.memory import AttentionAndState, KeysValues, LayerMemory
from llamado.models.parts.attention import Attention, Mixer
from llamado.models.parts.mamba import Mamba2, StateSpace
from llamado.models.parts.norms import Norm, RmsNorm
from llamado.models.weights import RoleWeights


class TwoMixers(NamedTuple):
    """Sum of attention and a state space mixer on the same input."""

    attention: Attention
    state_space: Mamba2

    def __call__(self, step: Pass, layer: int, x: Tensor) -> Tensor | None:
        attended, mixed = self.attention(step, layer, x), self.state_space(step, layer, x)
        return None if attended is None or mixed is None else add(attended, mixed, f"mixed-{layer}")


class FalconH1Model(Decoder):
    """Attention and Mamba-2 in parallel in each layer (arXiv 2507.22448)."""

    rope_mode = RopeMode.NEOX

    def _read_hparams(self, keys: Keys, n_vocab: int) -> HyperParameters:
        self._sizes = StateSpace.read(keys, grouped=True)
        return super()._read_hparams(keys, n_vocab)

    def layer_memory(self, layer: int) -> LayerMemory:
        keys_values = super().layer_memory(layer)
        assert isinstance(keys_values, KeysValues)
        return AttentionAndState(keys_values, self._sizes.layer_memory(self._sizes.n_mixed))

    def _take_norm(self, w: RoleWeights, name: str, n: int) -> Norm:
        # The name of the feed-forward norm has no `.weight` suffix.
        return RmsNorm(w.require(name, n)) if name == "ffn_norm" else super()._take_norm(w, name, n)

    def _take_mixer(self, w: RoleWeights, layer: int) -> Mixer:
        attention = replace(self._take_attention(w, layer), factors=None)  # llama.cpp loads them, but does not use them
        return TwoMixers(attention, Mamba2.take(w, self._sizes, self.hparams.n_embd))
