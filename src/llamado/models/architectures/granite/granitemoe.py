"""The granitemoe architecture: the mixtures of experts of Granite 3 and 4."""

from __future__ import annotations

from llamado.models.architectures.granite.granite import GraniteModel
from llamado.models.hparams import RouterKind


class GraniteMoeModel(GraniteModel):
    """Granite with a mixture of experts in each layer, in some models with a shared expert."""

    router = RouterKind(normalized=True)
