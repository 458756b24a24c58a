"""Encoders of pictures that are cut into square patches with learned positions."""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from llamado.ggml.graph import Graph, add, reshape
from llamado.ggml.tensor import Tensor
from llamado.gguf.types import TensorType
from llamado.media.chunks import EncoderInput, MediaChunk, Piece, TokenText
from llamado.media.media import Media, MediaKind
from llamado.media.patches import merged_order, patches
from llamado.media.preprocessing import ImageOptions, PreparedPicture, fixed_size
from llamado.media.resize import PADDED, Resize, Size
from llamado.media.tiling import llava_uhd
from llamado.models.encoders.encoder import EMBEDDINGS, EncoderPass, MediaEncoder
from llamado.models.encoders.parts.interpolation import Interpolation, PositionTable
from llamado.models.encoders.parts.patches import ORDER, PATCHES, PatchEmbedding, add_positions
from llamado.models.encoders.parts.transformer import EncoderTransformer
from llamado.models.encoders.texts import PictureTexts
from llamado.models.errors import InvalidModel
from llamado.models.weights import Weights

Pixels = NDArray[np.float32]
"""Normalized pixels of a picture or tile: float32 [height, width, 3]."""

MOST_TILES = 1024
"""Most tiles of a picture."""


class PictureEncoder(MediaEncoder):
    """An encoder with a patch embedding, a table of learned positions, a transformer and a projector.

    `patch` is the side of a patch in pixels, `merge` the side of the squares of patches that become one token. `resize`
    is the resampling of pictures that become one image.
    """

    patch: int
    merge: int = 1
    resize: ClassVar[Resize] = PADDED

    def _take_weights(self, weights: Weights) -> None:
        self.patch = self.keys.int_("patch_size")
        self.transformer = self._take_transformer(weights)
        n = self.transformer.n_embd
        self.patches = PatchEmbedding.take(weights, self.patch, n)
        self.table = weights.shared.require("v.position_embd.weight", n, weights.ne("v.position_embd.weight")[1])
        self._take_projector(weights)
        self.options = self._image_options()

    def _take_transformer(self, weights: Weights) -> EncoderTransformer:
        """Take the transformer. Raises GgufError or InvalidModel."""
        return EncoderTransformer(self.keys, weights)

    @abstractmethod
    def _take_projector(self, weights: Weights) -> None:
        """Take the projector, and set `n_embd`. Raises GgufError, InvalidModel or UnsupportedModel."""

    def _image_options(self) -> ImageOptions:
        """Return the options of preprocessing. Raises GgufError or InvalidModel."""
        mean, std = self.keys.colors
        return ImageOptions(
            image_size=self.keys.int_("image_size"),
            patch_size=self.patch,
            mean=mean,
            std=std,
            n_merge=self.merge,
            resize=self.resize,
            resolutions=self._resolutions(),
        )

    def _resolutions(self) -> tuple[Size, ...]:
        """Return the sizes that pictures have before they are cut into tiles. Raises GgufError or InvalidModel."""
        sides, tile = self.keys.ints("image_grid_pinpoints"), self.keys.int_("image_size")
        name = self.keys.name("image_grid_pinpoints")
        if len(sides) % 2:
            raise InvalidModel(f"'{name}' has {len(sides)} values; pairs are expected")
        for side in sides:
            if side <= 0 or side % tile:
                raise InvalidModel(f"'{name}' has a side of {side}; multiples of the image size, {tile}, are expected")
        found = tuple(map(Size, sides[::2], sides[1::2]))
        for size in found:
            n_tiles = (size.width // tile) * (size.height // tile)
            if n_tiles > MOST_TILES:
                raise InvalidModel(f"'{name}' has a size with {n_tiles} tiles; at most {MOST_TILES} are supported")
        return found

    def limit_tokens(self, options: ImageOptions, fewest: int = 0, most: int = 0) -> ImageOptions:
        """Return options with the user's limits of tokens, or else the model's. Raises InvalidModel."""
        user_min, user_max = self.keys.min_tokens, self.keys.max_tokens
        return check_limits(options.limit_tokens(fewest, most, user_min=user_min, user_max=user_max))

    def require_positions(self, n: int) -> None:
        """Raise InvalidModel unless the table has `n` positions."""
        if self.table.ne[1] != n:
            raise InvalidModel(f"'{self.table.name}' has {self.table.ne[1]} positions; {n} are expected")

    def require_squares(self) -> int:
        """Return the patches of a side of an image of `image_size`.

        Raises InvalidModel unless they are divisible into squares that become one token.
        """
        size = self.keys.int_("image_size")
        side = size // self.patch
        if not side or side % self.merge:
            raise InvalidModel(
                f"{side} patches a side ('{self.keys.name('image_size')}' is {size}, and "
                f"'{self.keys.name('patch_size')}' {self.patch}) are not divisible into squares of {self.merge}"
            )
        return side


def check_limits(options: ImageOptions) -> ImageOptions:
    """Return the options. Raises InvalidModel if a picture must have more pixels than it may have."""
    if 0 < options.max_pixels < options.min_pixels:
        raise InvalidModel(
            f"pictures must have at least {options.min_pixels} and at most {options.max_pixels} pixels: "
            "raise --image-max-tokens or lower --image-min-tokens"
        )
    return options


class VitEncoder(PictureEncoder):
    """An encoder whose graph depends only on the numbers of patches (clip.cpp, build_vit): a picture, or each of
    its tiles, is a chunk.

    Patches that the projector merges are neighbors in the input. `texts` are those around a picture and its tiles.
    """

    texts = PictureTexts()

    @property
    def required_tokens(self) -> list[TokenText]:
        return self.texts.tokens

    def n_tokens(self, n_patches: int) -> int:
        """Return the number of embeddings for an image of `n_patches`."""
        return n_patches // self.merge**2

    def order(self, nx: int, ny: int) -> NDArray[np.int32]:
        """Return the numbers of the patches, row by row, in the order of the input: int32 [nx · ny]."""
        return merged_order(nx, ny, self.merge)

    def input(self, pixels: Pixels) -> EncoderInput:
        """Return the input for prepared pixels, whose sides are divisible by those of a square of patches."""
        height, width, _ = pixels.shape
        order = self.order(width // self.patch, height // self.patch)
        return EncoderInput((order.size,), {PATCHES: patches(pixels, self.patch)[order], ORDER: order})

    def chunk(self, media: Media, pixels: Pixels, part: str) -> MediaChunk:
        """Return the chunk for the pixels of a part of a picture."""
        given = self.input(pixels)
        n_tokens = self.n_tokens(math.prod(given.shape))
        return MediaChunk(MediaKind.IMAGE, given, n_tokens, self.digest(media, part), causal=self.causal)

    def preprocess(self, media: Media) -> PreparedPicture:
        """Return the images of a picture. Raises MediaError."""
        strategy = llava_uhd if self.options.resolutions else fixed_size
        return strategy(media, self.options)

    def prepare(self, media: Media) -> list[Piece]:
        prepared = self.preprocess(media)
        return self.texts.arrange(prepared, lambda image, part: self.chunk(media, image, part))

    def encode(self, step: EncoderPass, shape: tuple[int, ...]) -> Tensor:
        """Return the transformer's output: F32 [n_embd, n_patches]."""
        return self.transformer(step, add_positions(step, self.patches(step, shape[0]), self.table))

    @abstractmethod
    def project(self, step: EncoderPass, x: Tensor) -> Tensor:
        """Return the embeddings for the transformer's output, F32 [n_embd, n_patches]."""

    def build(self, shape: tuple[int, ...]) -> Graph:
        step = EncoderPass(self.transformer.norm_eps)
        step.graph.output(EMBEDDINGS, self.project(step, self.encode(step, shape)))
        return step.graph


class ResizingEncoder(VitEncoder):
    """An encoder that interpolates its square table of positions for images of other sizes."""

    def _take_weights(self, weights: Weights) -> None:
        super()._take_weights(weights)
        side = round(self.table.ne[1] ** 0.5)
        self.require_positions(side**2)
        self.positions = PositionTable(self.table, side, side, Interpolation.BILINEAR_ANTIALIAS)

    def input(self, pixels: Pixels) -> EncoderInput:
        """The shape is that of the grid of patches, columns and rows."""
        height, width, _ = pixels.shape
        grid = width // self.patch, height // self.patch
        return EncoderInput(grid, {**super().input(pixels).arrays, **self.positions.arrays(*grid)})

    def encode(self, step: EncoderPass, shape: tuple[int, ...]) -> Tensor:
        nx, ny = shape
        order = step.input(ORDER, nx * ny, type=TensorType.I32)
        x = add(self.patches(step, nx * ny), self.positions.rows(step, nx, ny, order), "pos_embed")
        return self.transformer(step, x)


def join(x: Tensor, n: int, name: str = "") -> Tensor:
    """Join each `n` consecutive rows to one: F32 [n · ne0, ne1 / n]."""
    return x if n == 1 else reshape(x, n * x.ne[0], x.ne[1] // n, name=name)
