"""The gptneox architecture: GPT-NeoX, Pythia, Dolly, RedPajama."""

from __future__ import annotations

from llamado.ggml.ops import RopeMode
from llamado.ggml.tensor import Tensor
from llamado.models.decoder import Decoder, LayerNormDecoder, ParallelDecoder
from llamado.models.forward import Pass
from llamado.models.hparams import HyperParameters
from llamado.models.keys import Keys
from llamado.models.parts.feedforward import GELU


class GptNeoxModel(LayerNormDecoder, ParallelDecoder):
    """Parallel attention and feed-forward network with separate layer norms, or sequential, depending on the file.

    A quarter of each head is rotated (arXiv 2204.06745).
    """

    rope_mode = RopeMode.NEOX
    feed_forward = GELU

    def _read_hparams(self, keys: Keys, n_vocab: int) -> HyperParameters:
        self._order = ParallelDecoder if keys.bool_("use_parallel_residual") else Decoder
        return super()._read_hparams(keys, n_vocab)

    def _layer(self, step: Pass, layer: int, x: Tensor) -> Tensor | None:
        return self._order._layer(self, step, layer, x)
