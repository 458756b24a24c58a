"""The qwen35 architecture: the dense models of Qwen3.5."""

from __future__ import annotations

from llamado.ggml.ops import RopeMode
from llamado.models.decoder import POST_ATTENTION_NORM_BEFORE_FFN, Decoder
from llamado.models.hparams import HyperParameters
from llamado.models.keys import Keys
from llamado.models.memory import LayerMemory
from llamado.models.parts.attention import Mixer
from llamado.models.parts.gated_attention import GatedAttention
from llamado.models.parts.recurrent.delta_net import DeltaNet, DeltaSizes, SeparateGates
from llamado.models.weights import RoleWeights


class Qwen35Model(Decoder):
    """Gated delta rule in three of four layers; gated attention with partially rotated heads in the fourth."""

    rope_mode = RopeMode.NEOX
    has_mrope = True
    mrope_mode = RopeMode.IMROPE
    norms = POST_ATTENTION_NORM_BEFORE_FFN

    def _read_hparams(self, keys: Keys, n_vocab: int) -> HyperParameters:
        hp = super()._read_hparams(keys, n_vocab)
        self._sizes = DeltaSizes.read(keys)
        self._recurrent = recurrent_layers(keys, hp.n_layer)
        return hp

    def _take_mixer(self, w: RoleWeights, layer: int) -> Mixer:
        return self._take_delta_net(w) if self._recurrent[layer] else GatedAttention.take(w, self.hparams, layer)

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
