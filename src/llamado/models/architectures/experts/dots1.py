"""The dots1 architecture: dots.llm1; also bailingmoe2 and hy_v3, which use the same file layout."""

from __future__ import annotations

from llamado.models.architectures.qwen.qwen3 import Qwen3Model
from llamado.models.hparams import Gating, RouterKind


class Dots1Model(Qwen3Model):
    """Qwen3 with a mixture of experts and a shared expert after the dense first layers (arXiv 2506.05767).

    Routing is by sigmoid unless the file sets another function.
    """

    router = RouterKind(Gating.SIGMOID, from_file=True)
