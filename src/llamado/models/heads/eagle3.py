"""EAGLE-3 (arXiv 2503.01840): one layer that drafts from hidden states of three of the target's layers."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from llamado.ggml.graph import add, concat
from llamado.ggml.ops import RopeMode
from llamado.ggml.tensor import Tensor, contiguous_strides
from llamado.gguf.reader import GGUFFile
from llamado.gguf.types import TensorType
from llamado.models.base import Model
from llamado.models.batch import FEATURES, Output
from llamado.models.decoder import take_factors
from llamado.models.errors import InvalidModel
from llamado.models.forward import Linear, Pass
from llamado.models.heads.head import Head
from llamado.models.heads.next_token import HEADS
from llamado.models.hparams import HyperParameters, read_hparams
from llamado.models.keys import FILE_ROPE, Keys, RopeOptions
from llamado.models.parts.attention import Attention, AttentionMatrices, Heads, Projections
from llamado.models.parts.feedforward import Gated
from llamado.models.parts.norms import RmsNorm
from llamado.models.weights import Weights

_LAYERS = 3


class Eagle3Head(Head):
    """A matrix makes one state of the three; attention sees it beside the token's embedding, each normed, and adds to
    it. Logits are of some of the target's tokens where the file has a table of them (`d2t`); the embedding and the head
    are the target's where the file has none.
    """

    first: ClassVar[int] = 1
    is_head = True

    def __init__(self, file: GGUFFile, rope: RopeOptions, target: Model, target_file: GGUFFile) -> None:
        """Raises GgufError, InvalidModel or UnsupportedModel, naming the key or tensor that is wrong."""
        weights, keys = Weights(file), Keys(file.metadata, rope)
        n_vocab = weights.ne("token_embd.weight")[1] if weights.has("token_embd.weight") else target.hparams.n_vocab
        self.hparams = hp = self._read_hparams(keys, n_vocab)
        self.architecture, self.adapters = hp.architecture, ()
        if hp.n_layer != 1:
            raise InvalidModel(f"metadata key '{keys.name('block_count')}' is {hp.n_layer}; one layer is expected")
        self._target_layers = file.metadata.ints(keys.name("target_layers"), n=_LAYERS)
        self._target_width = keys.int_("target_hidden_size")
        self._normed_residual = keys.bool_("norm_before_residual", False)
        fused = _LAYERS * self._target_width
        if fused == hp.n_embd:
            raise InvalidModel(f"metadata key '{keys.name('target_hidden_size')}' is a third of the width")
        self.takes = (fused, hp.n_embd)
        self._n_drafted = hp.n_vocab
        if weights.has("d2t"):
            self.tokens = _table(file, hp.n_vocab)
            self._n_drafted = len(self.tokens)
        self._take_weights(weights)
        normed = keys.bool_("norm_before_fc", False)
        self._fc_norm = RmsNorm.take(weights.input, "enc.output_norm", fused) if normed else None
        self._take_ends(weights, target, target_file)
        self.roles = weights.roles

    def _read_hparams(self, keys: Keys, n_vocab: int) -> HyperParameters:
        return read_hparams(keys, n_vocab=n_vocab, rope_mode=RopeMode.NORMAL)

    def _take_weights(self, weights: Weights) -> None:
        hp, w, n = self.hparams, weights.layer(0), self.hparams.n_embd
        heads = Heads.of(hp, 0)
        self._fc = weights.input.linear("fc", self.takes[0], n)
        self._embd_norm = RmsNorm.take(w, "attn_norm", n)
        self._state_norm = RmsNorm.take(w, "attn_norm_2", n)
        project = Projections(
            w.linear("attn_q", 2 * n, heads.n * heads.dim_k),
            w.linear("attn_k", 2 * n, heads.n_kv * heads.dim_k),
            w.linear("attn_v", 2 * n, heads.n_kv * heads.dim_v),
        )
        self._attention = Attention(
            matrices=AttentionMatrices(heads, project, w.linear("attn_output", heads.n * heads.dim_v, n)),
            scale=hp.attention_scale,
            rope=hp.rope,
            factors=take_factors(weights, hp.rope.n_dims // 2),
        )
        self._ffn_norm = RmsNorm.take(w, "ffn_norm", n)
        self._network = Gated.take(w, n, hp.n_ff[0])
        self._output_norm = self._take_norm(weights.output, "output_norm", n)

    def _take_ends(self, weights: Weights, target: Model, target_file: GGUFFile) -> None:
        """The embedding and the matrix of the logits, the file's or the target's."""
        n, n_vocab = self.hparams.n_embd, self.hparams.n_vocab
        embedding = weights.input.maybe("token_embd.weight", n, n_vocab)
        output = weights.output.maybe("output.weight", n, self._n_drafted)
        self.borrowed = {}
        if embedding is None:
            embedding = self._borrow("token_embd.weight", target_file, n, n_vocab)
        if output is None:
            tied = "output.weight" not in target.weights
            name = "token_embd.weight" if tied else "output.weight"
            output = self._borrow(name, target_file, n, self._n_drafted)
        self._token_embd, self._output = embedding, Linear(output)
        self.weights = {**weights.taken, **{t.name: t for t in (embedding, output)}}

    def _borrow(self, name: str, file: GGUFFile, *ne: int) -> Tensor:
        info = file.tensors[name]
        if info.ne[:2] != ne:
            raise InvalidModel(
                f"the file that drafts has no tensor '{name}', and that of the model has shape {list(info.ne[:2])}; "
                f"expected {list(ne)}"
            )
        self.borrowed = {**self.borrowed, name: file}
        return Tensor(info.type, info.ne, contiguous_strides(info.type, info.ne), name=name)

    def features(self, target: HyperParameters) -> tuple[int, ...]:
        """See Head."""
        layers, n = self._target_layers, target.n_layer
        if self._target_width != target.n_embd or not all(0 <= layer <= n for layer in layers):
            raise InvalidModel(
                f"the file that drafts is for a model of width {self._target_width} of which it wants layers "
                f"{list(layers)}; the model has {n} layers of width {target.n_embd}"
            )
        # What llama.cpp calls the state behind the last layer is that of the model's own head.
        head = HEADS.get(target.architecture)
        last = n + (head is not None and head.normed)
        return tuple(last if layer == n else layer for layer in layers)

    def width(self, output: Output) -> int:
        """Numbers that a row of an output has."""
        return self._n_drafted if output is Output.LOGITS else self.hparams.n_embd

    def _embed(self, step: Pass) -> Tensor:
        state = step.given()
        if step.shape.given != self.takes[0]:
            return state
        if self._fc_norm is not None:
            state = self._fc_norm(step, state, "enc_input_norm")
        return self._fc(step, state, "fc_out")

    def _layer(self, step: Pass, layer: int, x: Tensor) -> Tensor | None:
        token = self._embd_norm(step, step.get_rows(self._token_embd, step.tokens(), "inp_embd"), "embd_norm-0")
        state = self._state_norm(step, x, "g_norm-0")
        attended = self._attention(step, layer, concat(token, state, 0, "concat_embd-0"))
        if attended is None:
            return None
        attended, x = step.keep_outputs(layer, attended, state if self._normed_residual else x)
        x = add(attended, x, "ffn_inp-0")
        return add(self._network(step, layer, self._ffn_norm(step, x, "ffn_norm-0")), x, "eagle3_prenorm")

    def _hidden(self, step: Pass, x: Tensor) -> Tensor:
        step.graph.output(FEATURES, x)
        return super()._hidden(step, x)


def _table(file: GGUFFile, n_vocab: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """The target's tokens that logits are of."""
    info = file.tensors["d2t"]
    if info.type is not TensorType.I64 or info.ne[1] != 1:
        raise InvalidModel(f"{file.source}: tensor 'd2t' is no list of I64")
    data = file.shard_data(info.shard)[info.offset : info.offset + info.nbytes]
    table = np.frombuffer(data.tobytes(), np.int64)
    if table.min() < 0 or table.max() >= n_vocab or len(np.unique(table)) != len(table):
        raise InvalidModel(f"{file.source}: tensor 'd2t' names tokens twice, or beyond the model's {n_vocab}")
    return table


def load_eagle3(file: GGUFFile, rope: RopeOptions = FILE_ROPE, *, target: Model, target_file: GGUFFile) -> Eagle3Head:
    """The head in a file; raises UnsupportedModel, InvalidModel or GgufError."""
    if file.metadata.str_("general.architecture") != "eagle3":
        raise InvalidModel(f"{file.source}: no EAGLE-3 file: its architecture is not 'eagle3'")
    return Eagle3Head(file, rope, target, target_file)
