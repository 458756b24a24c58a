"""The plamo2 architecture: PLaMo 2."""

from __future__ import annotations

from typing import NamedTuple

from llamado.ggml.graph import add, cont, mul, reshape, swiglu_split, view_3d, view_4d
from llamado.ggml.ops import RopeMode
from llamado.ggml.tensor import Tensor
from llamado.models.decoder import PRE_AND_POST_NORMS, Decoder
from llamado.models.forward import Linear, Pass
from llamado.models.hparams import HyperParameters
from llamado.models.keys import Keys
from llamado.models.memory import LayerMemory
from llamado.models.parts.attention import Heads, Mixer
from llamado.models.parts.feedforward import FUSED_SWIGLU
from llamado.models.parts.mamba import Convolution, StateSpace, scan
from llamado.models.parts.norms import Norm, RmsNorm
from llamado.models.weights import RoleWeights


class PlamoMamba(NamedTuple):
    """Mamba mixer with one decay rate per head, as in Mamba-2.

    Time steps, B and C are projected from the convolution's output, as in Mamba, and normed.
    """

    sizes: StateSpace
    n_dt: int
    project: Linear
    conv: Convolution
    select: Linear
    dt: Linear
    norms: tuple[RmsNorm, RmsNorm, RmsNorm]
    a: Tensor
    d: Tensor
    out: Linear

    @classmethod
    def take(cls, w: RoleWeights, sizes: StateSpace, n_embd: int) -> PlamoMamba:
        """Take the `ssm_…` tensors. Raises InvalidModel."""
        n, n_state, n_head, n_dt = sizes.n_inner, sizes.n_state, sizes.rank, max(64, n_embd // 16)
        return cls(
            sizes,
            n_dt,
            w.linear("ssm_in", n_embd, 2 * n),
            Convolution.take(w, sizes.n_conv, n),
            w.linear("ssm_x", n, n_dt + 2 * n_state),
            w.linear("ssm_dt", n_dt, n_head),
            (
                RmsNorm(w.require("ssm_dt_norm", n_dt)),
                RmsNorm(w.require("ssm_b_norm", n_state)),
                RmsNorm(w.require("ssm_c_norm", n_state)),
            ),
            w.require("ssm_a", n_head),
            w.require("ssm_d", n_head),
            w.linear("ssm_out", n, n_embd),
        )

    def __call__(self, step: Pass, layer: int, x: Tensor) -> Tensor | None:
        n, n_state, n_head, n_seqs = self.sizes.n_inner, self.sizes.n_state, self.sizes.rank, step.n_seqs
        head_dim, n_tokens = n // n_head, x.ne[1] // n_seqs
        # For each head, first its gate elements z, then its inputs x.
        both = reshape(self.project(step, x, f"ssm_in-{layer}"), 2 * head_dim, n_head, n_tokens, n_seqs)
        z, x = (
            cont(view_4d(both, head_dim, n_head, n_tokens, n_seqs, *both.nb[1:], offset=at)) for at in (0, 4 * head_dim)
        )
        x = self.conv(step, layer, reshape(x, n, n_tokens, n_seqs))
        made = self.select(step, x, f"ssm_x-{layer}")
        b, c, dt = (
            view_3d(made, width, n_tokens, n_seqs, made.nb[1], made.nb[2], 4 * at)
            for width, at in ((n_state, 0), (n_state, n_state), (self.n_dt, 2 * n_state))
        )
        dt_norm, b_norm, c_norm = self.norms
        b, c = b_norm(step, b, f"ssm_b_norm-{layer}"), c_norm(step, c, f"ssm_c_norm-{layer}")
        b, c = (reshape(y, n_state, 1, n_tokens, n_seqs) for y in (b, c))
        dt = self.dt(step, dt_norm(step, dt, f"ssm_dt_norm-{layer}"), f"ssm_dt-{layer}")
        x = reshape(x, head_dim, n_head, n_tokens, n_seqs)
        y = scan(step, layer, 1, x, dt, reshape(self.a, 1, n_head), b, c)
        if step.is_cache_only(layer):
            return None
        y = view_4d(y, head_dim, n_head, n_tokens, n_seqs, 4 * head_dim, y.nb[1], y.nb[2])
        y = add(y, mul(x, reshape(self.d, 1, n_head)), f"ssm_y-{layer}")
        y = swiglu_split(z, y, f"ssm_gated-{layer}")
        return self.out(step, reshape(y, n, n_tokens * n_seqs), f"ssm_out-{layer}")


class Plamo2Model(Decoder):
    """Mamba in every other layer, with pre- and post-norms of both blocks (arXiv 2509.04897)."""

    rope_mode = RopeMode.NEOX
    norms = PRE_AND_POST_NORMS
    feed_forward = FUSED_SWIGLU
    is_recurrent = True

    def _read_hparams(self, keys: Keys, n_vocab: int) -> HyperParameters:
        self._sizes = StateSpace.read(keys)
        return super()._read_hparams(keys, n_vocab)

    def layer_memory(self, layer: int) -> LayerMemory:
        return (
            super().layer_memory(layer)
            if self.hparams.n_head_kv[layer]
            else self._sizes.layer_memory(self._sizes.n_inner)
        )

    def _take_norm(self, w: RoleWeights, name: str, n: int) -> Norm:
        # The names of post-norms have no `.weight` suffix.
        return RmsNorm(w.require(name, n)) if name.startswith("post_") else super()._take_norm(w, name, n)

    def _take_mixer(self, w: RoleWeights, layer: int) -> Mixer:
        hp = self.hparams
        return self._take_attention(w, layer) if hp.n_head_kv[layer] else PlamoMamba.take(w, self._sizes, hp.n_embd)

    def _take_qk_norms(self, w: RoleWeights, heads: Heads) -> tuple[Norm | None, Norm | None]:
        return (
            RmsNorm(w.require("attn_q_norm.weight", heads.dim_k, heads.n)),
            RmsNorm(w.require("attn_k_norm.weight", heads.dim_k, heads.n_kv)),
        )
