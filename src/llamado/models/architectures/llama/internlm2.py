"""The internlm2 architecture: InternLM2, InternLM2.5, InternLM3; also xverse."""

from __future__ import annotations

from llamado.models.decoder import Decoder


class InternLm2Model(Decoder):
    """Llama (arXiv 2403.17297)."""
