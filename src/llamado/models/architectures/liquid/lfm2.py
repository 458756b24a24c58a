"""The lfm2 architecture: the dense models of LFM2 and LFM2.5."""

from __future__ import annotations

from dataclasses import replace

from llamado.ggml.ops import RopeMode
from llamado.models.decoder import Decoder, Layer
from llamado.models.errors import UnsupportedModel
from llamado.models.hparams import HyperParameters, read_hparams
from llamado.models.keys import Keys
from llamado.models.memory import LayerMemory
from llamado.models.parts.attention import Attention, AttentionMatrices, Heads
from llamado.models.parts.norms import Norm, RmsNorm
from llamado.models.parts.recurrent.short_convolution import ShortConvolution
from llamado.models.weights import RoleWeights


class Lfm2Model(Decoder):
    """Short convolutions, and attention with query and key norms in the layers with KV heads."""

    def _read_hparams(self, keys: Keys, n_vocab: int) -> HyperParameters:
        return self._with_window(keys, self._read_plain(keys, n_vocab))

    def _read_plain(self, keys: Keys, n_vocab: int) -> HyperParameters:
        self._n_convolved = keys.int_("shortconv.l_cache")
        hp = read_hparams(keys, n_vocab=n_vocab, rope_mode=RopeMode.NEOX, recurrent=True)
        if not hp.causal:
            raise UnsupportedModel(
                f"metadata key '{keys.name('attention.causal')}' is false; bidirectional LFM2 (embedding models) "
                "is not supported"
            )
        return hp

    def _with_window(self, keys: Keys, hp: HyperParameters) -> HyperParameters:
        """Add the sliding window that attention has in some of the dense models."""
        n = keys.int_("attention.sliding_window", 0)
        return replace(hp, n_swa=n, swa_layers=tuple(n_kv > 0 for n_kv in hp.n_head_kv)) if n else hp

    def _take_norm(self, w: RoleWeights, name: str, n: int) -> Norm:
        return RmsNorm.take(w, "token_embd_norm", n)  # output_norm in other architectures

    def _take_layer(self, w: RoleWeights, layer: int) -> Layer:
        hp = self.hparams
        attends = hp.n_head_kv[layer] > 0
        return Layer(
            attn_norm=RmsNorm.take(w, "attn_norm", hp.n_embd),
            attention=self._take_attention(w, layer) if attends else self._take_convolution(w),
            ffn_norm=RmsNorm.take(w, "ffn_norm", hp.n_embd),
            feed_forward=self._take_feed_forward(w, layer),
        )

    def _take_convolution(self, w: RoleWeights) -> ShortConvolution:
        return ShortConvolution.take(w, self.hparams.n_embd, self._n_convolved)

    def _take_attention(self, w: RoleWeights, layer: int) -> Attention:
        hp, heads = self.hparams, Heads.of(self.hparams, layer)
        return Attention(
            matrices=AttentionMatrices.take(w, hp, layer),
            q_norm=RmsNorm.take(w, "attn_q_norm", heads.dim_k),
            k_norm=RmsNorm.take(w, "attn_k_norm", heads.dim_k),
            scale=hp.attention_scale,
            rope=hp.rope,
        )

    def layer_memory(self, layer: int) -> LayerMemory:
        """Keys and values, or the last inputs of the convolution."""
        mixer = self._layers[layer].attention
        return mixer.layer_memory() if isinstance(mixer, ShortConvolution) else super().layer_memory(layer)
