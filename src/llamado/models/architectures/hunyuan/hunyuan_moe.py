"""The hunyuan-moe architecture: Hunyuan-A13B."""

from __future__ import annotations

from dataclasses import replace

from llamado.models.architectures.hunyuan.hunyuan_dense import HunyuanDenseModel
from llamado.models.hparams import HyperParameters, RouterKind
from llamado.models.keys import Keys


class HunyuanMoeModel(HunyuanDenseModel):
    """Hunyuan with a mixture of experts and a shared expert."""

    router = RouterKind(normalized=True)

    def _read_hparams(self, keys: Keys, n_vocab: int) -> HyperParameters:
        hp = super()._read_hparams(keys, n_vocab)
        assert hp.experts is not None
        # Experts have the file's dense feed-forward width.
        return replace(hp, experts=replace(hp.experts, n_ff=hp.n_ff[0]))
