"""Multi-token prediction (MTP, arXiv 2412.19437): blocks after a model's layers that predict the token after next."""

from __future__ import annotations

from typing import ClassVar, NamedTuple

from llamado.ggml.graph import concat
from llamado.ggml.tensor import Tensor
from llamado.gguf.header import ModelFile
from llamado.models.architectures.cohere.cohere2moe import Cohere2MoeModel
from llamado.models.architectures.deepseek.deepseek2 import Deepseek2Model
from llamado.models.architectures.deepseek.deepseek32 import Deepseek32Model, GlmDsaModel
from llamado.models.architectures.experts.dots1 import Dots1Model
from llamado.models.architectures.experts.mimo2 import MiMo2Model
from llamado.models.architectures.experts.step35 import Step35Model
from llamado.models.architectures.glm.glm4moe import Glm4MoeModel
from llamado.models.architectures.mamba.nemotron_h_moe import NemotronHMoeModel
from llamado.models.architectures.moonshot.bailingmoe3 import BailingMoe3Model
from llamado.models.architectures.qwen.qwen3next import Qwen3NextModel
from llamado.models.architectures.qwen.qwen35 import Qwen35Model
from llamado.models.architectures.qwen.qwen35moe import Qwen35MoeModel
from llamado.models.batch import FEATURES, BatchShape, Output
from llamado.models.decoder import POST_ATTENTION_NORM_BEFORE_FFN, Decoder
from llamado.models.errors import InvalidModel, UnsupportedModel
from llamado.models.forward import Linear, Pass
from llamado.models.heads.head import Head
from llamado.models.hparams import HyperParameters, Rope
from llamado.models.inputs import ForwardGraph
from llamado.models.keys import FILE_ROPE, Keys, RopeOptions
from llamado.models.memory import LayerMemory, Memory
from llamado.models.parts.attention import Mixer
from llamado.models.parts.feedforward import FeedForward
from llamado.models.parts.norms import LayerNorm, Norm
from llamado.models.weights import RoleWeights, Weights

_MOST_HEADS = 8
"""Maximum MTP blocks of a file; 3 in use."""
_NORMS = ("nextn.shared_head_norm", "layer_output_norm")
"""Names of the norm before the output matrix."""


class _Stage(NamedTuple):
    """Weights of an MTP block besides its layer."""

    embedding: Tensor
    enorm: Norm
    hnorm: Norm
    join: Linear
    norm: Norm
    output: Linear

    def read(self, step: Pass) -> Tensor:
        """Return the layer's input: F32 [n_embd, n_tokens]."""
        token = self.enorm(step, step.get_rows(self.embedding, step.tokens(), "mtp_tok_embd"), "mtp_enorm")
        state = self.hnorm(step, step.hidden_states(), "mtp_hnorm")
        return self.join(step, concat(token, state, 0, "mtp_concat"), "mtp_eh_proj")


class NextTokenHead(Head, Decoder):
    """MTP head: a layer of the architecture, fed with the token's embedding and the state that predicted the token.

    Both are normed and joined by one matrix. Embedding, norm and output matrix are the model's if the file has none for
    the block.
    """

    max_heads = 1
    normed: ClassVar[bool] = True
    """True if the head reads hidden states after the model's last norm."""

    def features(self, target: HyperParameters) -> tuple[int, ...]:
        hp = self.hparams
        if (hp.architecture, hp.first_block, hp.n_embd) != (target.architecture, target.n_layer, target.n_embd):
            raise InvalidModel(
                f"the block that drafts is of a {hp.architecture} model of {hp.first_block} layers of width "
                f"{hp.n_embd}; the model is {target.architecture} of {target.n_layer} layers of width {target.n_embd}"
            )
        return (target.n_layer + self.normed,)

    def _take_head(self, weights: Weights) -> None:
        hp = self.hparams
        self.hidden_widths = (hp.n_embd,)
        self._stages = [self._take_stage(weights, i) for i in range(hp.n_layer)]

    def _take_stage(self, weights: Weights, stage: int) -> _Stage:
        hp = self.hparams
        n, w = hp.n_embd, weights.layer(stage, block=hp.first_block + stage)
        norm = next((name for name in _NORMS if w.has(f"{name}.weight")), None)
        if norm is None or not w.has("nextn.shared_head_head.weight"):
            super()._take_head(weights)
        own = w.has("nextn.shared_head_head.weight")
        return _Stage(
            embedding=w.optional("nextn.embed_tokens.weight", n, hp.n_vocab) or self._token_embd,
            enorm=self._take_norm(w, "nextn.enorm", n),
            hnorm=self._take_norm(w, "nextn.hnorm", n),
            join=w.linear("nextn.eh_proj", 2 * n, n),
            norm=self._output_norm if norm is None else self._take_last_norm(w, norm),
            output=w.linear("nextn.shared_head_head", n, hp.n_vocab) if own else self._output,
        )

    def _take_last_norm(self, w: RoleWeights, name: str) -> Norm:
        return self._take_norm(w, name, self.hparams.n_embd)

    @property
    def n_stages(self) -> int:
        """Number of blocks, each of which drafts one more token; a single block drafts any number."""
        return self.hparams.n_layer

    def build(self, shape: BatchShape, memory: Memory) -> ForwardGraph:
        """Build the forward pass: block `shape.stage` predicts; in stage 0 all other blocks also store the batch."""
        n, stage = self.n_stages, shape.stage
        step = Pass(self.hparams, shape, memory, last=stage, cached=() if stage else range(1, n))
        for i in () if stage else range(1, n):
            self._layer(step, i, self._stages[i].read(step))
        x = self._layer(step, stage, self._stages[stage].read(step))
        if x is not None and shape.n_outputs:
            self._output_norm, self._output = self._stages[stage][-2:]
            step.graph.output(Output.LOGITS.value, self._head(step, x))
        return step.graph

    def _hidden(self, step: Pass, x: Tensor) -> Tensor:
        if not self.normed:
            step.graph.output(FEATURES, x)
            return super()._hidden(step, x)
        return step.graph.output(FEATURES, super()._hidden(step, x))


class Glm4MoeHead(NextTokenHead, Glm4MoeModel):
    """MTP head of GLM-4.5 to 4.7."""


class Deepseek2Head(NextTokenHead, Deepseek2Model):
    """MTP head of DeepSeek V3 and GLM-4.7-Flash."""


class Deepseek32Head(NextTokenHead, Deepseek32Model):
    """MTP head of DeepSeek V3.2, with full attention; its indexer is unused."""

    def _take_mixer(self, w: RoleWeights, layer: int) -> Mixer:
        return Deepseek2Model._take_mixer(self, w, layer)

    def layer_memory(self, layer: int) -> LayerMemory:
        """One latent row."""
        return Deepseek2Model.layer_memory(self, layer)


class GlmDsaHead(Deepseek32Head, GlmDsaModel):
    """MTP head of GLM-5, like that of DeepSeek V3.2."""

    def _read_indexed(self, keys: Keys, hp: HyperParameters) -> tuple[bool, ...]:
        return (True,) * hp.n_layer


class Cohere2MoeHead(NextTokenHead, Cohere2MoeModel):
    """MTP head of Cohere's mixtures of experts, with rotated queries and keys."""

    def _layer_rope(self, layer: int) -> Rope:
        return self.hparams.rope


class MiMo2Head(NextTokenHead, MiMo2Model):
    """MTP heads of MiMo-V2, which has several."""

    max_heads = _MOST_HEADS
    normed = False


class Step35Head(NextTokenHead, Step35Model):
    """MTP heads of Step 3.5 Flash, which has several, without limits on activations."""

    max_heads = _MOST_HEADS
    normed = False

    def _read_hparams(self, keys: Keys, n_vocab: int) -> HyperParameters:
        hp = super()._read_hparams(keys, n_vocab)
        self._limits = self._shared_limits = (0.0,) * hp.n_layer
        return hp


class _QwenHead(NextTokenHead, Qwen35Model):
    def _read_hparams(self, keys: Keys, n_vocab: int) -> HyperParameters:
        hp = super()._read_hparams(keys, n_vocab)
        self._recurrent = (False,)
        return hp


class Qwen35Head(_QwenHead):
    """MTP head of Qwen3.5, with gated attention."""


class Qwen35MoeHead(_QwenHead, Qwen35MoeModel):
    """MTP head of the Qwen3.5 mixtures of experts."""


class Qwen3NextHead(_QwenHead, Qwen3NextModel):
    """MTP head of Qwen3-Next."""


class HyV3Head(NextTokenHead, Dots1Model):
    """MTP head of HY 3."""


class BailingMoe3Head(NextTokenHead, BailingMoe3Model):
    """MTP head of Ling 3.0, with gated latent attention."""


class NemotronHMoeHead(NextTokenHead, NemotronHMoeModel):
    """MTP head of Nemotron 3: attention and feed-forward network, followed by a layer norm."""

    has_rope = False
    norms = POST_ATTENTION_NORM_BEFORE_FFN

    def _read_hparams(self, keys: Keys, n_vocab: int) -> HyperParameters:
        return NemotronHMoeModel._read_hparams(self, keys, n_vocab)

    def _take_last_norm(self, w: RoleWeights, name: str) -> Norm:
        return LayerNorm.take(w, name, self.hparams.n_embd, biased=False)

    def _take_feed_forward(self, w: RoleWeights, layer: int) -> FeedForward:
        return NemotronHMoeModel._take_feed_forward(self, w, layer)

    def layer_memory(self, layer: int) -> LayerMemory:
        """Keys and values."""
        return Decoder.layer_memory(self, layer)


HEADS: dict[str, type[NextTokenHead]] = {
    "bailingmoe3": BailingMoe3Head,
    "cohere2moe": Cohere2MoeHead,
    "deepseek2": Deepseek2Head,
    "deepseek32": Deepseek32Head,
    "glm-dsa": GlmDsaHead,
    "glm4moe": Glm4MoeHead,
    "hy_v3": HyV3Head,
    "mimo2": MiMo2Head,
    "nemotron_h_moe": NemotronHMoeHead,
    "qwen35": Qwen35Head,
    "qwen35moe": Qwen35MoeHead,
    "qwen3next": Qwen3NextHead,
    "step35": Step35Head,
}
"""MTP heads by architecture."""


def has_next_token_head(file: ModelFile, target: ModelFile) -> bool:
    """Return True if the last block of `file` is an MTP head for the model in `target`."""
    architecture = file.metadata.str_("general.architecture", "")
    last = file.metadata.int_(f"{architecture}.block_count", 0) - 1
    if f"blk.{last}.nextn.eh_proj.weight" not in file.tensors:
        return False
    own, others = (
        (
            one.metadata.int_(f"{architecture}.block_count", 0)
            - one.metadata.int_(f"{architecture}.nextn_predict_layers", 0),
            one.metadata.int_(f"{architecture}.embedding_length", 0),
        )
        for one in (file, target)
    )
    return own == others


def load_next_token_head(file: ModelFile, rope: RopeOptions = FILE_ROPE) -> NextTokenHead:
    """Load the MTP blocks of a file; raise UnsupportedModel, InvalidModel or GgufError."""
    name = file.metadata.str_("general.architecture")
    head = HEADS.get(name)
    if head is None:
        raise UnsupportedModel(
            f"{file.source}: the MTP blocks of architecture '{name}' are not supported; those of these are: "
            + ", ".join(sorted(HEADS))
        )
    return head(file, rope)
