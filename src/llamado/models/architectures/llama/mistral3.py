"""The mistral3 architecture: Ministral 3, Devstral 2."""

from __future__ import annotations

from dataclasses import replace

from llamado.models.decoder import Decoder
from llamado.models.hparams import HyperParameters, RouterKind, Temperature, read_hparams, yarn_attention_factor
from llamado.models.keys import Keys
from llamado.models.parts.attention import Attention
from llamado.models.weights import RoleWeights


class Mistral3Model(Decoder):
    """Llama with position-dependent query scaling beyond the training context, and optional experts."""

    router = RouterKind(normalized=True, optional=True)

    def _read_hparams(self, keys: Keys, n_vocab: int) -> HyperParameters:
        hp = read_hparams(keys, n_vocab=n_vocab, rope_mode=self.rope_mode, read_yarn_betas=True)
        temperature = keys.float_("attention.temperature_scale", 0.0)
        self._temperature = Temperature(temperature, hp.n_ctx_short) if temperature else None
        multiplier, rope = keys.float_("rope.scaling.yarn_log_multiplier", 0.0), hp.rope
        if rope.ext_factor and multiplier:
            rope = replace(rope, attn_factor=rope.attn_factor / yarn_attention_factor(rope, multiplier))
        return replace(hp, rope=rope, experts=self.router.read(keys, hp.n_ff[0]))

    def _take_attention(self, w: RoleWeights, layer: int) -> Attention:
        return replace(super()._take_attention(w, layer), temperature=self._temperature)
