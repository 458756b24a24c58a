"""Architectures of the tests' own, for what no real one here remembers: states beside attention."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from tiny_models import _Writer, add_bpe_vocabulary

from llamado.ggml.graph import add, concat, mul, reshape, sigmoid, swiglu_split
from llamado.ggml.ops import RopeMode
from llamado.ggml.tensor import Tensor
from llamado.models import Model
from llamado.models.forward import Pass
from llamado.models.hparams import HyperParameters, read_hparams
from llamado.models.keys import Keys
from llamado.models.memory import KeysValues, LayerMemory, RecurrentState
from llamado.models.weights import Weights

N_EMBD, N_HEAD, HEAD, N_FF, N_VOCAB = 64, 4, 32, 96, 320
N_STATE = 48


class Layer(NamedTuple):
    norm: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    ffn_norm: Tensor
    gate: Tensor
    up: Tensor
    down: Tensor


class _Tiny(Model):
    """A decoder whose layers mix tokens in ways of their own."""

    widths: tuple[int, int, int, int]
    """Rows of q, k and v, and columns of out."""

    def _read_hparams(self, keys: Keys, n_vocab: int) -> HyperParameters:
        return read_hparams(keys, n_vocab=n_vocab, rope_mode=RopeMode.NEOX)

    def _take_weights(self, weights: Weights) -> None:
        self._layers = []
        for i in range(self.hparams.n_layer):
            w, (q, k, v, out) = weights.layer(i), self.widths
            self._layers.append(
                Layer(
                    w.need("attn_norm.weight", N_EMBD),
                    w.need("attn_q.weight", N_EMBD, q),
                    w.need("attn_k.weight", N_EMBD, k),
                    w.need("attn_v.weight", N_EMBD, v),
                    w.need("attn_output.weight", out, N_EMBD),
                    w.need("ffn_norm.weight", N_EMBD),
                    w.need("ffn_gate.weight", N_EMBD, N_FF),
                    w.need("ffn_up.weight", N_EMBD, N_FF),
                    w.need("ffn_down.weight", N_FF, N_EMBD),
                )
            )

    def _mix(self, step: Pass, layer: int, h: Tensor) -> Tensor | None:
        raise NotImplementedError

    def _layer(self, step: Pass, layer: int, x: Tensor) -> Tensor | None:
        w, i = self._layers[layer], layer
        mixed = self._mix(step, layer, step.norm(x, w.norm, f"attn_norm-{i}"))
        if mixed is None:
            return None
        h, x = step.keep_outputs(i, step.mul_mat(w.out, mixed, f"attn_out-{i}"), x)
        x = add(h, x, f"ffn_inp-{i}")
        h = step.norm(x, w.ffn_norm, f"ffn_norm-{i}")
        h = swiglu_split(step.mul_mat(w.gate, h, f"gate-{i}"), step.mul_mat(w.up, h, f"up-{i}"), f"swiglu-{i}")
        return add(step.mul_mat(w.down, h, f"ffn_out-{i}"), x, f"l_out-{i}")


class HybridModel(_Tiny):
    """Every other layer is a gated linear recurrence, state ← sigmoid(k)·state + v; the others attend."""

    architecture = "tiny-hybrid"
    widths = N_HEAD * HEAD, N_HEAD * HEAD, N_HEAD * HEAD, N_HEAD * HEAD

    def remembers(self, layer: int) -> LayerMemory:
        return KeysValues(N_HEAD * HEAD, N_HEAD * HEAD) if layer % 2 else RecurrentState((N_HEAD * HEAD,))

    def _mix(self, step: Pass, layer: int, h: Tensor) -> Tensor | None:
        w, n = self._layers[layer], step.shape.n_tokens
        q, k, v = (step.mul_mat(m, h, f"{name}-{layer}") for m, name in ((w.q, "q"), (w.k, "k"), (w.v, "v")))
        if layer % 2:
            rope = self.hparams.rope
            q, k, v = (reshape(x, HEAD, N_HEAD, n) for x in (q, k, v))
            q, k = step.rotate(q, rope, None, f"q-{layer}"), step.rotate(k, rope, None, f"k-{layer}")
            return step.attend(layer, q, k, v, HEAD**-0.5)

        def after(states: tuple[Tensor, ...], given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            return (add(mul(states[0], given[0]), given[1]),)

        columns = step.recur(layer, (sigmoid(k), v), after)
        while len(columns) > 1:
            pairs = [concat(*pair, 1) for pair in zip(columns[::2], columns[1::2], strict=False)]
            columns = pairs + columns[len(columns) - len(columns) % 2 :]
        return mul(columns[0], sigmoid(q))


def make_tiny(path: Path, model: type[_Tiny], *, n_layer: int = 4, seed: int = 0, **options: Any) -> Path:
    """A file of such a model."""
    sizes = {"n_ctx": 4096, "n_embd": N_EMBD, "n_layer": n_layer, "n_ff": N_FF, "n_vocab": N_VOCAB}
    w = _Writer(path, model.architecture, "F32", None, seed, n_head=N_HEAD, n_head_kv=N_HEAD, **sizes)
    w.gguf.add_layer_norm_rms_eps(1e-5)
    w.gguf.add_key_length(HEAD)
    w.gguf.add_value_length(HEAD)
    w.gguf.add_rope_freq_base(10000.0)
    add_bpe_vocabulary(w.gguf, N_VOCAB)
    w.matrix("token_embd", N_EMBD, N_VOCAB, std=1.0)
    w.vector("output_norm.weight", N_EMBD)
    w.matrix("output", N_EMBD, N_VOCAB, std=3 * N_EMBD**-0.5)
    q, k, v, out = model.widths
    for i in range(n_layer):
        w.vector(f"blk.{i}.attn_norm.weight", N_EMBD)
        w.vector(f"blk.{i}.ffn_norm.weight", N_EMBD)
        for name, n_in, n_out in (
            ("attn_q", N_EMBD, q), ("attn_k", N_EMBD, k), ("attn_v", N_EMBD, v), ("attn_output", out, N_EMBD),
            ("ffn_gate", N_EMBD, N_FF), ("ffn_up", N_EMBD, N_FF), ("ffn_down", N_FF, N_EMBD),
        ):  # fmt: skip
            w.matrix(f"blk.{i}.{name}", n_in, n_out)
    return w.close()
