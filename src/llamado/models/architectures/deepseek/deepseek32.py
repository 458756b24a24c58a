"""The deepseek32 architecture: DeepSeek V3.2; also glm-dsa."""

from __future__ import annotations

from dataclasses import replace

from llamado.ggml.ops import RopeMode
from llamado.models.architectures.deepseek.deepseek2 import Deepseek2Model
from llamado.models.errors import InvalidModel
from llamado.models.hparams import Gating, HyperParameters, read_experts
from llamado.models.keys import Keys
from llamado.models.memory import LayerMemory
from llamado.models.parts.attention import Mixer
from llamado.models.parts.indexer import Indexer, IndexerSizes, SparseAttention
from llamado.models.parts.latent import LatentAttention
from llamado.models.weights import RoleWeights

_CONTEXT_OF_5_2 = 1_048_576
"""Training context from GLM-5.2 on, whose layers share indexers."""


def read_indexed(keys: Keys, n_layer: int) -> tuple[bool, ...]:
    """Return which layers have an indexer of their own; the others use the selection of the last one before.

    Raises GgufError or InvalidModel.
    """
    name = keys.name("attention.indexer.types")
    kinds = keys.metadata.ints(name, n=n_layer)
    if not kinds[0]:
        raise InvalidModel(f"metadata key '{name}' gives layer 0 no indexer, and there is none before it")
    return tuple(kind != 0 for kind in kinds)


class Deepseek32Model(Deepseek2Model):
    """DeepSeek V3 with an indexer that selects the tokens attention sees (arXiv 2512.02556)."""

    _indexer_rope, _indexer_eps = RopeMode.NEOX, 1e-6

    def _read_hparams(self, keys: Keys, n_vocab: int) -> HyperParameters:
        hp = super()._read_hparams(keys, n_vocab)
        self._indexer = IndexerSizes.read(keys)
        if not self._absorbed or not self._q_rank or self._indexer.dim < hp.rope.n_dims:
            raise InvalidModel(
                f"metadata keys '{keys.name('attention.key_length_mla')}' and '{keys.name('attention.q_lora_rank')}' "
                f"are expected, and '{keys.name('attention.indexer.key_length')}' not below {hp.rope.n_dims}"
            )
        self._indexed = self._read_indexed(keys, hp)
        return hp

    def _read_indexed(self, keys: Keys, hp: HyperParameters) -> tuple[bool, ...]:
        """Return which layers have an indexer of their own."""
        return (True,) * hp.n_layer

    def _rotation_multiplier(self, multiplier: float) -> float:
        return 1.0

    def _take_mixer(self, w: RoleWeights, layer: int) -> Mixer:
        hp, own = self.hparams, self._indexed[layer]
        latent = super()._take_mixer(w, layer)
        assert isinstance(latent, LatentAttention)
        rope = replace(hp.rope, mode=self._indexer_rope)
        indexer = Indexer.take(w, hp.n_embd, self._q_rank, self._indexer, rope, self._indexer_eps) if own else None
        if indexer is None:  # files have indexer tensors in all layers
            names = ("attn_q_b.weight", "attn_k.weight", "k_norm.weight", "k_norm.bias", "proj.weight")
            w.ignore(*(f"indexer.{name}" for name in names))
        owner = max(i for i in range(layer + 1) if self._indexed[i])
        return SparseAttention(latent, indexer, owner, self._indexer.n_chosen)

    def layer_memory(self, layer: int) -> LayerMemory:
        """One latent row, and the indexer's key."""
        attention = self._layers[layer].attention
        assert isinstance(attention, SparseAttention)
        return attention.layer_memory()


class GlmDsaModel(Deepseek32Model):
    """GLM-5: DeepSeek V3.2 with sigmoid routing by default; layers may share an earlier layer's indexer."""

    _indexer_rope, _indexer_eps = RopeMode.NORMAL, 0.0

    def _read_hparams(self, keys: Keys, n_vocab: int) -> HyperParameters:
        hp = super()._read_hparams(keys, n_vocab)
        return replace(hp, experts=read_experts(keys, hp.n_ff[0], gating=Gating.SIGMOID, from_file=True))

    def _read_indexed(self, keys: Keys, hp: HyperParameters) -> tuple[bool, ...]:
        if keys.has("attention.indexer.types"):
            return read_indexed(keys, hp.n_layer)
        whole = hp.n_ctx_train < _CONTEXT_OF_5_2
        return tuple(whole or i < 2 or i % 4 == 2 for i in range(hp.n_layer))
