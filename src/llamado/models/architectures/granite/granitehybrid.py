"""The granitehybrid architecture: Granite 4, with Mamba-2 in most layers."""

from __future__ import annotations

from llamado.models.architectures.granite.granite import GraniteModel
from llamado.models.hparams import HyperParameters, RouterKind
from llamado.models.keys import Keys
from llamado.models.memory import LayerMemory
from llamado.models.parts.attention import Mixer
from llamado.models.parts.mamba import Mamba2, StateSpace
from llamado.models.weights import RoleWeights


class GraniteHybridModel(GraniteModel):
    """Granite with Mamba-2 in the layers without KV heads, and optional experts in all layers."""

    is_recurrent = True
    router = RouterKind(normalized=True, optional=True)
    default_logit_scale = 0.0

    def _read_hparams(self, keys: Keys, n_vocab: int) -> HyperParameters:
        self._sizes = StateSpace.read(keys, grouped=True)
        return super()._read_hparams(keys, n_vocab)

    def layer_memory(self, layer: int) -> LayerMemory:
        if self.hparams.n_head_kv[layer]:
            return super().layer_memory(layer)
        return self._sizes.layer_memory(self._sizes.n_mixed)

    def _take_mixer(self, w: RoleWeights, layer: int) -> Mixer:
        hp = self.hparams
        return self._take_attention(w, layer) if hp.n_head_kv[layer] else Mamba2.take(w, self._sizes, hp.n_embd)
