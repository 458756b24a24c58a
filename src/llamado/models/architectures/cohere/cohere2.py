"""The cohere2 architecture: Command R7B, Command A."""

from __future__ import annotations

from dataclasses import replace

from llamado.models.decoder import ONE_NORM, LayerNormDecoder, ParallelDecoder
from llamado.models.hparams import HyperParameters, Rope, with_window
from llamado.models.keys import Keys


class Cohere2Model(LayerNormDecoder, ParallelDecoder):
    """Parallel attention and feed-forward network after one layer norm without biases (arXiv 2504.00698).

    Of four layers, three have sliding-window attention with rotary positions, the last has full attention without
    positions.
    """

    norms = ONE_NORM
    has_norm_bias = False

    def _read_hparams(self, keys: Keys, n_vocab: int) -> HyperParameters:
        hp = with_window(keys, super()._read_hparams(keys, n_vocab), 4)
        return replace(hp, logit_scale=keys.float_("logit_scale") or 1.0)

    def _layer_rope(self, layer: int) -> Rope | None:
        return self.hparams.rope if self.hparams.is_swa(layer) else None
