"""Per-layer embeddings (Gemma 3n): looked up by token, and projected from the token's embedding."""

from __future__ import annotations

from math import sqrt
from typing import NamedTuple

import numpy as np

from llamado.ggml.graph import add, cast, cont, geglu_split, mul_mat, permute, repeat, reshape, scale, view_1d, view_2d
from llamado.ggml.tensor import Tensor
from llamado.gguf.types import TensorType
from llamado.models.forward import Linear, Pass
from llamado.models.parts.norms import RmsNorm
from llamado.models.weights import RoleWeights, Weights


class LayerEmbeddings(NamedTuple):
    """Inputs of all layers: rows of a table, plus a projection of the embeddings."""

    n: int
    """Elements per layer."""
    n_layer: int
    table: Tensor
    project: Tensor
    norm: RmsNorm

    @classmethod
    def take(cls, weights: Weights, n_embd: int, n: int, n_layer: int, n_vocab: int) -> LayerEmbeddings:
        """Take `per_layer_token_embd`, `per_layer_model_proj` and `per_layer_proj_norm`. Raises InvalidModel."""
        w = weights.input
        return cls(
            n,
            n_layer,
            w.require("per_layer_token_embd.weight", n * n_layer, n_vocab),
            w.require("per_layer_model_proj.weight", n_embd, n * n_layer),
            RmsNorm.take(w, "per_layer_proj_norm", n),
        )

    def __call__(self, step: Pass, x: Tensor) -> Tensor:
        """Return the inputs of all layers, F32 [n, n_tokens, n_layer], for embeddings [n_embd, n_tokens]."""
        n_tokens = x.ne[1]
        if step.shape.embeddings:  # no tokens: all rows are that of token 0
            row = cast(view_1d(self.table, self.n * self.n_layer), TensorType.F32)
            rows = repeat(row, self.n * self.n_layer, n_tokens)
        else:
            rows = step.get_rows(self.table, step.tokens(), "inp_per_layer_selected")
        rows = scale(reshape(rows, self.n, self.n_layer, n_tokens), float(np.sqrt(np.float32(self.n))))
        more = scale(mul_mat(self.project, x, name="per_layer_proj"), 1.0 / sqrt(x.ne[0]))
        more = self.norm(step, reshape(more, self.n, self.n_layer, n_tokens), "per_layer_proj")
        return cont(permute(scale(add(more, rows), 1.0 / sqrt(2.0)), 0, 2, 1, 3), name="inp_per_layer")

    def of(self, step: Pass, layer: int, x: Tensor) -> Tensor:
        """Return a layer's input, F32 [n, n_tokens]; the first call passes the embeddings."""
        inputs = step.shared("inp_per_layer", lambda: self(step, x))
        return view_2d(inputs, self.n, inputs.ne[1], inputs.nb[1], layer * inputs.nb[2])


class LayerInput(NamedTuple):
    """Contribution of a layer's own input: norm(proj(gelu(gate x) · input))."""

    gate: Linear
    project: Linear
    norm: RmsNorm

    @classmethod
    def take(cls, w: RoleWeights, n_embd: int, n: int) -> LayerInput:
        """Take `inp_gate`, `proj` and `post_norm`. Raises InvalidModel."""
        return cls(w.linear("inp_gate", n_embd, n), w.linear("proj", n, n_embd), RmsNorm.take(w, "post_norm", n_embd))

    def __call__(self, step: Pass, layer: int, x: Tensor, input: Tensor) -> Tensor:
        h = geglu_split(self.gate(step, x, f"per_layer_gate-{layer}"), input)
        return self.norm(step, self.project(step, h, f"per_layer_proj-{layer}"), f"per_layer_embd_out-{layer}")
