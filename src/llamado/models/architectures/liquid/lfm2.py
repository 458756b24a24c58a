"""The lfm2 architecture: the dense models of LFM2 and LFM2.5."""

from __future__ import annotations

from dataclasses import replace

from llamado.ggml.ops import RopeMode
from llamado.models.decoder import Decoder
from llamado.models.errors import UnsupportedModel
from llamado.models.hparams import HyperParameters
from llamado.models.keys import Keys
from llamado.models.memory import LayerMemory
from llamado.models.parts.attention import Mixer, QkNorm
from llamado.models.parts.norms import Norm
from llamado.models.parts.recurrent.short_convolution import ShortConvolution
from llamado.models.weights import RoleWeights


class Lfm2Model(Decoder):
    """Short convolutions, and attention with query and key norms in the layers with KV heads."""

    rope_mode = RopeMode.NEOX
    qk_norm = QkNorm.HEADS
    is_recurrent = True

    def _read_hparams(self, keys: Keys, n_vocab: int) -> HyperParameters:
        self._n_convolved = keys.int_("shortconv.l_cache")
        hp = super()._read_hparams(keys, n_vocab)
        if not hp.causal:
            raise UnsupportedModel(
                f"metadata key '{keys.name('attention.causal')}' is false; bidirectional LFM2 (embedding models) "
                "is not supported"
            )
        return self._with_window(keys, hp)

    def _with_window(self, keys: Keys, hp: HyperParameters) -> HyperParameters:
        """Add the sliding window that attention has in some of the dense models."""
        n = keys.int_("attention.sliding_window", 0)
        return replace(hp, n_swa=n, swa_layers=tuple(n_kv > 0 for n_kv in hp.n_head_kv)) if n else hp

    def _take_norm(self, w: RoleWeights, name: str, n: int) -> Norm:
        return super()._take_norm(w, "token_embd_norm" if name == "output_norm" else name, n)

    def _take_mixer(self, w: RoleWeights, layer: int) -> Mixer:
        if self.hparams.n_head_kv[layer]:
            return self._take_attention(w, layer)
        return ShortConvolution.take(w, self.hparams.n_embd, self._n_convolved)

    def layer_memory(self, layer: int) -> LayerMemory:
        """Keys and values, or the last inputs of the convolution."""
        mixer = self._layers[layer].attention
        return mixer.layer_memory() if isinstance(mixer, ShortConvolution) else super().layer_memory(layer)
