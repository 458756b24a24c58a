"""The llama architecture: Llama 1 to 3, Mistral, Mixtral, SmolLM and all others saved under its name."""

from __future__ import annotations

from llamado.models.decoder import Decoder
from llamado.models.errors import InvalidModel
from llamado.models.hparams import HyperParameters, RouterKind
from llamado.models.keys import Keys


class LlamaModel(Decoder):
    """Pre-norm decoder: grouped-query attention with rotary positions, then a SwiGLU network.

    Mixtral (arXiv 2401.04088) has several such networks as experts.
    """

    router = RouterKind(normalized=True, optional=True)

    def _read_hparams(self, keys: Keys, n_vocab: int) -> HyperParameters:
        hp = super()._read_hparams(keys, n_vocab)
        if hp.rope.n_dims != hp.head_dim_k:
            raise InvalidModel(
                f"metadata key '{keys.name('rope.dimension_count')}' is {hp.rope.n_dims}; {hp.head_dim_k} is expected"
            )
        return hp
