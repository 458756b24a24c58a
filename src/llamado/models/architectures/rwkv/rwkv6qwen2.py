"""The rwkv6qwen2 architecture: QRWKV6, Qwen2.5 with gated linear attention."""

from __future__ import annotations

from llamado.models.architectures.rwkv.arwkv7 import Arwkv7Model
from llamado.models.parts.norms import Norm, RmsNorm
from llamado.models.parts.recurrent.rwkv import TimeMix, TimeMix6
from llamado.models.weights import RoleWeights


class Rwkv6Qwen2Model(Arwkv7Model):
    """Qwen2 with RWKV-6 time mixing in place of attention; there may be fewer heads of keys and values."""

    def _take_norm(self, w: RoleWeights, name: str, n: int) -> Norm:
        return RmsNorm.take(w, name, n, biased=w.has(f"{name}.bias"))

    def _take_time_mix(self, w: RoleWeights, layer: int) -> TimeMix:
        n_embd = self.hparams.n_embd
        return TimeMix6.take(w, n_embd, self._size, self.hparams.n_head_kv[layer] or n_embd // self._size)
