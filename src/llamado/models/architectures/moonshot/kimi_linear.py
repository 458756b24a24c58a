"""The kimi-linear architecture: Kimi Linear."""

from __future__ import annotations

from dataclasses import replace

from llamado.ggml.ops import RopeMode
from llamado.models.decoder import Decoder
from llamado.models.hparams import HyperParameters, inverse_sqrt, read_experts, read_hparams
from llamado.models.keys import Keys
from llamado.models.memory import LayerMemory
from llamado.models.parts.attention import Mixer
from llamado.models.parts.latent import (
    ExpandedAttention,
    GatedLatentAttention,
    LatentAttention,
    LatentProjection,
    LatentSizes,
)
from llamado.models.parts.recurrent.kimi_delta import KimiDelta
from llamado.models.weights import RoleWeights


class KimiLinearModel(Decoder):
    """Kimi Delta Attention; in the layers with KV heads, latent attention without positions."""

    def _read_hparams(self, keys: Keys, n_vocab: int) -> HyperParameters:
        hp = read_hparams(keys, n_vocab=n_vocab, rope_mode=RopeMode.NORMAL, recurrent=True, allow_no_rope=True)
        self._state, self._kernel = keys.int_("kda.head_dim"), keys.int_("ssm.conv_kernel")
        self._sizes = LatentSizes.read(keys, hp)
        experts = replace(read_experts(keys, hp.n_ff[0], from_file=True), normalized=True)
        return replace(hp, attention_scale=inverse_sqrt(self._sizes.key), experts=experts)

    def _take_mixer(self, w: RoleWeights, layer: int) -> Mixer:
        return self._take_latent(w) if self.hparams.n_head_kv[layer] else self._take_delta(w)

    def _take_delta(self, w: RoleWeights) -> KimiDelta:
        return KimiDelta.take(w, self.hparams.n_embd, self._state, self._sizes.n_head, self._kernel)

    def _take_latent(self, w: RoleWeights) -> Mixer:
        hp = self.hparams
        compressed = LatentProjection.take(w, hp.n_embd, self._sizes, 0, None, None)
        # Files have the fused matrix beside the split ones; llama.cpp uses it if present.
        kind = ExpandedAttention if w.has("attn_kv_b.weight") else LatentAttention
        return kind.take(w, hp.n_embd, compressed, hp.attention_scale)

    def layer_memory(self, layer: int) -> LayerMemory:
        """A latent row, or the state of the delta rule."""
        mixer = self._layers[layer].attention
        assert isinstance(mixer, (KimiDelta, LatentAttention, GatedLatentAttention, ExpandedAttention))
        return mixer.layer_memory()
