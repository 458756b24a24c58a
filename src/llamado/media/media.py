"""Decoded media: a picture or a sound, and the hash of its contents."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import numpy as np
from numpy.typing import NDArray

MARKER = "<__media__>"
"""Placeholder of a picture or sound in the text of a prompt (llama.cpp's mtmd_default_marker)."""


class MediaKind(Enum):
    """Kind of media."""

    IMAGE = "image"
    AUDIO = "audio"


@dataclass(frozen=True, slots=True, eq=False)
class Media:
    """A decoded picture or sound.

    `data` of a picture: uint8 [height, width, 3], RGB. Of a sound: float32 [n_samples], one channel at `rate` samples a
    second, from -1 to 1. `digest` is the SHA-256 of kind, shape and data: equal contents have equal digests, whatever
    file they came in.
    """

    kind: MediaKind
    data: NDArray[Any]
    rate: int = 0
    digest: bytes = field(init=False)

    def __post_init__(self) -> None:
        described = f"{self.kind.value} {self.data.dtype} {self.data.shape} {self.rate}".encode()
        digest = hashlib.sha256(described)
        digest.update(np.ascontiguousarray(self.data).data)
        object.__setattr__(self, "digest", digest.digest())
