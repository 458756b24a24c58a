"""The grok architecture: Grok 1 and 2."""

from __future__ import annotations

from dataclasses import replace
from math import sqrt
from typing import NamedTuple

from llamado.ggml.graph import add, scale
from llamado.ggml.ops import RopeMode
from llamado.ggml.tensor import Tensor
from llamado.models.decoder import Decoder, NormNames
from llamado.models.forward import Pass
from llamado.models.hparams import HyperParameters, RouterKind
from llamado.models.keys import Keys, RopeOptions
from llamado.models.parts.feedforward import GEGLU, FeedForward
from llamado.models.weights import RoleWeights


class GrokModel(Decoder):
    """Pre- and post-norms, soft-capped scores, and GEGLU experts; in Grok 2 parallel to a dense network."""

    rope_mode = RopeMode.NEOX
    feed_forward = GEGLU
    router = RouterKind(normalized=True)

    def _read_hparams(self, keys: Keys, n_vocab: int) -> HyperParameters:
        hp = super()._read_hparams(Keys(keys.metadata, _with_file_yarn(keys)), n_vocab)
        return replace(
            hp,
            # Defaults for Grok 1, whose files lack these keys.
            embedding_scale=keys.float_("embedding_scale", 78.38367176906169),
            attention_scale=keys.float_("attention.output_scale", 0.08838834764831845),
            attention_softcap=keys.float_("attn_logit_softcapping", 30.0),
            final_logit_softcap=keys.float_("final_logit_softcapping", 0.0),
            logit_scale=keys.float_("logit_scale", 0.5773502691896257),
        )

    def _norm_names(self, w: RoleWeights, layer: int) -> NormNames:
        last = "layer_output_norm" if w.has("layer_output_norm.weight") else "post_ffw_norm"
        return NormNames(attn_post="attn_output_norm", ffn_post=last)

    def _take_feed_forward(self, w: RoleWeights, layer: int) -> FeedForward:
        mixture, hp = super()._take_feed_forward(w, layer), self.hparams
        if not w.has("ffn_up.weight"):
            return mixture
        return _ParallelNetworks(mixture, self.feed_forward.take(w, hp.n_embd, hp.n_ff[layer]))


def _with_file_yarn(keys: Keys) -> RopeOptions:
    """Return the user's rope overrides, completed by the file's YaRN keys."""
    wanted = keys.rope

    def named(name: str, wish: float, default: float) -> float:
        return keys.float_(f"rope.scaling.yarn_{name}", default) if wish < 0 else wish

    return replace(
        wanted,
        ext_factor=named("ext_factor", wanted.ext_factor, -1.0),
        attn_factor=named("attn_factor", wanted.attn_factor, -1.0),
        beta_fast=named("beta_fast", wanted.beta_fast, 8.0),
        beta_slow=named("beta_slow", wanted.beta_slow, -1.0),
    )


class _ParallelNetworks(NamedTuple):
    """Sum of a mixture of experts and a dense network, divided by sqrt(2)."""

    mixture: FeedForward
    network: FeedForward

    def __call__(self, step: Pass, layer: int, x: Tensor) -> Tensor:
        return scale(add(self.network(step, layer, x), self.mixture(step, layer, x)), sqrt(2) / 2)
