"""The qwen35moe architecture: the mixtures of experts of Qwen3.5."""

from __future__ import annotations

from llamado.models.architectures.qwen.qwen35 import Qwen35Model
from llamado.models.hparams import RouterKind


class Qwen35MoeModel(Qwen35Model):
    """Qwen3.5 with a mixture of experts and a gated shared expert in each layer."""

    router = RouterKind(normalized=True, split_width=True)
