"""The mamba architecture: Mamba, Falcon Mamba."""

from __future__ import annotations

from llamado.ggml.graph import add
from llamado.ggml.ops import RopeMode
from llamado.ggml.tensor import Tensor
from llamado.models.base import Model
from llamado.models.forward import Pass
from llamado.models.hparams import HyperParameters, read_hparams
from llamado.models.keys import Keys
from llamado.models.memory import LayerMemory
from llamado.models.parts.attention import Mixer
from llamado.models.parts.mamba import Mamba, StateSpace
from llamado.models.parts.norms import RmsNorm, UnitNorm
from llamado.models.weights import RoleWeights, Weights


class MambaModel(Model):
    """A stack of Mamba mixers, x + mixer(norm(x)), without feed-forward networks (arXiv 2312.00752)."""

    def _read_hparams(self, keys: Keys, n_vocab: int) -> HyperParameters:
        self._sizes = self._read_sizes(keys)
        self._normed = keys.bool_("ssm.dt_b_c_rms", False)
        return read_hparams(keys, n_vocab=n_vocab, rope_mode=RopeMode.NORMAL, recurrent=True)

    def _read_sizes(self, keys: Keys) -> StateSpace:
        return StateSpace.read(keys)

    def _take_weights(self, weights: Weights) -> None:
        n, layers = self.hparams.n_embd, [weights.layer(i) for i in range(self.hparams.n_layer)]
        self._layers = [(RmsNorm.take(w, "attn_norm", n), self._take_mixer(w, n)) for w in layers]

    def _take_mixer(self, w: RoleWeights, n_embd: int) -> Mixer:
        norms = (UnitNorm(),) * 3 if self._normed else None
        return Mamba.take(w, self._sizes, n_embd, norms=norms)

    def layer_memory(self, layer: int) -> LayerMemory:
        return self._sizes.layer_memory(self._sizes.n_inner)

    def _layer(self, step: Pass, layer: int, x: Tensor) -> Tensor | None:
        norm, mixer = self._layers[layer]
        mixed = mixer(step, layer, norm(step, x, f"attn_norm-{layer}"))
        if mixed is None:
            return None
        mixed, x = step.keep_outputs(layer, mixed, x)
        return add(mixed, x, f"l_out-{layer}")
