"""The plamo architecture: PLaMo 13B."""

from __future__ import annotations

from llamado.ggml.ops import RopeMode
from llamado.models.decoder import ONE_NORM, ParallelDecoder


class PlamoModel(ParallelDecoder):
    """Parallel attention and SwiGLU network after one norm."""

    rope_mode = RopeMode.NEOX
    norms = ONE_NORM
