"""State space mixers: Mamba (arXiv 2312.00752) and Mamba-2 (arXiv 2405.21060)."""

from __future__ import annotations

from typing import NamedTuple

from llamado.ggml.graph import (
    add,
    concat,
    cont,
    mul,
    reshape,
    silu,
    ssm_conv,
    ssm_scan,
    swiglu_split,
    transpose,
    view_2d,
    view_3d,
    view_4d,
)
from llamado.ggml.tensor import Tensor
from llamado.models.errors import InvalidModel
from llamado.models.forward import Linear, Pass
from llamado.models.keys import Keys
from llamado.models.memory import RecurrentState
from llamado.models.parts.norms import Norm, RmsNorm
from llamado.models.weights import RoleWeights


class StateSpace(NamedTuple):
    """Sizes of a state space.

    `n_inner` channels with `n_state` state elements each follow a convolution over `n_conv` tokens. `rank`: rank of the
    time steps; in Mamba-2 the number of heads, which are in `n_group` groups with common B and C.
    """

    n_conv: int
    n_inner: int
    n_state: int
    rank: int
    n_group: int

    @classmethod
    def read(cls, keys: Keys, *, grouped: bool = False) -> StateSpace:
        """Read the sizes; `grouped`: Mamba-2. Raises GgufError or InvalidModel, naming the key."""
        found = cls(
            keys.int_("ssm.conv_kernel"),
            keys.int_("ssm.inner_size"),
            keys.int_("ssm.state_size"),
            keys.int_("ssm.time_step_rank"),
            keys.int_("ssm.group_count") if grouped else 1,
        )
        if grouped and (found.n_inner % found.rank or found.rank % found.n_group):
            raise InvalidModel(
                f"metadata keys '{keys.name('ssm.inner_size')}', '{keys.name('ssm.time_step_rank')}' and "
                f"'{keys.name('ssm.group_count')}' are {found.n_inner}, {found.rank} and {found.n_group}; equal heads "
                "in equal groups are expected"
            )
        return found

    @property
    def n_mixed(self) -> int:
        """Number of channels of Mamba-2's convolution, which include B and C."""
        return self.n_inner + 2 * self.n_group * self.n_state

    def layer_memory(self, n_channels: int) -> RecurrentState:
        """Last tokens of the convolution's channels, and the states."""
        return RecurrentState(((self.n_conv - 1) * n_channels, self.n_state * self.n_inner))


class Convolution(NamedTuple):
    """Causal convolution of each channel, followed by SiLU."""

    kernel: Tensor
    bias: Tensor | None

    @classmethod
    def take(cls, w: RoleWeights, n: int, n_channels: int) -> Convolution:
        """Take `ssm_conv1d`, with its bias if present. Raises InvalidModel."""
        return cls(w.require("ssm_conv1d.weight", n, n_channels), w.optional("ssm_conv1d.bias", n_channels))

    def __call__(self, step: Pass, layer: int, x: Tensor) -> Tensor:
        """Convolve x [n_channels, n_tokens, n_seqs] to a contiguous result; state 0 holds the tokens before."""
        mixed = causal_convolution(step, layer, 0, x, self.kernel)
        if self.bias is not None:
            mixed = add(mixed, self.bias)
        return silu(mixed, f"ssm_conv-{layer}")


def causal_convolution(step: Pass, layer: int, number: int, x: Tensor, kernel: Tensor) -> Tensor:
    """Causal convolution of x [n_channels, n_tokens, n_seqs]; state `number` holds the tokens before.

    The state is [n_conv - 1, n_channels] per sequence.
    """
    n_before, n_channels = kernel.ne[0] - 1, kernel.ne[1]
    n_tokens, n_seqs = x.ne[1], x.ne[2]
    step.graph.expand(x)
    before = reshape(step.read_states(layer, number), n_before, n_channels, n_seqs)
    both = concat(before, transpose(x), 0, f"conv_input-{layer}")
    last = view_3d(both, n_before, n_channels, n_seqs, both.nb[1], both.nb[2], n_tokens * both.nb[0])
    step.store_states(layer, number, reshape(cont(last), n_before * n_channels, n_seqs))
    return ssm_conv(both, kernel)


def scan(step: Pass, layer: int, number: int, x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """Selective scan (see `ssm_scan`), continuing from state `number` of a layer: [n_inner, n_tokens, n_seqs]."""
    states = step.states(layer)[number]
    (head_dim, n_head, n_tokens, n_seqs), n_state = x.ne, b.ne[0]
    for tensor in (x, dt, b, c):
        step.graph.expand(tensor)
    rows = reshape(states, n_state, head_dim, n_head, states.ne[1])
    y = step.graph.expand(ssm_scan(rows, x, dt, a, b, c, step.state_rows(layer), name=f"ssm_scan-{layer}"))
    width, size = states.ne[0], 4 * head_dim * n_head
    step.store_states(layer, number, view_2d(y, width, n_seqs, 4 * width, x.nelements * 4))
    return view_3d(y, head_dim * n_head, n_tokens, n_seqs, size, size * n_tokens)


class Mamba(NamedTuple):
    """Mamba mixer: time steps, B and C are projected from the convolution's output.

    `norms`: norms of time steps, B and C, if any.
    """

    sizes: StateSpace
    project: Linear
    conv: Convolution
    select: Linear
    dt: Linear
    a: Tensor
    d: Tensor
    out: Linear
    norms: tuple[Norm, Norm, Norm] | None

    @classmethod
    def take(
        cls, w: RoleWeights, sizes: StateSpace, n_embd: int, *, norms: tuple[Norm, Norm, Norm] | None = None
    ) -> Mamba:
        """Take the `ssm_…` tensors. Raises InvalidModel."""
        n, n_state, rank = sizes.n_inner, sizes.n_state, sizes.rank
        if norms is None and w.has("ssm_dt_norm.weight"):
            names = ("ssm_dt_norm", rank), ("ssm_b_norm", n_state), ("ssm_c_norm", n_state)
            dt, b, c = (RmsNorm.take(w, name, width) for name, width in names)
            norms = dt, b, c
        return cls(
            sizes,
            w.linear("ssm_in", n_embd, 2 * n),
            Convolution.take(w, sizes.n_conv, n),
            w.linear("ssm_x", n, rank + 2 * n_state),
            w.linear("ssm_dt", rank, n),
            w.require("ssm_a", n_state, n),
            w.require("ssm_d", n),
            w.linear("ssm_out", n, n_embd),
            norms,
        )

    def __call__(self, step: Pass, layer: int, x: Tensor) -> Tensor | None:
        n, n_state, rank = self.sizes.n_inner, self.sizes.n_state, self.sizes.rank
        n_seqs, n_tokens = step.n_seqs, x.ne[1] // step.n_seqs
        both = self.project(step, x, f"ssm_in-{layer}")
        both = reshape(both, 2 * n, n_tokens, n_seqs)
        x = self.conv(step, layer, view_3d(both, n, n_tokens, n_seqs, both.nb[1], both.nb[2]))
        made = self.select(step, x, f"ssm_x-{layer}")
        dt = view_3d(made, rank, n_tokens, n_seqs, made.nb[1], made.nb[2])
        b, c = (
            view_4d(made, n_state, 1, n_tokens, n_seqs, 4 * n_state, made.nb[1], made.nb[2], 4 * at)
            for at in (rank, rank + n_state)
        )
        if self.norms is None:
            dt = cont(dt)
        else:
            names = ((dt, "dt"), (b, "b"), (c, "c"))
            dt, b, c = (
                norm(step, y, f"ssm_{name}_norm-{layer}") for norm, (y, name) in zip(self.norms, names, strict=True)
            )
        dt = self.dt(step, dt, f"ssm_dt-{layer}")
        y = scan(step, layer, 1, reshape(x, 1, n, n_tokens, n_seqs), dt, self.a, b, c)
        if step.is_cache_only(layer):
            return None
        z = view_3d(both, n, n_tokens, n_seqs, both.nb[1], both.nb[2], 4 * n)
        y = add(y, mul(x, self.d), f"ssm_y-{layer}")
        y = swiglu_split(cont(z), y, f"ssm_gated-{layer}")
        return self.out(step, reshape(y, n, n_tokens * n_seqs), f"ssm_out-{layer}")


class Mamba2(NamedTuple):
    """Mamba-2 mixer: one matrix projects the gate, the convolution's input, and the time steps of heads."""

    sizes: StateSpace
    project: Linear
    conv: Convolution
    dt_bias: Tensor
    a: Tensor
    d: Tensor
    norm: Tensor | None
    out: Linear

    @classmethod
    def take(cls, w: RoleWeights, sizes: StateSpace, n_embd: int) -> Mamba2:
        """Take the `ssm_…` tensors. Raises InvalidModel."""
        n, n_head, n_group = sizes.n_inner, sizes.rank, sizes.n_group
        return cls(
            sizes,
            w.linear("ssm_in", n_embd, n + sizes.n_mixed + n_head),
            Convolution.take(w, sizes.n_conv, sizes.n_mixed),
            w.require("ssm_dt.bias", n_head),
            w.require("ssm_a", 1, n_head),
            w.require("ssm_d", 1, n_head),
            w.optional("ssm_norm.weight", n // n_group, n_group),
            w.linear("ssm_out", n, n_embd),
        )

    def __call__(self, step: Pass, layer: int, x: Tensor) -> Tensor | None:
        n, n_state, n_head, n_group = self.sizes.n_inner, self.sizes.n_state, self.sizes.rank, self.sizes.n_group
        n_mixed, head_dim, n_seqs = self.sizes.n_mixed, n // n_head, step.n_seqs
        n_tokens = x.ne[1] // n_seqs
        made = self.project(step, x, f"ssm_in-{layer}")
        made = reshape(made, n + n_mixed + n_head, n_tokens, n_seqs)
        mixed = self.conv(step, layer, view_3d(made, n_mixed, n_tokens, n_seqs, made.nb[1], made.nb[2], 4 * n))
        x = view_4d(mixed, head_dim, n_head, n_tokens, n_seqs, 4 * head_dim, mixed.nb[1], mixed.nb[2])
        b, c = (
            view_4d(mixed, n_state, n_group, n_tokens, n_seqs, 4 * n_state, mixed.nb[1], mixed.nb[2], 4 * at)
            for at in (n, n + n_group * n_state)
        )
        dt = cont(view_3d(made, n_head, n_tokens, n_seqs, made.nb[1], made.nb[2], 4 * (n + n_mixed)))
        y = scan(step, layer, 1, x, add(dt, self.dt_bias, f"ssm_dt-{layer}"), self.a, b, c)
        if step.is_cache_only(layer):
            return None
        y = view_4d(y, head_dim, n_head, n_tokens, n_seqs, 4 * head_dim, y.nb[1], y.nb[2])
        z = view_4d(made, head_dim, n_head, n_tokens, n_seqs, 4 * head_dim, made.nb[1], made.nb[2])
        y = add(y, mul(x, self.d), f"ssm_y-{layer}")
        y = swiglu_split(cont(z), y, f"ssm_gated-{layer}")
        if self.norm is not None:  # a norm per group
            y = step.norm(reshape(y, n // n_group, n_group, n_tokens, n_seqs), self.norm, f"ssm_norm-{layer}")
        return self.out(step, reshape(y, n, n_tokens * n_seqs), f"ssm_out-{layer}")
