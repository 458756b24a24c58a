"""The ernie4_5 architecture: the dense models of ERNIE 4.5."""

from __future__ import annotations

from llamado.models.decoder import Decoder


class Ernie45Model(Decoder):
    """Llama with a head size given by the file."""
