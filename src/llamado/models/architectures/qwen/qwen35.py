"""The qwen35 architecture: the dense models of Qwen3.5."""

from __future__ import annotations

from llamado.ggml.ops import RopeMode
from llamado.models.decoder import Decoder, Layer
from llamado.models.hparams import HyperParameters, mrope_text_mode, read_hparams
from llamado.models.keys import Keys
from llamado.models.memory import LayerMemory
from llamado.models.parts.gated_attention import GatedAttention
from llamado.models.parts.norms import RmsNorm
from llamado.models.parts.recurrent.delta_net import DeltaNet, DeltaSizes, SeparateGates
from llamado.models.weights import RoleWeights


class Qwen35Model(Decoder):
    """Gated delta rule in three of four layers; gated attention with partially rotated heads in the fourth."""

    def _read_hparams(self, keys: Keys, n_vocab: int) -> HyperParameters:
        hp = read_hparams(keys, n_vocab=n_vocab, rope_mode=mrope_text_mode(keys, RopeMode.NEOX))
        self._sizes = DeltaSizes.read(keys)
        self._recurrent = recurrent_layers(keys, hp.n_layer)
        return hp

    def _take_layer(self, w: RoleWeights, layer: int) -> Layer:
        n_embd = self.hparams.n_embd
        recurrent = self._recurrent[layer]
        return Layer(
            attn_norm=RmsNorm.take(w, "attn_norm", n_embd),
            attention=self._take_delta_net(w) if recurrent else GatedAttention.take(w, self.hparams, layer),
            ffn_norm=RmsNorm.take(w, "post_attention_norm", n_embd),
            feed_forward=self._take_feed_forward(w, layer),
        )

    def _take_delta_net(self, w: RoleWeights) -> DeltaNet:
        n_embd, sizes = self.hparams.n_embd, self._sizes
        return DeltaNet.take(w, n_embd, sizes, SeparateGates.take(w, n_embd, sizes.n_values), interleaved=False)

    def layer_memory(self, layer: int) -> LayerMemory:
        """Keys and values, or the state of the delta rule."""
        return self._sizes.layer_memory() if self._recurrent[layer] else super().layer_memory(layer)


def recurrent_layers(keys: Keys, n_layer: int, period: int = 4) -> tuple[bool, ...]:
    """Return which layers are recurrent: a list in the file, or all but every n-th (default: `period`-th)."""
    suffix = "attention.recurrent_layers"
    if keys.has(suffix):
        return keys.metadata.bools(keys.name(suffix), n=keys.int_("block_count"))[:n_layer]
    period = keys.int_("full_attention_interval", period)
    return tuple((layer + 1) % period != 0 for layer in range(n_layer))
