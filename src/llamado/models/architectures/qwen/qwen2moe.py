"""The qwen2moe architecture: the mixtures of experts of Qwen1.5 and Qwen2."""

from __future__ import annotations

from llamado.models.architectures.qwen.qwen2 import Qwen2Model
from llamado.models.hparams import RouterKind


class Qwen2MoeModel(Qwen2Model):
    """Qwen2 with a mixture of experts and a gated shared expert."""

    router = RouterKind(split_width=True)
