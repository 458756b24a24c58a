"""The muse-glimmer architecture: Muse Glimmer."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from llamado.ggml.graph import mul, rms_norm
from llamado.ggml.ops import UnaryOp
from llamado.ggml.tensor import Tensor
from llamado.models.decoder import PRE_AND_POST_NORMS, Decoder
from llamado.models.forward import Pass
from llamado.models.hparams import HyperParameters, Rope, swa_rope, with_window
from llamado.models.keys import Keys
from llamado.models.parts.attention import QkNorm
from llamado.models.parts.norms import Norm, UnitNorm
from llamado.models.weights import RoleWeights


class MuseGlimmerModel(Decoder):
    """Normed embeddings, gated attention output, and post-norms of both blocks.

    Every fourth layer has full attention without positions; the others have a sliding window and rotary positions.
    """

    norms = PRE_AND_POST_NORMS
    qk_norm = QkNorm.HEADS
    output_gate = UnaryOp.SIGMOID

    def _read_hparams(self, keys: Keys, n_vocab: int) -> HyperParameters:
        hp = super()._read_hparams(keys, n_vocab)
        return replace(
            with_window(keys, hp, 4, rope=swa_rope(keys, hp.rope)),
            logit_scale=keys.float_("logit_scale") or 1.0,
            final_logit_softcap=keys.float_("final_logit_softcapping", 0.0),
        )

    def _take_norm(self, w: RoleWeights, name: str, n: int) -> Norm:
        norm = super()._take_norm(w, name, n)
        return _PostNorm(w.require(f"{name}.weight", n)) if name.startswith("post_") else norm

    def _layer_rope(self, layer: int) -> Rope | None:
        return self.hparams.rope_swa if self.hparams.is_swa(layer) else None

    def _embed(self, step: Pass) -> Tensor:
        return UnitNorm()(step, super()._embed(step), "inp_norm")


class _PostNorm(NamedTuple):
    """An RMS norm with a fixed epsilon."""

    weight: Tensor

    def __call__(self, step: Pass, x: Tensor, name: str) -> Tensor:
        return mul(rms_norm(x, 1e-8), self.weight, name)
