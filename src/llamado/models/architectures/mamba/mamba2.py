"""The mamba2 architecture: Mamba-2, Codestral Mamba."""

from __future__ import annotations

from llamado.models.architectures.mamba.mamba import MambaModel
from llamado.models.keys import Keys
from llamado.models.memory import LayerMemory
from llamado.models.parts.attention import Mixer
from llamado.models.parts.mamba import Mamba2, StateSpace
from llamado.models.weights import RoleWeights


class Mamba2Model(MambaModel):
    """A stack of Mamba-2 mixers: one decay rate per head, and a norm after the gate (arXiv 2405.21060)."""

    def _read_sizes(self, keys: Keys) -> StateSpace:
        return StateSpace.read(keys, grouped=True)

    def _take_mixer(self, w: RoleWeights, n_embd: int) -> Mixer:
        return Mamba2.take(w, self._sizes, n_embd)

    def layer_memory(self, layer: int) -> LayerMemory:
        return self._sizes.layer_memory(self._sizes.n_mixed)
