"""The bailingmoe architecture: the first Ling models."""

from __future__ import annotations

from dataclasses import replace

from llamado.ggml.ops import RopeMode
from llamado.models.decoder import Decoder
from llamado.models.hparams import (
    Gating,
    HyperParameters,
    Rope,
    read_experts,
)
from llamado.models.keys import Keys
from llamado.models.parts.experts import take_experts
from llamado.models.parts.feedforward import FeedForward
from llamado.models.weights import RoleWeights


class BailingMoeModel(Decoder):
    """Llama with a mixture of experts and shared experts in each layer (arXiv 2503.05139)."""

    def _read_hparams(self, keys: Keys, n_vocab: int) -> HyperParameters:
        hp = super()._read_hparams(keys, n_vocab)
        experts = read_experts(keys, hp.n_ff[0], from_file=True)
        return replace(hp, experts=replace(experts, gating=Gating.SOFTMAX))

    def _take_feed_forward(self, w: RoleWeights, layer: int) -> FeedForward:
        return take_experts(w, self.hparams, layer)


class Deepseek2OcrModel(BailingMoeModel):
    """Text model of DeepSeek-OCR: dense first layers; the rotary embedding is fixed, not read from the file."""

    def _read_hparams(self, keys: Keys, n_vocab: int) -> HyperParameters:
        hp = Decoder._read_hparams(self, keys, n_vocab)
        plain = Rope(hp.head_dim_k, RopeMode.NEOX, 0, 10000.0, 1.0, 0.0, 1.0)
        return replace(hp, rope=plain, experts=read_experts(keys, hp.n_ff[0], from_file=True))
