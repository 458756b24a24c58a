"""The jamba architecture: Jamba, Jamba 1.5, Jamba Reasoning."""

from __future__ import annotations

from dataclasses import replace

from llamado.models.decoder import Decoder
from llamado.models.hparams import HyperParameters, RouterKind
from llamado.models.keys import Keys
from llamado.models.memory import LayerMemory
from llamado.models.parts.attention import Mixer
from llamado.models.parts.mamba import Mamba, StateSpace
from llamado.models.weights import RoleWeights


class JambaModel(Decoder):
    """Mamba in most layers, attention without positions in the others, and experts in some (arXiv 2403.19887)."""

    has_rope = False
    is_recurrent = True

    def _read_hparams(self, keys: Keys, n_vocab: int) -> HyperParameters:
        self._sizes = StateSpace.read(keys)
        hp = super()._read_hparams(keys, n_vocab)
        return replace(hp, experts=RouterKind(optional=True).read(keys, max(hp.n_ff)))

    def layer_memory(self, layer: int) -> LayerMemory:
        return (
            super().layer_memory(layer)
            if self.hparams.n_head_kv[layer]
            else self._sizes.layer_memory(self._sizes.n_inner)
        )

    def _take_mixer(self, w: RoleWeights, layer: int) -> Mixer:
        hp = self.hparams
        return self._take_attention(w, layer) if hp.n_head_kv[layer] else Mamba.take(w, self._sizes, hp.n_embd)
