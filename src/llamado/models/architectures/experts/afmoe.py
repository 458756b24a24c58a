"""The afmoe architecture: Arcee's Trinity."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from llamado.ggml.ops import UnaryOp
from llamado.models.architectures.experts.dots1 import Dots1Model
from llamado.models.decoder import PRE_AND_POST_NORMS
from llamado.models.hparams import HyperParameters, Rope, swa_rope, with_window
from llamado.models.keys import Keys

_NO_POSITIONS_STEP = 4


class AfMoeModel(Dots1Model):
    """dots.llm1 with gated attention output and post-norms of both blocks.

    Every fourth layer has no positions; the others have a sliding window if the file gives one.
    """

    norms = PRE_AND_POST_NORMS
    output_gate = UnaryOp.SIGMOID

    def _read_hparams(self, keys: Keys, n_vocab: int) -> HyperParameters:
        hp = super()._read_hparams(keys, n_vocab)
        hp = with_window(keys, hp, _NO_POSITIONS_STEP, rope=swa_rope(keys, hp.rope), optional=True)
        return replace(hp, embedding_scale=float(np.sqrt(np.float32(hp.n_embd))))

    def _layer_rope(self, layer: int) -> Rope | None:
        return self.hparams.rope_of(layer) if (layer + 1) % _NO_POSITIONS_STEP else None
