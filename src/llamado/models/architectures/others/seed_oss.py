"""The seed_oss architecture: Seed-OSS."""

from __future__ import annotations

from llamado.ggml.ops import RopeMode
from llamado.models.decoder import POST_ATTENTION_NORM_BEFORE_FFN, Decoder


class SeedOssModel(Decoder):
    """Llama with biases of queries, keys and values; `post_attention_norm` is the feed-forward norm."""

    rope_mode = RopeMode.NEOX
    norms = POST_ATTENTION_NORM_BEFORE_FFN
