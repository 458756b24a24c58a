"""The minimax-m2 architecture: MiniMax-M2."""

from __future__ import annotations

from dataclasses import replace

from llamado.ggml.ops import RopeMode
from llamado.models.decoder import Decoder
from llamado.models.hparams import Gating, HyperParameters, RouterKind
from llamado.models.keys import Keys
from llamado.models.parts.attention import QkNorm


class MinimaxM2Model(Decoder):
    """Half-rotated heads, norms of whole query and key rows, and sigmoid routing with a selection bias."""

    rope_mode = RopeMode.NEOX
    qk_norm = QkNorm.ROWS
    router = RouterKind(Gating.SIGMOID, from_file=True)

    def _read_hparams(self, keys: Keys, n_vocab: int) -> HyperParameters:
        hp = super()._read_hparams(keys, n_vocab)
        assert hp.experts is not None
        # Weights are normalized and unscaled, regardless of the file's keys.
        return replace(hp, experts=replace(hp.experts, n_ff=hp.n_ff[0], normalized=True, scale=1.0))
