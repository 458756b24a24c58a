"""The graniteswitch architecture: Granite with LoRA adapters that tokens switch on."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from llamado.ggml.graph import add, cast, clamp, cont, repeat, reshape, scale, unary, view_2d
from llamado.ggml.ops import GluOp, UnaryOp
from llamado.ggml.tensor import Tensor
from llamado.gguf.types import TensorType
from llamado.models.architectures.granite.granite import GraniteModel
from llamado.models.batch import Batch
from llamado.models.decoder import take_factors
from llamado.models.errors import InvalidModel
from llamado.models.forward import Linear, Pass
from llamado.models.hparams import HyperParameters
from llamado.models.inputs import Bytes, Input
from llamado.models.keys import Keys
from llamado.models.memory import KeysValues, LayerMemory
from llamado.models.parts.attention import Attention, AttentionMatrices, FusedProjection
from llamado.models.parts.feedforward import FeedForward, GatedFeedForward
from llamado.models.weights import RoleWeights, Weights

_GAIN = 15.0
_SLOTS = "adapter_slots"


class AdapterSwitches(NamedTuple):
    """Adapter slots by token.

    `slots`: the adapter that a token activates, from 1 on (0: none); `read_as`: the token whose embedding replaces it.
    `gain`: attention logits are +gain for activating tokens and −gain for others.
    """

    slots: NDArray[np.int32]
    read_as: NDArray[np.int32]
    n: int
    rank: int
    gain: float


class TokenLookup(Input):
    """Lookup of each token in a table; the last dimension is that of tokens."""

    def __init__(self, name: str, type: TensorType, table: NDArray[np.int32], *ne: int) -> None:
        super().__init__(name, type, *ne)
        self._table = table

    def fill(self, batch: Batch) -> Bytes:
        if batch.tokens is None:
            raise ValueError("a batch of embeddings for a graph that takes tokens")
        whole = np.zeros(self.ne[-1], np.int32 if self.type is TensorType.I32 else np.float32)
        whole[: batch.n_tokens] = self._table[batch.tokens]
        return whole.view(np.uint8)


class Delta(NamedTuple):
    """LoRA product b · a · x of each token's adapter; adapter 0 adds nothing.

    `output_rows_only`: x has only the output rows, after the last layer's attention.
    """

    a: Tensor
    b: Tensor
    layer: int
    output_rows_only: bool

    @classmethod
    def take(
        cls,
        w: RoleWeights,
        name: str,
        n_in: int,
        n_out: int,
        s: AdapterSwitches,
        layer: int,
        *,
        output_rows_only: bool = False,
    ) -> Delta:
        """Take `name.lora_a` and `name.lora_b`. Raises InvalidModel."""
        w = w.experts(s.n + 1, 1)
        a, b = w.require(f"{name}.lora_a", n_in, s.rank, s.n + 1), w.require(f"{name}.lora_b", s.rank, n_out, s.n + 1)
        return cls(a, b, layer, output_rows_only)

    def __call__(self, step: Pass, x: Tensor, y: Tensor, name: str) -> Tensor:
        """Add the adapters' product to y, a product of x."""
        slots = step.get_shared(_SLOTS)
        if self.output_rows_only:
            (slots,) = step.keep_outputs(self.layer, slots)
        h = step.mul_mat_id(self.a, reshape(x, x.ne[0], 1, x.ne[1]), slots, f"{name}_lora_a")
        more = step.mul_mat_id(self.b, h, slots, f"{name}_lora_b")
        return add(y, reshape(more, *y.ne[:2]), name)


class SwitchedLinear(NamedTuple):
    """A matrix with the product of each token's adapter added."""

    matrix: Linear
    delta: Delta

    def __call__(self, step: Pass, x: Tensor, name: str) -> Tensor:
        return self.delta(step, x, self.matrix(step, x, name), name)


class SwitchedProjection(NamedTuple):
    """A fused query, key and value matrix with separate adapters for each."""

    fused: FusedProjection
    deltas: tuple[Delta, Delta, Delta]

    def __call__(self, step: Pass, layer: int, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        found = zip(self.fused(step, layer, x), self.deltas, "QKV", strict=True)
        q, k, v = (delta(step, x, y, f"{which}cur-{layer}") for y, delta, which in found)
        return q, k, v


class GraniteSwitchModel(GraniteModel):
    """Granite whose matrices all have LoRA adapters (arXiv 2106.09685), selected per token.

    A token uses the adapter activated by the tokens before it; if several were activated, the mean of their numbers,
    rounded. An extra first layer without weights computes that number: its single attention head averages over the
    cached slots.
    """

    takes_embeddings = False

    def _read_hparams(self, keys: Keys, n_vocab: int) -> HyperParameters:
        hp = super()._read_hparams(keys, n_vocab)
        n, found = keys.int_("adapters.count"), []
        for suffix in ("activate", "substitute"):
            name = keys.name(f"adapters.token_ids_{suffix}")
            tokens = keys.metadata.ints(name, n=n)
            if min(tokens) < 0 or max(tokens) >= n_vocab:
                raise InvalidModel(
                    f"metadata key '{name}' is {list(tokens)}; tokens from 0 to {n_vocab - 1} are expected"
                )
            found.append(list(tokens))
        slots, read_as = np.zeros(n_vocab, np.int32), np.arange(n_vocab, dtype=np.int32)
        slots[found[0]], read_as[found[0]] = np.arange(1, n + 1), found[1]
        gain = keys.float_("adapters.router_gain", _GAIN)
        self._switches = AdapterSwitches(slots, read_as, n, keys.int_("adapters.lora_rank"), gain)
        return replace(
            hp,
            n_layer=hp.n_layer + 1,
            n_head=(hp.n_head[0], *hp.n_head),
            n_head_kv=(hp.n_head_kv[0], *hp.n_head_kv),
            n_ff=(hp.n_ff[0], *hp.n_ff),
        )

    def _take_weights(self, weights: Weights) -> None:
        self._freq_factors = take_factors(weights, self.hparams.rope.n_dims // 2)
        found = [self._take_layer(weights.layer(i, block=i - 1), i) for i in range(1, self.hparams.n_layer)]
        self._layers = [found[0], *found]  # layer 0 is never read

    def _take_attention(self, w: RoleWeights, layer: int) -> Attention:
        found, hp = super()._take_attention(w, layer), self.hparams
        heads, fused, out = found.matrices
        if not isinstance(fused, FusedProjection) or not isinstance(out, Linear):
            raise InvalidModel("a fused query, key and value matrix (attn_qkv) is expected")
        sizes = {"attn_q": fused.n_q, "attn_k": fused.n_k, "attn_v": fused.n_v}
        q, k, v = (Delta.take(w, name, hp.n_embd, n, self._switches, layer) for name, n in sizes.items())
        delta = Delta.take(w, "attn_output", heads.n * heads.dim_v, hp.n_embd, self._switches, layer)
        switched = AttentionMatrices(heads, SwitchedProjection(fused, (q, k, v)), SwitchedLinear(out, delta))
        return replace(found, matrices=switched)

    def _take_feed_forward(self, w: RoleWeights, layer: int) -> FeedForward:
        n_embd, n_ff = self.hparams.n_embd, self.hparams.n_ff[layer]

        def take(name: str, n_in: int, n_out: int) -> SwitchedLinear:
            delta = Delta.take(w, name, n_in, n_out, self._switches, layer, output_rows_only=True)
            return SwitchedLinear(w.linear(name, n_in, n_out), delta)

        gate, up = (take(name, n_embd, n_ff) for name in ("ffn_gate", "ffn_up"))
        return GatedFeedForward(gate, up, take("ffn_down", n_ff, n_embd), GluOp.SWIGLU)

    def layer_memory(self, layer: int) -> LayerMemory:
        """Keys and values; in the first layer those of one head."""
        if layer:
            return super().layer_memory(layer)
        n = self.hparams.head_dim_k
        return KeysValues(n, n, head_k=n, head_v=n)

    def control_layer(self, layer: int) -> int:
        return layer - 1

    def _embed(self, step: Pass) -> Tensor:
        tokens = TokenLookup("tokens_read", TensorType.I32, self._switches.read_as, step.shape.n_tokens)
        x, factor = step.get_rows(self._token_embd, step.input(tokens), "embd"), self.hparams.embedding_scale
        return x if factor == 1.0 else scale(x, factor, name="inp_scaled")

    def _layer(self, step: Pass, layer: int, x: Tensor) -> Tensor | None:
        if layer:
            return super()._layer(step, layer, x)
        step.shared(_SLOTS, lambda: self._slots(step))
        return x

    def _slots(self, step: Pass) -> Tensor:
        """Return each token's adapter, I32 [1, n_tokens]: the rounded mean over the activating tokens it sees."""
        n, n_tokens, switches = self.hparams.head_dim_k, step.shape.n_tokens, self._switches
        own = step.input(TokenLookup("adapters", TensorType.F32, switches.slots, 1, 1, n_tokens))
        value = repeat(own, n, 1, n_tokens, 1)
        key = scale(unary(value, UnaryOp.STEP), 2 * switches.gain, -switches.gain)
        found = step.attend(0, scale(value, 0.0, 1.0 / n), key, value, 1.0)
        assert found is not None
        slots = clamp(cont(view_2d(found, 1, n_tokens, found.nb[1])), 0.0, switches.n)
        return cast(scale(slots, 1.0, 0.5), TensorType.I32, _SLOTS)
