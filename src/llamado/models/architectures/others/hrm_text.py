"""The hrm_text architecture: HRM-Text, a hierarchical reasoning model for text (arXiv 2506.21734)."""

from __future__ import annotations

from dataclasses import replace

from llamado.ggml.graph import add
from llamado.ggml.ops import RopeMode, UnaryOp
from llamado.ggml.tensor import Tensor
from llamado.models.decoder import Decoder, take_factors
from llamado.models.errors import InvalidModel
from llamado.models.forward import Pass
from llamado.models.hparams import HyperParameters
from llamado.models.keys import Keys
from llamado.models.parts.norms import Norm, UnitNorm
from llamado.models.weights import RoleWeights, Weights


class HrmTextModel(Decoder):
    """Two stacks of layers, low and high, each with a hidden state of its own.

    In a cycle, the low stack runs several times and the high stack once. Each run reads the sum of both states,
    replaces the stack's own state, and has separate keys and values. Norms have no weights, and the attention output is
    gated. `block_count` is the number of layers run; the file has those of the low stack, then those of the high stack.
    """

    rope_mode = RopeMode.NEOX
    output_gate = UnaryOp.SIGMOID

    def _read_hparams(self, keys: Keys, n_vocab: int) -> HyperParameters:
        hp = super()._read_hparams(keys, n_vocab)
        self._n_stack = keys.int_("hrm.layers_per_stack")
        self._n_low = keys.int_("hrm.l_cycles")
        n_cycles = keys.int_("hrm.h_cycles")
        if self._n_stack * n_cycles * (self._n_low + 1) != hp.n_layer:
            raise InvalidModel(
                f"metadata key '{keys.name('block_count')}' is {hp.n_layer}; {n_cycles} cycles of {self._n_low} + 1 "
                f"stacks of {self._n_stack} layers are expected"
            )
        return replace(hp, embedding_scale=keys.float_("embedding_scale", 0.0) or 1.0)

    def _take_norm(self, w: RoleWeights, name: str, n: int) -> Norm:
        return UnitNorm()

    def _take_weights(self, weights: Weights) -> None:
        hp = self.hparams
        self._freq_factors = take_factors(weights, hp.rope.n_dims // 2)
        self._first_low = weights.shared.require("hrm.z_l_init", hp.n_embd)
        self._layers = [self._take_layer(weights.layer(i, block=self._block(i)), i) for i in range(hp.n_layer)]

    def _block(self, layer: int) -> int:
        """Return the file's block of a layer."""
        turn, place = divmod(layer, self._n_stack)
        return place + (self._n_stack if self._is_high(turn) else 0)

    def _is_high(self, turn: int) -> bool:
        """Return True if the high stack runs at this turn."""
        return turn % (self._n_low + 1) == self._n_low

    def _layer(self, step: Pass, layer: int, x: Tensor) -> Tensor | None:
        if layer % self._n_stack == 0:
            x = self._states(step, layer // self._n_stack, x)
        return super()._layer(step, layer, x)

    def _states(self, step: Pass, turn: int, x: Tensor) -> Tensor:
        """Return the sum of both states, the input of this turn's stack; `x` is the output of the last turn."""

        def last(high: bool) -> int:
            """Return a stack's last turn before this one; -1 if there is none."""
            return max((i for i in range(turn) if self._is_high(i) == high), default=-1)

        def state() -> Tensor:
            return UnitNorm()(step, x, f"stack_norm-{turn}") if turn else x

        high = step.shared(f"z_high-{last(True)}", state)
        low = self._first_low if last(False) < 0 else step.shared(f"z_low-{last(False)}", state)
        return add(high, low, f"stack_in-{turn}")
