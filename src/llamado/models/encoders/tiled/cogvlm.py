"""CogVLM (arXiv 2311.03079): a transformer with norms behind attention and networks, and a gated network."""

from __future__ import annotations

from llamado.ggml.graph import add, concat, gelu, mul, norm, reshape, swiglu_split
from llamado.ggml.tensor import Tensor
from llamado.media.resize import Resize
from llamado.models.encoders.encoder import EncoderPass
from llamado.models.encoders.tiled.internvl import ClassEncoder
from llamado.models.encoders.tiled.llava import MARGIN
from llamado.models.weights import Weights


class CogVlmEncoder(ClassEncoder):
    """Embeddings of the beginning and end of a picture surround those of the patches."""

    resize = Resize(color=MARGIN)

    def _take_projector(self, weights: Weights) -> None:
        super()._take_projector(weights)
        self.merge = 1
        w, names = weights.shared, ("up", "gate", "down")
        n = weights.ne("mm.model.fc.weight")[1]
        n_ff, self.n_embd = weights.ne("mm.up.weight")[1], weights.ne("mm.down.weight")[1]
        self._fc = w.require("mm.model.fc.weight", self.transformer.n_embd, n)
        self._norm, self._norm_bias = (w.require(f"mm.post_fc_norm.{which}", n) for which in ("weight", "bias"))
        widths = (n, n_ff), (n, n_ff), (n_ff, self.n_embd)
        self._up, self._gate, self._down = (
            w.require(f"mm.{name}.weight", *ne) for name, ne in zip(names, widths, strict=True)
        )
        self._begin, self._end = (w.require(f"v.{name}", self.n_embd) for name in ("boi", "eoi"))

    def n_tokens(self, n_patches: int) -> int:
        return n_patches + 2

    def encode_positions(self, step: EncoderPass, x: Tensor) -> Tensor:
        for i, layer in enumerate(self.transformer.layers):
            h = layer.attention(step, x, None, None, str(i))
            x = add(layer.attn_norm(step, h, f"attn_post_norm-{i}"), x)
            h = layer.feed_forward(step, x, str(i))
            x = add(layer.ffn_norm(step, h, f"ffn_post_norm-{i}"), x, f"layer_out-{i}")
        return x

    def project(self, step: EncoderPass, x: Tensor) -> Tensor:
        x = step.mul_mat(self._fc, x, "fc")
        x = gelu(add(mul(norm(x, 1e-5), self._norm), self._norm_bias, "post_fc_norm"))
        x = swiglu_split(step.mul_mat(self._gate, x, "gate"), step.mul_mat(self._up, x, "up"))
        x = step.mul_mat(self._down, x, "down")
        begin, end = (reshape(row, self.n_embd, 1) for row in (self._begin, self._end))
        return concat(concat(begin, x, 1), end, 1)
