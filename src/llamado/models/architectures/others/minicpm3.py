"""The minicpm3 architecture: MiniCPM3 4B; also plm."""

from __future__ import annotations

from dataclasses import replace

from llamado.ggml.ops import RopeMode
from llamado.models.architectures.others.minicpm import depth_scale
from llamado.models.decoder import Decoder
from llamado.models.hparams import HyperParameters
from llamado.models.keys import Keys
from llamado.models.memory import LayerMemory
from llamado.models.parts.attention import Mixer
from llamado.models.parts.feedforward import SQUARED_RELU
from llamado.models.parts.latent import ExpandedAttention, LatentProjection, LatentSizes
from llamado.models.weights import RoleWeights


class MiniCpm3Model(Decoder):
    """Latent attention with expanded keys and values, and MiniCPM's scale factors."""

    rope_mode = RopeMode.NEOX

    def _read_hparams(self, keys: Keys, n_vocab: int) -> HyperParameters:
        self._q_rank = keys.int_("attention.q_lora_rank")
        hp = self._read_latent(keys, n_vocab)
        return replace(
            hp,
            embedding_scale=12.0,
            residual_scale=depth_scale(hp.n_layer),
            logit_scale=256.0 / hp.n_embd,
        )

    def _read_latent(self, keys: Keys, n_vocab: int) -> HyperParameters:
        hp = super()._read_hparams(keys, n_vocab)
        self._sizes = LatentSizes.read(keys, hp)
        return hp

    def _take_mixer(self, w: RoleWeights, layer: int) -> Mixer:
        hp = self.hparams
        compressed = LatentProjection.take(w, hp.n_embd, self._sizes, self._q_rank, hp.rope, factors=self._freq_factors)
        return ExpandedAttention.take(w, hp.n_embd, compressed, hp.attention_scale)

    def layer_memory(self, layer: int) -> LayerMemory:
        """Keys and values of all heads."""
        attention = self._layers[layer].attention
        assert isinstance(attention, ExpandedAttention)
        return attention.layer_memory()


class PlmModel(MiniCpm3Model):
    """MiniCPM3's attention with ungated squared ReLU networks (arXiv 2503.12167)."""

    rope_mode = RopeMode.NORMAL
    feed_forward = SQUARED_RELU

    def _read_hparams(self, keys: Keys, n_vocab: int) -> HyperParameters:
        self._q_rank = 0
        return self._read_latent(keys, n_vocab)
