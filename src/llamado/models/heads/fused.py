"""Draft heads in files of their own, which read several target layers and may use its embedding and output matrix."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from llamado.ggml.tensor import Tensor, contiguous_strides
from llamado.gguf.reader import GGUFFile
from llamado.gguf.types import TensorType
from llamado.models.base import Model
from llamado.models.batch import Output
from llamado.models.errors import InvalidModel
from llamado.models.forward import Linear
from llamado.models.heads.head import Head
from llamado.models.heads.next_token import HEADS
from llamado.models.hparams import HyperParameters
from llamado.models.keys import FILE_ROPE, Keys, RopeOptions
from llamado.models.weights import Weights


class FusedHead(Head):
    """A draft head that fuses the states of several target layers into one.

    Logits may cover only part of the vocabulary, given by a table (`d2t`). The embedding and the output matrix are the
    target's if the file has none.
    """

    first: ClassVar[int] = 1
    name: ClassVar[str]
    """Architecture name in files."""

    def __init__(self, file: GGUFFile, target: Model, target_file: GGUFFile, rope: RopeOptions = FILE_ROPE) -> None:
        """Raises GgufError, InvalidModel or UnsupportedModel, naming the key or tensor that is wrong."""
        if file.metadata.str_("general.architecture") != self.name:
            raise InvalidModel(f"{file.source}: its architecture is not '{self.name}', as that of a head of this kind")
        weights, keys = Weights(file), Keys(file.metadata, rope)
        n_vocab = weights.ne("token_embd.weight")[1] if weights.has("token_embd.weight") else target.hparams.n_vocab
        self.hparams = hp = self._read_hparams(keys, n_vocab)
        self.architecture, self.adapters = hp.architecture, ()
        self._target_layers = file.metadata.ints(keys.name("target_layers"))
        if not self._target_layers:
            raise InvalidModel(f"metadata key '{keys.name('target_layers')}' names no layer")
        self._n_drafted = hp.n_vocab
        if weights.has("d2t"):
            self.tokens = _table(file, hp.n_vocab)
            self._n_drafted = len(self.tokens)
        self._read_own(keys)
        self._take_weights(weights)
        self._take_ends(weights, target, target_file)
        self.roles = weights.roles

    def _read_own(self, keys: Keys) -> None:
        """Read further keys; sets `hidden_widths` and `_target_width`."""
        self._target_width = self.hparams.n_embd
        self.hidden_widths = (len(self._target_layers) * self._target_width, 0)

    def _take_ends(self, weights: Weights, target: Model, target_file: GGUFFile) -> None:
        """Take the embedding and the output matrix, from the file or the target."""
        n, n_vocab = self.hparams.n_embd, self.hparams.n_vocab
        embedding = weights.input.optional("token_embd.weight", n, n_vocab)
        output = weights.output.optional("output.weight", n, self._n_drafted)
        self._output_norm = self._take_norm(weights.output, "output_norm", n)
        self.borrowed_files = {}
        if output is None:
            output = self._tied(embedding)
        if embedding is None:
            embedding = self._borrow("token_embd.weight", target_file, n, n_vocab)
        if output is None:
            name = "output.weight" if "output.weight" in target.weights else "token_embd.weight"
            output = self._borrow(name, target_file, n, self._n_drafted)
        self._token_embd, self._output = embedding, Linear(output)
        self.weights = {**weights.taken, **{t.name: t for t in (embedding, output)}}

    def _tied(self, embedding: Tensor | None) -> Tensor | None:
        """Return the output matrix to use if the file has none; None: the target's."""
        return None

    def _borrow(self, name: str, file: GGUFFile, *ne: int) -> Tensor:
        info = file.tensors[name]
        if info.ne[:2] != ne:
            raise InvalidModel(
                f"the draft head's file has no tensor '{name}', and the model's has shape {list(info.ne[:2])}; "
                f"expected {list(ne)}"
            )
        self.borrowed_files = {**self.borrowed_files, name: file}
        return Tensor(info.type, info.ne, contiguous_strides(info.type, info.ne), name=name)

    def features(self, target: HyperParameters) -> tuple[int, ...]:
        layers, n = self._target_layers, target.n_layer
        if self._target_width != target.n_embd or not all(0 <= layer <= n for layer in layers):
            raise InvalidModel(
                f"the draft head is for a model of width {self._target_width} and reads layers "
                f"{list(layers)}; the model has {n} layers of width {target.n_embd}"
            )
        # llama.cpp's state after the last layer is the one that the model's own MTP head reads.
        head = HEADS.get(target.architecture)
        last = n + (head is not None and head.normed)
        return tuple(last if layer == n else layer for layer in layers)

    def width(self, output: Output) -> int:
        """Return the width of a row of an output."""
        return self._n_drafted if output is Output.LOGITS else self.hparams.n_embd


def _table(file: GGUFFile, n_vocab: int) -> NDArray[np.int64]:
    """Return the target tokens that the logits stand for."""
    info = file.tensors["d2t"]
    if info.type is not TensorType.I64 or info.ne[1] != 1:
        raise InvalidModel(f"{file.source}: tensor 'd2t' is not a list of I64")
    data = file.shard_data(info.shard)[info.offset : info.offset + info.nbytes]
    table = np.frombuffer(data.tobytes(), np.int64)
    if table.min() < 0 or table.max() >= n_vocab or len(np.unique(table)) != len(table):
        raise InvalidModel(f"{file.source}: tensor 'd2t' repeats tokens, or exceeds the model's {n_vocab}")
    return table
