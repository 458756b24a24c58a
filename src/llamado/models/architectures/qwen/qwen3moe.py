"""The qwen3moe architecture: the mixtures of experts of Qwen3, including Qwen3-Coder-30B-A3B."""

from __future__ import annotations

from llamado.models.architectures.qwen.qwen3 import Qwen3Model
from llamado.models.hparams import RouterKind


class Qwen3MoeModel(Qwen3Model):
    """Qwen3 with a mixture of experts in each layer, with softmax routing and normalized weights."""

    router = RouterKind(normalized=True, split_width=True)
