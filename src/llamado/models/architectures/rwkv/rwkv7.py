"""The rwkv7 architecture: RWKV-7, Goose."""

from __future__ import annotations

from llamado.models.architectures.rwkv.rwkv6 import Rwkv6Model
from llamado.models.parts.recurrent.rwkv import TimeMix, TimeMix7
from llamado.models.weights import RoleWeights


class Rwkv7Model(Rwkv6Model):
    """RWKV-6 with RWKV-7's generalized delta rule, which also removes from the state what a token replaces."""

    def _take_time_mix(self, w: RoleWeights, layer: int) -> TimeMix:
        return TimeMix7.take(w, self.hparams.n_embd, self._size, layer)
