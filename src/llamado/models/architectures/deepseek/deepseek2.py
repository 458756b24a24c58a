"""The deepseek2 architecture: DeepSeek V2, V3 and R1, Kimi K2, GLM-4.7-Flash, GigaChat 3; also mistral4."""

from __future__ import annotations

from dataclasses import replace
from math import log

import numpy as np

from llamado.models.decoder import Decoder
from llamado.models.hparams import (
    Gating,
    HyperParameters,
    Rope,
    Temperature,
    inverse_sqrt,
    read_experts,
    yarn_attention_factor,
)
from llamado.models.keys import Keys
from llamado.models.memory import LayerMemory
from llamado.models.parts.attention import Mixer
from llamado.models.parts.latent import ExpandedAttention, LatentAttention, LatentProjection, LatentSizes
from llamado.models.weights import RoleWeights

_GLM_LAYERS, _GLM_VOCABULARY = (47, 48), 154_880


class Deepseek2Model(Decoder):
    """Latent attention; a mixture of experts with shared experts after the dense first layers (arXiv 2412.19437)."""

    def _read_hparams(self, keys: Keys, n_vocab: int) -> HyperParameters:
        hp = super()._read_hparams(keys, n_vocab)
        # Files of GLM-4.7-Flash do not give the gating function.
        glm = (hp.first_block or hp.n_layer) in _GLM_LAYERS and n_vocab == _GLM_VOCABULARY
        gating = Gating.SIGMOID if glm else Gating.SOFTMAX
        self._q_rank = keys.int_("attention.q_lora_rank", 0)
        self._absorbed = keys.has("attention.key_length_mla")
        self._sizes = LatentSizes.read(keys, hp)
        temperature = keys.float_("attention.temperature_scale", 0.0)
        self._temperature = Temperature(temperature, keys.int_("attention.temperature_length")) if temperature else None
        # The file holds a tenth of the multiplier.
        multiplier = float(np.float32(keys.float_("rope.scaling.yarn_log_multiplier", 0.0)) / np.float32(0.1))
        rope, scale = self._extended(hp.rope, multiplier)
        return replace(
            hp,
            rope=rope,
            attention_scale=scale * inverse_sqrt(self._sizes.key),
            experts=read_experts(keys, hp.n_ff[0], gating=gating, from_file=True),
        )

    def _extended(self, rope: Rope, multiplier: float) -> tuple[Rope, float]:
        """Return the rope and the attention scale for a context extended by YaRN.

        YaRN multiplies both by functions of the extension factor; see discussion 7416 of llama.cpp's repository.
        """
        stretch = log(1.0 / rope.freq_scale)
        if rope.ext_factor and multiplier:
            wanted = self._rotation_multiplier(multiplier)
            factor = yarn_attention_factor(rope, wanted) / yarn_attention_factor(rope, multiplier)
            rope = replace(rope, attn_factor=rope.attn_factor / yarn_attention_factor(rope, 1.0) * factor)
        each = rope.attn_factor * (1.0 + 0.1 * stretch) * (1.0 + 0.1 * multiplier * stretch)
        return rope, each * each

    def _rotation_multiplier(self, multiplier: float) -> float:
        """Return YaRN's log multiplier for the rotated part."""
        return multiplier

    def _take_mixer(self, w: RoleWeights, layer: int) -> Mixer:
        hp = self.hparams
        compressed = LatentProjection.take(w, hp.n_embd, self._sizes, self._q_rank, hp.rope, self._temperature)
        attention = LatentAttention if self._absorbed else ExpandedAttention
        return attention.take(w, hp.n_embd, compressed, hp.attention_scale)

    def layer_memory(self, layer: int) -> LayerMemory:
        """One latent row, or in older files the keys and values of all heads."""
        attention = self._layers[layer].attention
        assert isinstance(attention, (LatentAttention, ExpandedAttention))
        return attention.layer_memory()


class Mistral4Model(Deepseek2Model):
    """DeepSeek V3 with YaRN's multiplier applied to the attention scale only."""

    def _rotation_multiplier(self, multiplier: float) -> float:
        return 1.0
