"""The text models of Qwen3-VL, dense and with experts."""

from __future__ import annotations

from dataclasses import replace

from llamado.models.architectures.qwen.qwen3 import Qwen3Model
from llamado.models.architectures.qwen.qwen3moe import Qwen3MoeModel
from llamado.models.errors import InvalidModel
from llamado.models.hparams import HyperParameters, interleaved_mrope
from llamado.models.keys import Keys


def read_deepstack(keys: Keys, n_layer: int) -> int:
    """Return the number of layers to whose outputs parts of embeddings are added. Raises GgufError or InvalidModel."""
    n = keys.int_("n_deepstack_layers", 0)
    if n >= n_layer:
        raise InvalidModel(
            f"metadata key '{keys.name('n_deepstack_layers')}' is {n}; fewer than the {n_layer} layers are expected"
        )
    return n


class Qwen3VlModel(Qwen3Model):
    """Qwen3 with interleaved M-RoPE, which in text is plain rope, and DeepStack."""

    def _read_hparams(self, keys: Keys, n_vocab: int) -> HyperParameters:
        hp = super()._read_hparams(keys, n_vocab)
        self.n_deepstack = read_deepstack(keys, hp.n_layer)
        self.deepstack = {layer: layer for layer in range(1, self.n_deepstack + 1)}
        return replace(hp, rope=interleaved_mrope(keys, hp.rope))


class Qwen3VlMoeModel(Qwen3VlModel, Qwen3MoeModel):
    """Qwen3 MoE with interleaved M-RoPE and DeepStack."""
