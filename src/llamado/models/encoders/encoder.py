"""Base class of media encoders, and the forward pass that they build.

An encoder gets a decoded picture or sound, prepares the input of its graph on the host (`prepare`), and builds the
graph that computes the embeddings (`build`). Patches are laid out on the host, in any order that makes the graph
simple: attention without positions does not depend on the order, and patches that are merged later can be neighbors
from the start.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from copy import copy
from typing import ClassVar, Self

from llamado.ggml.graph import Graph, mul, mul_mat, rms_norm
from llamado.ggml.tensor import Tensor
from llamado.gguf.types import TensorType
from llamado.media.chunks import Piece, TokenText
from llamado.media.media import Media, MediaKind
from llamado.models.encoders.keys import EncoderKeys
from llamado.models.weights import Weights

EMBEDDINGS = "embeddings"
"""Name of the graph output: F32 [n_embd, n_tokens]."""


class EncoderPass:
    """Forward pass of an encoder under construction (see `Step`)."""

    __slots__ = ("_norm_eps", "graph")

    def __init__(self, norm_eps: float) -> None:
        self.graph = Graph()
        self._norm_eps = norm_eps

    @property
    def norm_eps(self) -> float:
        """Epsilon of the norms."""
        return self._norm_eps

    def with_eps(self, norm_eps: float) -> Self:
        """Return a pass that adds to the same graph, with another epsilon of the norms."""
        other = copy(self)
        other._norm_eps = norm_eps
        return other

    def input(self, name: str, *ne: int, type: TensorType = TensorType.F32) -> Tensor:
        """Return the input `name`, creating it on first use."""
        tensor = self.graph.inputs.get(name)
        return self.graph.input(name, type, *ne) if tensor is None else tensor

    def mul_mat(self, weight: Tensor, x: Tensor, name: str) -> Tensor:
        """Return the products of a weight matrix with the rows of x."""
        return mul_mat(weight, x, name=name)

    def norm(self, x: Tensor, weight: Tensor, name: str) -> Tensor:
        """Return the RMS norm of each row, times a weight."""
        return mul(rms_norm(x, self.norm_eps), weight, name)


class MediaEncoder(ABC):
    """An encoder bound to a projector file.

    `n_embd` is the width of its embeddings, `weights` are the file's tensors by name.
    """

    kind: ClassVar[MediaKind] = MediaKind.IMAGE
    n_embd: int
    weights: dict[str, Tensor]

    def __init__(self, keys: EncoderKeys, weights: Weights) -> None:
        """Read the encoder. Raises GgufError, InvalidModel or UnsupportedModel, naming the key or tensor."""
        self.keys = keys
        self.n_embd = keys.projection_dim
        self._take_weights(weights)
        self.weights = weights.taken

    @property
    def rate(self) -> int:
        """Samples a second of the sounds it takes; 0 for pictures."""
        return 0

    @property
    def causal(self) -> bool:
        """False if the text model computes a chunk without a causal mask (mtmd_decode_use_non_causal)."""
        return True

    @property
    def required_tokens(self) -> Sequence[TokenText]:
        """Tokens that the text model's vocabulary must have."""
        return ()

    def digest(self, media: Media, *parts: object) -> bytes:
        """Return the digest of a chunk: of the media, the projector, the user's limits, and the part of the media."""
        described = f"{self.keys.projector} {self.keys.min_tokens} {self.keys.max_tokens} {parts}"
        return hashlib.sha256(media.digest + described.encode()).digest()

    @abstractmethod
    def _take_weights(self, weights: Weights) -> None:
        """Take the weights of the encoder and its projector. Raises InvalidModel."""

    @abstractmethod
    def prepare(self, media: Media) -> list[Piece]:
        """Return the pieces of a prompt for a picture or sound: chunks, and texts around them. Raises MediaError."""

    @abstractmethod
    def build(self, shape: tuple[int, ...]) -> Graph:
        """Return the graph for inputs of `shape`; its output is EMBEDDINGS."""
