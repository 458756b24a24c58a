"""The qwen3next architecture: Qwen3-Next."""

from __future__ import annotations

from llamado.models.architectures.qwen.qwen35moe import Qwen35MoeModel
from llamado.models.parts.recurrent.delta_net import DeltaNet, FusedGates
from llamado.models.weights import RoleWeights


class Qwen3NextModel(Qwen35MoeModel):
    """The mixtures of Qwen3.5, its successor, with key heads that serve consecutive value heads."""

    def _take_delta_net(self, w: RoleWeights) -> DeltaNet:
        n_embd, sizes = self.hparams.n_embd, self._sizes
        return DeltaNet.take(w, n_embd, sizes, FusedGates.take(w, n_embd, sizes), interleaved=True)
