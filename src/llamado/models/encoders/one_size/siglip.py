"""Gemma 3's encoder: SigLIP (arXiv 2303.15343) for pictures of one size (clip.cpp, models/siglip.cpp)."""

from __future__ import annotations

from llamado.ggml.graph import cont, mul_mat, transpose
from llamado.ggml.tensor import Tensor
from llamado.media.resize import Resize, ResizeFilter
from llamado.models.encoders.encoder import EncoderPass
from llamado.models.encoders.parts.rows import mean_of_groups
from llamado.models.encoders.pictures import VitEncoder
from llamado.models.encoders.texts import PictureTexts
from llamado.models.errors import UnsupportedModel
from llamado.models.weights import Weights


class Gemma3Encoder(VitEncoder):
    """Gemma 3: the means of squares of patches, normed and projected."""

    resize = Resize(ResizeFilter.BILINEAR)
    texts = PictureTexts(begin="<start_of_image>", end="<end_of_image>")

    @property
    def causal(self) -> bool:
        return False

    def _take_projector(self, weights: Weights) -> None:
        self.merge = self.keys.int_("projector.scale_factor", 4)
        self.require_positions(self.require_squares() ** 2)
        n = self.transformer.n_embd
        self._norm = weights.shared.require("mm.soft_emb_norm.weight", n)
        self.n_embd = weights.ne("mm.input_projection.weight")[0]
        self._projection = weights.shared.require("mm.input_projection.weight", self.n_embd, n)
        if self._projection.type.block_size > 1:
            raise UnsupportedModel(
                f"'mm.input_projection.weight' is {self._projection.type.name}; F32, F16 or BF16 is expected"
            )

    def project(self, step: EncoderPass, x: Tensor) -> Tensor:
        x = step.norm(mean_of_groups(x, self.merge**2), self._norm, "soft_emb_norm")
        return mul_mat(cont(transpose(self._projection)), x)
