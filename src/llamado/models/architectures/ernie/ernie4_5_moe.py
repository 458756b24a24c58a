"""The ernie4_5-moe architecture: the mixtures of experts of ERNIE 4.5."""

from __future__ import annotations

from llamado.models.architectures.ernie.ernie4_5 import Ernie45Model
from llamado.models.errors import UnsupportedModel
from llamado.models.hparams import HyperParameters, RouterKind
from llamado.models.keys import Keys


class Ernie45MoeModel(Ernie45Model):
    """ERNIE 4.5 with a mixture of experts and a shared expert after the dense first layers."""

    router = RouterKind(normalized=True)

    def _read_hparams(self, keys: Keys, n_vocab: int) -> HyperParameters:
        step = keys.int_("interleave_moe_layer_step")
        if step != 1:
            raise UnsupportedModel(
                f"metadata key '{keys.name('interleave_moe_layer_step')}' is {step}; only 1, experts in every layer, "
                "is supported"
            )
        return super()._read_hparams(keys, n_vocab)
