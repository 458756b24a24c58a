"""The jina-bert-v3 architecture: jina-embeddings-v3."""

from __future__ import annotations

from llamado.models.encoder import PostNormEncoder


class JinaBertV3Model(PostNormEncoder):
    """BERT with rotary positions (arXiv 2409.10173)."""

    has_rope = True
