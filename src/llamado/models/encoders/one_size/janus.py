"""Janus Pro (arXiv 2501.17811): SigLIP for pictures of one size, and a network of two layers."""

from __future__ import annotations

from llamado.ggml.tensor import Tensor
from llamado.media.resize import Resize
from llamado.models.encoders.encoder import EncoderPass
from llamado.models.encoders.pictures import VitEncoder
from llamado.models.weights import Weights


class JanusProEncoder(VitEncoder):
    """Each patch is a token."""

    resize = Resize(color=(127, 127, 127))

    def _take_projector(self, weights: Weights) -> None:
        self.require_positions(self.require_squares() ** 2)
        n_hidden, self.n_embd = weights.ne("mm.0.weight")[1], weights.ne("mm.1.weight")[1]
        self._first = weights.shared.linear("mm.0", self.transformer.n_embd, n_hidden)
        self._second = weights.shared.linear("mm.1", n_hidden, self.n_embd)

    def project(self, step: EncoderPass, x: Tensor) -> Tensor:
        return self._second(step, self.transformer.activation(self._first(step, x, "projection_1")), "projection_2")
