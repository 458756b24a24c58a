"""The dots3note architecture: dots.llm3 Note."""

from __future__ import annotations

from dataclasses import replace

from llamado.ggml.ops import RopeMode
from llamado.models.architectures.deepseek.deepseek2 import Deepseek2Model
from llamado.models.errors import InvalidModel
from llamado.models.hparams import HyperParameters, Rope, inverse_sqrt, read_swa_layers
from llamado.models.keys import Keys
from llamado.models.memory import Latent, LayerMemory
from llamado.models.parts.attention import Mixer, OutputGate
from llamado.models.parts.indexer import ALL, Indexer, IndexerSizes, SparseAttention
from llamado.models.parts.latent import LatentAttention, LatentProjection, LatentSizes
from llamado.models.parts.norms import RmsNorm
from llamado.models.weights import RoleWeights

_INDEXER_EPS = 1e-6


class Dots3NoteModel(Deepseek2Model):
    """Latent attention with gated heads; layers have either an indexer, as in DeepSeek V3.2, or a sliding window.

    The window layers have other sizes. The rotated part of keys is normed.
    """

    def _read_hparams(self, keys: Keys, n_vocab: int) -> HyperParameters:
        hp = super()._read_hparams(keys, n_vocab)
        self._indexer = IndexerSizes.read(keys)
        if not self._absorbed or not self._q_rank or self._indexer.dim < hp.rope.n_dims:
            raise InvalidModel(
                f"metadata keys '{keys.name('attention.key_length_mla')}' and '{keys.name('attention.q_lora_rank')}' "
                f"are expected, and '{keys.name('attention.indexer.key_length')}' not below {hp.rope.n_dims}"
            )
        dim = keys.int_("attention.key_length_mla_swa")
        if dim <= hp.rope.n_dims:
            raise InvalidModel(
                f"metadata key '{keys.name('attention.key_length_mla_swa')}' is {dim}; more than the "
                f"{hp.rope.n_dims} elements that are rotated are expected"
            )
        self._narrow = self._sizes._replace(
            nope=dim - hp.rope.n_dims,
            value=keys.int_("attention.value_length_mla_swa"),
            rank=keys.int_("attention.kv_lora_rank_swa"),
        )
        return replace(
            hp,
            n_swa=keys.int_("attention.sliding_window"),
            swa_layers=read_swa_layers(keys, hp.n_layer + hp.n_nextn, 0)[: hp.n_layer],
            rope_swa=replace(hp.rope, freq_base=keys.float_("rope.freq_base_swa")),
        )

    def _extended(self, rope: Rope, multiplier: float) -> tuple[Rope, float]:
        return rope, 1.0

    def _sizes_of(self, layer: int) -> LatentSizes:
        sizes = self._narrow if self.hparams.is_swa(layer) else self._sizes
        return sizes._replace(n_head=self.hparams.n_head[layer])

    def _take_mixer(self, w: RoleWeights, layer: int) -> Mixer:
        hp, sizes = self.hparams, self._sizes_of(layer)
        compressed = LatentProjection.take(w, hp.n_embd, sizes, self._q_rank, hp.rope_of(layer))
        compressed = replace(compressed, k_norm=RmsNorm.take(w, "attn_k_norm", sizes.rope))
        indexer = None
        if not hp.is_swa(layer):
            rope = replace(hp.rope, mode=RopeMode.NEOX)
            indexer = Indexer.take(w, hp.n_embd, self._q_rank, self._indexer, rope, _INDEXER_EPS)
        return SparseAttention(
            LatentAttention.take(w, hp.n_embd, compressed, inverse_sqrt(sizes.key)),
            indexer=indexer,
            owner=layer,
            n_chosen=ALL if indexer is None else self._indexer.n_chosen,
            gate=OutputGate(w.linear("attn_gate", hp.n_embd, sizes.n_head), sizes.n_head),
        )

    def layer_memory(self, layer: int) -> LayerMemory:
        """One latent row, within the window or with the indexer's key."""
        attention = self._layers[layer].attention
        assert isinstance(attention, SparseAttention)
        found = attention.layer_memory()
        assert isinstance(found, Latent)
        return replace(found, window=self.hparams.n_swa) if self.hparams.is_swa(layer) else found
