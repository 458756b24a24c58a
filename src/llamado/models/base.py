"""Base class of all architectures: reading a file, and the frame of a forward pass around the layers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, ClassVar

from llamado.ggml.graph import add, concat, cont, get_rows, scale, tanh, view_2d
from llamado.ggml.role import Role
from llamado.ggml.tensor import Tensor
from llamado.gguf.header import ModelFile
from llamado.models.adapter import Adapter
from llamado.models.batch import FEATURES, BatchShape, Output
from llamado.models.control import ControlVector
from llamado.models.errors import InvalidModel, UnsupportedModel
from llamado.models.forward import Linear, Pass
from llamado.models.hparams import HyperParameters
from llamado.models.inputs import ForwardGraph
from llamado.models.keys import FILE_ROPE, Keys, RopeOptions
from llamado.models.memory import KeysValues, LayerMemory, Memory, MemoryOptions, check_types
from llamado.models.parts.norms import Norm, RmsNorm
from llamado.models.weights import RoleWeights, Weights

if TYPE_CHECKING:
    from llamado.gguf.reader import GGUFFile


class Model(ABC):
    """An architecture bound to one file: its sizes, its weights, and the graph of a forward pass.

    `architecture` is the name in the file, `hparams` are the sizes. `weights` are the file's tensors by GGUF name and
    `roles` their roles by the same name. `adapters` are the LoRA adapters that can be applied to them, `control` is
    added to hidden states.
    """

    architecture: str
    hparams: HyperParameters
    weights: dict[str, Tensor]
    roles: dict[str, tuple[Role, ...]]
    adapters: tuple[Adapter, ...]
    control: ControlVector | None = None
    borrowed_files: Mapping[str, GGUFFile] = MappingProxyType({})
    """Weights that are in another file than the model's, by name."""
    max_heads: ClassVar[int] = 0
    """Draft heads: maximum number of prediction blocks of the file that form this model; 0 for a main model."""
    takes_embeddings: ClassVar[bool] = True
    """True if batches may have embeddings, as of pictures and sounds, instead of tokens."""
    scales_embeddings: ClassVar[bool] = False
    """True if `embedding_scale` applies to embeddings in place of tokens, too."""
    deepstack: Mapping[int, int] = MappingProxyType({})
    """Parts of a row of embeddings that are added to the input of layers: number of the part by layer (DeepStack, arXiv
    2406.04334). Part 0 is the embedding itself."""
    n_deepstack: int = 0
    """Number of parts that a row of embeddings has besides part 0."""
    hidden_widths: tuple[int, ...] = (0,)
    """Accepted widths of the hidden state that comes with each token; 0: none."""

    def __init__(self, file: ModelFile, rope: RopeOptions = FILE_ROPE) -> None:
        """Read the model; `rope` holds the user's overrides of the rotary embedding.

        Raises GgufError, InvalidModel or UnsupportedModel, naming the key or tensor that is wrong.
        """
        weights = Weights(file)
        n_vocab = weights.ne("token_embd.weight")[1]
        tokens = file.metadata.strings("tokenizer.ggml.tokens", None)
        if tokens is not None and len(tokens) != n_vocab:
            raise InvalidModel(
                f"{file.source}: tensor 'token_embd.weight' has {n_vocab} rows, but 'tokenizer.ggml.tokens' names "
                f"{len(tokens)} tokens"
            )
        self.hparams = self._read_hparams(Keys(file.metadata, rope, n_heads=self.max_heads), n_vocab)
        self.architecture = self.hparams.architecture
        self._token_embd = weights.input.require("token_embd.weight", self.hparams.n_embd, n_vocab)
        self._take_head(weights)
        self._take_weights(weights)
        if not self.max_heads:
            weights.check_all_taken(range(self.hparams.n_layer, self.hparams.n_layer + self.hparams.n_nextn))
        self.weights, self.roles = weights.taken, weights.roles
        self.adapters = ()

    @abstractmethod
    def _read_hparams(self, keys: Keys, n_vocab: int) -> HyperParameters: ...

    def _take_norm(self, w: RoleWeights, name: str, n: int) -> Norm:
        """Take a norm of the kind used before the output matrix."""
        return RmsNorm.take(w, name, n)

    def _take_head(self, weights: Weights) -> None:
        """Take the output norm and the output matrix."""
        hp, w = self.hparams, weights.output
        self._output_norm = self._take_norm(w, "output_norm", hp.n_embd)
        if w.has("output.weight"):
            self._output = w.linear("output", hp.n_embd, hp.n_vocab)
        else:  # tied embeddings: the output matrix is the embedding
            matrix = w.share("output.weight", self._token_embd)
            self._output = Linear(matrix, w.optional("output.bias", hp.n_vocab))

    @abstractmethod
    def _take_weights(self, weights: Weights) -> None: ...

    @abstractmethod
    def _layer(self, step: Pass, layer: int, x: Tensor) -> Tensor | None:
        """Return the hidden state after a layer; None if `step.attend` returned None."""

    def _embed(self, step: Pass) -> Tensor:
        factor = self.hparams.embedding_scale
        if step.shape.embeddings:
            x = self._embedding_part(step, 0)
            factor = factor if self.scales_embeddings and not self.n_deepstack else 1.0
        else:
            x = step.get_rows(self._token_embd, step.tokens(), "embd")
        return x if factor == 1.0 else scale(x, factor, name="inp_scaled")

    def _embedding_part(self, step: Pass, number: int) -> Tensor:
        """Return a part of each row of embeddings: F32 [n_embd, n_tokens]."""
        x, n = step.embeddings(self.n_embd_input), self.hparams.n_embd
        return x if x.ne[0] == n else cont(view_2d(x, n, x.ne[1], x.nb[1], number * n * x.nb[0]))

    def _hidden(self, step: Pass, x: Tensor) -> Tensor:
        return self._output_norm(step, x, "result_norm")

    def _head(self, step: Pass, x: Tensor) -> Tensor:
        hp = self.hparams
        logits = self._output(step, self._hidden(step, x), "result_output")
        if hp.logit_scale != 1.0:
            logits = scale(logits, hp.logit_scale, name="result_output")
        if cap := hp.final_logit_softcap:
            logits = scale(tanh(scale(logits, 1.0 / cap)), cap, name="result_output")
        return logits

    def _output_features(self, step: Pass, between: list[Tensor]) -> None:
        """Output the hidden states selected by `BatchShape.features`, concatenated: F32 [n, n_tokens]."""
        wanted = step.shape.features
        if self.hparams.n_layer + 1 in wanted:
            between.append(self._hidden(step, between[-1]))
        first, *others = (between[i] for i in wanted)
        if first.ne[:3] != (self.hparams.n_embd, step.shape.n_tokens, 1):
            raise UnsupportedModel(
                f"{self.architecture} has several streams of hidden states, which draft heads cannot use"
            )
        for other in others:
            first = concat(first, other, 0)
        step.graph.output(FEATURES, first)

    def features_width(self, features: tuple[int, ...]) -> int:
        """Return the width of the features output for these `features`."""
        return len(features) * self.hparams.n_embd

    def _scores(self, step: Pass, x: Tensor) -> Tensor:
        """Return the classifier's scores; without a classifier, the hidden states, as in llama.cpp."""
        return self._hidden(step, x)

    def width(self, output: Output) -> int:
        """Return the width of a row of an output."""
        return self.hparams.n_vocab if output is Output.LOGITS else self.hparams.n_embd

    @property
    def scores_from_mean(self) -> bool:
        """True if scores are computed from the mean of a text's hidden states, not from one token's."""
        return False

    @property
    def generates(self) -> bool:
        """True if the model has logits and can generate text."""
        return True

    @property
    def n_embd_input(self) -> int:
        """Width of a row of embeddings that replaces a token (llama_model_n_embd_inp)."""
        return self.hparams.n_embd * (1 + self.n_deepstack)

    @property
    def multi_positions(self) -> bool:
        """True if batches of embeddings may have positions of four dimensions (M-RoPE)."""
        return self.hparams.rope.sections is not None

    @property
    def n_before(self) -> int:
        """Number of tokens before each token of a batch that the model needs."""
        return 0

    def layer_memory(self, layer: int) -> LayerMemory:
        """Return the kind of memory of a layer."""
        hp = self.hparams
        window = hp.n_swa if hp.is_swa(layer) else 0
        return KeysValues(
            hp.n_embd_k(layer),
            hp.n_embd_v(layer),
            window,
            symmetric=hp.swa_symmetric,
            head_k=hp.head_dim_k,
            head_v=hp.head_dim_v,
        )

    def control_layer(self, layer: int) -> int:
        """Return the number of a layer in control vector files."""
        return layer

    def memory(self, options: MemoryOptions) -> Memory:
        """Create a memory that is not yet placed on devices. Raises UnsupportedModel."""
        hp = self.hparams
        check_types(hp.head_dim_k, (options.type_k,))
        check_types(hp.head_dim_v, (options.type_v,))
        memory = Memory([self.layer_memory(layer) for layer in range(hp.n_layer)], options, causal=hp.causal)
        memory.n_before = self.n_before
        return memory

    def build(self, shape: BatchShape, memory: Memory) -> ForwardGraph:
        """Build the forward pass of a batch; the graph's feeds fill its inputs (see inputs.py).

        Output: "logits" F32 [n_vocab, n_outputs], "hidden" [n_embd, n_outputs] or "scores", by `shape.output`;
        none if n_outputs is 0. FEATURES too, if the shape has any. Raises ValueError if attention covers more cells
        than the memory has, UnsupportedModel for an output that the model does not have.
        """
        if shape.n_kv > memory.n_cells:
            raise ValueError(f"attention over {shape.n_kv} cells of a cache of {memory.n_cells}")
        means = self.scores_from_mean and shape.output is Output.SCORES
        step = Pass(self.hparams, shape, memory, self.adapters, last=-1 if means or shape.features else None)
        graph = step.graph
        x: Tensor | None = graph.expand(self._embed(step))
        between: list[Tensor] = []
        for layer in range(self.hparams.n_layer):
            assert x is not None  # only the last layer may return None
            if shape.embeddings and layer in self.deepstack:
                x = add(x, self._embedding_part(step, self.deepstack[layer]), f"deepstack_in-{layer}")
            between.append(x)
            x = self._layer(step, layer, x)
            if x is not None and self.control is not None:
                x = self.control.apply(self.control_layer(layer), x)
        if shape.features:
            assert x is not None
            self._output_features(step, [*between, x])
            x = get_rows(x, step.out_rows()) if shape.n_outputs else None
        if x is not None and shape.n_outputs:
            outputs = {Output.LOGITS: self._head, Output.HIDDEN: self._hidden, Output.SCORES: self._scores}
            graph.output(shape.output.value, outputs[shape.output](step, x))
        return graph
