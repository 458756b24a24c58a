"""The granite architecture: the dense models of Granite 3 and 4."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import numpy as np

from llamado.models.decoder import Decoder
from llamado.models.errors import InvalidModel
from llamado.models.hparams import HyperParameters
from llamado.models.keys import Keys


class GraniteModel(Decoder):
    """Llama with scale factors of embeddings, attention scores, block outputs and logits.

    A file may turn rotary positions off (`rope.scaling.finetuned` false). Granite Vision adds parts of the embeddings
    to the inputs of some layers.
    """

    scales_embeddings = True

    default_logit_scale: ClassVar[float | None] = None
    """Divisor of the logits if the file has none; None: the file must have one."""

    def _read_hparams(self, keys: Keys, n_vocab: int) -> HyperParameters:
        hp = super()._read_hparams(keys, n_vocab)
        self.has_rope = keys.bool_("rope.scaling.finetuned", True)
        self._read_deepstack(keys, hp.n_layer)
        divisor = keys.float_("logit_scale", self.default_logit_scale) or 1.0
        return replace(
            hp,
            embedding_scale=keys.float_("embedding_scale", 0.0) or 1.0,
            attention_scale=keys.float_("attention.scale", 0.0) or hp.attention_scale,
            residual_scale=keys.float_("residual_scale", 0.0) or 1.0,
            logit_scale=float(np.float32(1) / np.float32(divisor)),
        )

    def _read_deepstack(self, keys: Keys, n_layer: int) -> None:
        """Read the parts of embeddings by layer: a negative number is none, and layer 0 gets part 0 alone.

        Raises GgufError or InvalidModel.
        """
        name = keys.name("deepstack_mapping")
        parts = keys.metadata.ints(name, (-1,) * n_layer, n=n_layer)
        self.n_deepstack = len({part for part in parts if part >= 0})
        if max(parts) > self.n_deepstack:
            raise InvalidModel(f"metadata key '{name}' is {list(parts)}; numbers up to {self.n_deepstack} are expected")
        self.deepstack = {layer: part for layer, part in enumerate(parts) if layer and part >= 0}
