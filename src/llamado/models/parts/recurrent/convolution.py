"""Convolution along a sequence: each channel of a token is mixed with those of the few tokens before it."""

from __future__ import annotations

from llamado.ggml.graph import concat, cont, reshape, ssm_conv, transpose, view_3d
from llamado.ggml.tensor import Tensor
from llamado.models.forward import Pass


def convolve(step: Pass, layer: int, number: int, x: Tensor, kernel: Tensor, name: str) -> Tensor:
    """Of x [channels, n_tokens] the same [channels, tokens of a sequence, sequences], by a kernel [n, channels].

    State `number` of the layer holds the n - 1 tokens before: [(n - 1) × channels], the tokens of a channel in order.
    """
    n_before, channels = kernel.ne[0] - 1, kernel.ne[1]
    n = x.ne[1] // step.n_seqs
    x = step.graph.expand(x)
    before = reshape(step.read_states(layer, number), n_before, channels, step.n_seqs)
    whole = concat(before, transpose(reshape(x, channels, n, step.n_seqs)), 0, f"{name}_input-{layer}")
    last = view_3d(whole, n_before, channels, step.n_seqs, whole.nb[1], whole.nb[2], n * whole.nb[0])
    step.keep_states(layer, number, cont(last, n_before * channels, step.n_seqs))
    return ssm_conv(whole, kernel, f"{name}-{layer}")
