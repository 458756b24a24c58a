"""Texts around pictures and their tiles in prompts (mtmd.cpp, init_vision and add_media)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from llamado.media.chunks import MediaChunk, Piece
from llamado.media.preprocessing import PreparedPicture

MakeChunk = Callable[[NDArray[np.float32], str], MediaChunk]
"""Returns the chunk for an image, float32 [h, w, 3], and the name of this part of the picture."""


class PictureTexts(NamedTuple):
    """Texts at the beginning and end of a picture, of its overview, of all tiles, of each tile, and of rows of tiles.

    `tile_begin` may have {row} and {column}, counted from 1. `row_end` follows all rows of tiles but the last.
    """

    begin: tuple[str, ...] = ()
    end: tuple[str, ...] = ()
    overview_begin: tuple[str, ...] = ()
    overview_end: tuple[str, ...] = ()
    tiles_begin: tuple[str, ...] = ()
    tiles_end: tuple[str, ...] = ()
    tile_begin: tuple[str, ...] = ()
    tile_end: tuple[str, ...] = ()
    row_end: tuple[str, ...] = ()
    is_overview_first: bool = False

    def arrange(self, prepared: PreparedPicture, chunk: MakeChunk) -> list[Piece]:
        """Return the pieces of a prompt for a picture."""
        if prepared.overview is None:
            return [*self.begin, *(chunk(image, str(i)) for i, image in enumerate(prepared.images)), *self.end]
        overview: list[Piece] = [*self.overview_begin, chunk(prepared.overview, "overview"), *self.overview_end]
        tiles = list(self._tiles(prepared, chunk))
        parts = [*overview, *tiles] if self.is_overview_first else [*tiles, *overview]
        return [*self.begin, *parts, *self.end]

    def _tiles(self, prepared: PreparedPicture, chunk: MakeChunk) -> Iterator[Piece]:
        if not prepared.images:
            return
        yield from self.tiles_begin
        for i, image in enumerate(prepared.images):
            row, column = divmod(i, prepared.columns)
            if row and not column:
                yield from self.row_end
            for text in self.tile_begin:
                yield text.format(row=row + 1, column=column + 1)
            yield chunk(image, f"{row} {column}")
            yield from self.tile_end
        yield from self.tiles_end
