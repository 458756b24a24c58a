"""The bailingmoe architecture: the first Ling models."""

from __future__ import annotations

from dataclasses import replace

from llamado.ggml.ops import RopeMode
from llamado.models.decoder import Decoder
from llamado.models.hparams import Gating, HyperParameters, Rope, RouterKind
from llamado.models.keys import Keys


class BailingMoeModel(Decoder):
    """Llama with a mixture of experts and shared experts in each layer (arXiv 2503.05139)."""

    router = RouterKind(from_file=True)

    def _read_hparams(self, keys: Keys, n_vocab: int) -> HyperParameters:
        hp = super()._read_hparams(keys, n_vocab)
        assert hp.experts is not None
        return replace(hp, experts=replace(hp.experts, gating=Gating.SOFTMAX))


class Deepseek2OcrModel(Decoder):
    """Text model of DeepSeek-OCR: dense first layers; the rotary embedding is fixed, not read from the file."""

    router = RouterKind(from_file=True)

    def _read_hparams(self, keys: Keys, n_vocab: int) -> HyperParameters:
        hp = super()._read_hparams(keys, n_vocab)
        return replace(hp, rope=Rope(hp.head_dim_k, RopeMode.NEOX, 0, 10000.0, 1.0, 0.0, 1.0))
