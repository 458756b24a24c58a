"""The arcee architecture: Arcee's foundation models (AFM)."""

from __future__ import annotations

from llamado.models.decoder import Decoder
from llamado.models.parts.feedforward import SQUARED_RELU


class ArceeModel(Decoder):
    """Llama with ungated squared ReLU networks."""

    feed_forward = SQUARED_RELU
