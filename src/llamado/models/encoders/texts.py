"""Texts around pictures and their tiles in prompts (mtmd.cpp, init_vision and add_media)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from llamado.media.chunks import MediaChunk, Piece, TokenText
from llamado.media.preprocessing import PreparedPicture

MakeChunk = Callable[[NDArray[np.float32], str], MediaChunk]
"""Returns the chunk for an image, float32 [h, w, 3], and the name of this part of the picture."""


class PictureTexts(NamedTuple):
    """Text before and behind a picture, and tokens around its overview, all tiles, and each tile.

    `tile_text` stands before a tile, and may have {row} and {column}, counted from 1. `row_end` follows all rows of
    tiles but the last.
    """

    begin: str = ""
    end: str = ""
    overview_begin: tuple[TokenText, ...] = ()
    overview_end: tuple[TokenText, ...] = ()
    tiles_begin: tuple[TokenText, ...] = ()
    tiles_end: tuple[TokenText, ...] = ()
    tile_begin: tuple[TokenText, ...] = ()
    tile_text: str = ""
    tile_end: tuple[TokenText, ...] = ()
    row_end: tuple[TokenText, ...] = ()
    is_overview_first: bool = False

    @property
    def tokens(self) -> list[TokenText]:
        """Return the tokens that the vocabulary must have."""
        return [token for field in self if isinstance(field, tuple) for token in field]

    def arrange(self, prepared: PreparedPicture, chunk: MakeChunk) -> list[Piece]:
        """Return the pieces of a prompt for a picture."""
        return [piece for piece in (self.begin, *self._parts(prepared, chunk), self.end) if piece]

    def _parts(self, prepared: PreparedPicture, chunk: MakeChunk) -> list[Piece]:
        if prepared.overview is None:
            return [chunk(image, str(i)) for i, image in enumerate(prepared.images)]
        overview: list[Piece] = [*self.overview_begin, chunk(prepared.overview, "overview"), *self.overview_end]
        tiles = list(self._tiles(prepared, chunk))
        return [*overview, *tiles] if self.is_overview_first else [*tiles, *overview]

    def _tiles(self, prepared: PreparedPicture, chunk: MakeChunk) -> Iterator[Piece]:
        if not prepared.images:
            return
        yield from self.tiles_begin
        for i, image in enumerate(prepared.images):
            row, column = divmod(i, prepared.columns)
            if row and not column:
                yield from self.row_end
            yield from self.tile_begin
            yield self.tile_text.format(row=row + 1, column=column + 1)
            yield chunk(image, f"{row} {column}")
            yield from self.tile_end
        yield from self.tiles_end
