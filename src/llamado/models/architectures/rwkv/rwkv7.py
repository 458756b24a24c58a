"""The rwkv7 architecture: RWKV-7, Goose."""

from __future__ import annotations

from llamado.models.architectures.rwkv.rwkv6 import Rwkv6Model
from llamado.models.parts.recurrent.rwkv import TimeMix, TimeMix7
from llamado.models.weights import RoleWeights


class Rwkv7Model(Rwkv6Model):
    """As RWKV-6, where a token also takes away from the state what it is about to replace."""

    def _take_time_mix(self, w: RoleWeights, layer: int) -> TimeMix:
        return TimeMix7.take(w, self.hparams.n_embd, self._size, layer)
