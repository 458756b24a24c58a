"""The arwkv7 architecture: ARWKV, attention models converted to RWKV-7."""

from __future__ import annotations

from typing import NamedTuple

from llamado.ggml.tensor import Tensor
from llamado.models.decoder import Decoder
from llamado.models.forward import Pass
from llamado.models.hparams import HyperParameters
from llamado.models.keys import Keys
from llamado.models.memory import LayerMemory, RecurrentState
from llamado.models.parts.attention import Mixer
from llamado.models.parts.recurrent.rwkv import TimeMix, TimeMix7
from llamado.models.weights import RoleWeights


class _TimeMixer(NamedTuple):
    """RWKV time mixing as a layer's token mixer."""

    time_mix: TimeMix

    def __call__(self, step: Pass, layer: int, x: Tensor) -> Tensor | None:
        y = self.time_mix(step, layer, x)
        return None if step.is_cache_only(layer) else y


class Arwkv7Model(Decoder):
    """Qwen2 with RWKV-7 time mixing in place of attention (arXiv 2501.15570)."""

    is_recurrent = True

    def _read_hparams(self, keys: Keys, n_vocab: int) -> HyperParameters:
        self._size = keys.int_("wkv.head_size")
        return super()._read_hparams(keys, n_vocab)

    def _take_mixer(self, w: RoleWeights, layer: int) -> Mixer:
        return _TimeMixer(self._take_time_mix(w, layer))

    def _take_time_mix(self, w: RoleWeights, layer: int) -> TimeMix:
        return TimeMix7.take(w, self.hparams.n_embd, self._size, layer)

    def layer_memory(self, layer: int) -> LayerMemory:
        """The token before, and the state of the heads."""
        n_embd = self.hparams.n_embd
        return RecurrentState((n_embd, n_embd * self._size))
