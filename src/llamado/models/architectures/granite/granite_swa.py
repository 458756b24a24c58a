"""The granite_swa architecture: Granite with sliding windows."""

from __future__ import annotations

from dataclasses import replace

from llamado.models.architectures.granite.granite import GraniteModel
from llamado.models.hparams import HyperParameters, Rope, RouterKind, with_window
from llamado.models.keys import Keys
from llamado.models.parts.attention import Attention
from llamado.models.weights import RoleWeights


class GraniteSwaModel(GraniteModel):
    """Granite with attention sinks, sliding-window layers, optional layers without positions, and optional experts."""

    router = RouterKind(normalized=True, optional=True)

    def _read_hparams(self, keys: Keys, n_vocab: int) -> HyperParameters:
        hp = super()._read_hparams(keys, n_vocab)
        self._rotated = keys.metadata.bools(keys.name("attention.rope_pattern"), (True,) * hp.n_layer, n=hp.n_layer)
        return with_window(keys, hp, 0)

    def _layer_rope(self, layer: int) -> Rope | None:
        return self.hparams.rope if self._rotated[layer] else None

    def _take_attention(self, w: RoleWeights, layer: int) -> Attention:
        sinks = w.require("attn_sinks.weight", self.hparams.n_head[layer])
        return replace(super()._take_attention(w, layer), sinks=sinks)
