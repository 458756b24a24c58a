"""Type mixtures: the type of each tensor of a quantized file.

Some tensors stay unquantized, some get more bits, and some have rows that do not fit the blocks. The rules are
llama-quantize's (src/llama-quant.cpp at b11434), which were found by measuring models. They depend on a tensor's name,
its layer, and the model's number of heads and experts.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

from llamado.gguf.metadata import Metadata
from llamado.gguf.types import TensorType as T
from llamado.quantize.errors import QuantizeError
from llamado.quantize.file_types import FileType


class TensorRole(Enum):
    """Role of a tensor that affects its type."""

    EMBEDDING = auto()
    OUTPUT = auto()
    Q = auto()
    K = auto()
    V = auto()
    QKV = auto()
    KV_B = auto()
    ATTENTION_OUTPUT = auto()
    UP = auto()
    GATE = auto()
    DOWN = auto()
    OTHER = auto()


EMBEDDINGS = ("token_embd.weight", "per_layer_token_embd.weight")
OUTPUT = "output.weight"
_PARTS = (
    ("attn_qkv.weight", TensorRole.QKV),
    ("attn_kv_b.weight", TensorRole.KV_B),
    ("attn_v.weight", TensorRole.V),
    ("attn_k.weight", TensorRole.K),
    ("attn_q.weight", TensorRole.Q),
    ("attn_output.weight", TensorRole.ATTENTION_OUTPUT),
    ("ffn_up", TensorRole.UP),
    ("ffn_gate", TensorRole.GATE),
    ("ffn_down", TensorRole.DOWN),
)
_LIKE_V = (TensorRole.V, TensorRole.QKV, TensorRole.KV_B)

_TIME_MIX = ("first", "w0", "w1", "w2", "v0", "v1", "v2", "a0", "a1", "a2", "g1", "g2", "decay_w1", "decay_w2")
# Tensors that are not quantized: small ones, and those whose errors cost much.
_UNQUANTIZED = (
    *("_norm.weight", "ffn_gate_inp.weight", "ffn_gate_tid2eid.weight", "altup", "laurel", "per_layer_model_proj"),
    *("ssm_conv1d", "shortconv.conv.weight", "indexer.k_proj.weight", "indexer.q_proj.weight"),
    *(f"time_mix_{part}.weight" for part in _TIME_MIX),
    *("time_mix_lerp_fused.weight", "attn_rel_b.weight", ".position_embd", "sam.pos_embd", "sam.neck.", "sam.net_"),
    *(".rel_pos", ".patch_embd", ".patch_merger", "a.rvq.codebook", "mm.a.code_embd"),
)
_UNQUANTIZED_NAMES = ("position_embd.weight", "token_types.weight")
_UNQUANTIZED_BY_ARCHITECTURE = {
    "glm5-next": (
        *("hc_", "indexer.attn_q_b", "indexer.attn_k", "indexer.proj", "indexer_compressor_gate"),
        *("indexer_compressor_ape", "ssm_f_a.weight", "ssm_f_b.weight", "ssm_g_a.weight", "ssm_g_b.weight"),
        *("ssm_beta.weight", "attn_kv_a_mqa.weight", "attn_k_b.weight", "attn_v_b.weight"),
    )
}

_SMALLER_BLOCKS = {
    **dict.fromkeys((T.IQ1_S, T.IQ1_M, T.IQ2_XXS, T.IQ2_XS, T.IQ2_S, T.IQ3_XXS, T.IQ3_S, T.IQ4_XS), T.IQ4_NL),
    **dict.fromkeys((T.Q2_0, T.Q2_K, T.Q3_K, T.TQ1_0, T.TQ2_0), T.Q4_0),
    T.Q4_K: T.Q5_0,
    T.Q5_K: T.Q5_1,
    T.Q6_K: T.Q8_0,
}
_LOW = ("IQ2_XXS", "IQ2_XS", "IQ1_S", "IQ2_S", "IQ2_M", "IQ1_M")
_LAYERS_OF_70B = {"llama": 80, "qwen2": 80, "deci": 80, "olmo": 80, "jais2": 68}


def role_of(name: str) -> TensorRole:
    """Return the role of the tensor `name`."""
    if name == OUTPUT:
        return TensorRole.OUTPUT
    if name in EMBEDDINGS:
        return TensorRole.EMBEDDING
    return next((role for part, role in _PARTS if part in name), TensorRole.OTHER)


@dataclass(frozen=True)
class ModelShape:
    """Properties of a model that the rules depend on."""

    architecture: str
    n_layers: int
    n_heads: int
    n_heads_kv: int
    n_experts: int

    @classmethod
    def of(cls, metadata: Metadata) -> ModelShape:
        """Read them from a model's metadata. Raises GgufError."""
        architecture = metadata.str_("general.architecture")

        def first(key: str, default: int) -> int:
            value = metadata.get(f"{architecture}.{key}", default)
            return int(value[0] if hasattr(value, "__getitem__") else value)  # type: ignore[arg-type]

        heads = first("attention.head_count", 0)
        return cls(
            architecture,
            first("block_count", 0),
            heads,
            first("attention.head_count_kv", heads),
            first("expert_count", 0),
        )

    @property
    def heads_per_kv(self) -> int:
        return self.n_heads // self.n_heads_kv if self.n_heads_kv else 0

    @property
    def is_70b(self) -> bool:
        """Return True for models of 70 billion weights with eight query heads per KV head."""
        grouped = self.architecture != "llama" or self.n_heads != self.n_heads_kv
        return _LAYERS_OF_70B.get(self.architecture) == self.n_layers and grouped


@dataclass(frozen=True)
class TypeOptions:
    """The user's type options beyond the file type.

    `types`: pairs of a name pattern (searched) and a type for matching tensors; the first match wins.
    """

    pure: bool = False
    keep_output: bool = False
    output: T | None = None
    embedding: T | None = None
    types: Sequence[tuple[str, T]] = ()


@dataclass
class TypeMixture:
    """Assigns types to tensors in file order.

    `fallbacks` collects the tensors whose rows do not fit the blocks of their type.
    """

    kind: FileType
    shape: ModelShape
    type_options: TypeOptions
    names: Sequence[str]
    has_imatrix: bool
    fallbacks: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._n_v = sum(role_of(name) in _LIKE_V for name in self.names)
        self._tied = OUTPUT not in self.names
        self._seen = dict.fromkeys(("v", "down", "gate", "up"), 0)
        self._patterns = [(re.compile(pattern), type_) for pattern, type_ in self.type_options.types]

    def is_quantized(self, name: str, n_dims: int) -> bool:
        """Return True if the tensor's type changes."""
        return (
            n_dims >= 2
            and name.endswith("weight")
            and not any(part in name for part in _UNQUANTIZED)
            and name not in _UNQUANTIZED_NAMES
            and not (self.type_options.keep_output and name == OUTPUT)
            and not any(part in name for part in _UNQUANTIZED_BY_ARCHITECTURE.get(self.shape.architecture, ()))
        )

    def type_of(self, name: str, ne: Sequence[int]) -> T:
        """Return the type of a tensor for which `is_quantized` is True. Raises QuantizeError."""
        role, default = role_of(name), self.kind.default
        named = next((type_ for pattern, type_ in self._patterns if pattern.search(name)), None)
        if (
            self.type_options.embedding is not None
            and role is TensorRole.EMBEDDING
            and (name == EMBEDDINGS[0] or named is None)
        ):
            return self.type_options.embedding
        if self.type_options.output is not None and role is TensorRole.OUTPUT:
            return self.type_options.output
        if default in (T.F32, T.F16, T.BF16):
            return default
        if named is not None:
            chosen = named
        elif self.type_options.pure:
            chosen = default
        else:
            chosen = self._select_type(name, ne, role)
        return self._fit_blocks(name, ne[0], chosen)

    def _fit_blocks(self, name: str, n: int, wanted: T) -> T:
        """Return `wanted`, or a type whose blocks fit rows of `n`."""
        if n % wanted.block_size == 0:
            return wanted
        self.fallbacks.append(name)
        smaller = _SMALLER_BLOCKS.get(wanted)
        if smaller is None:
            if wanted.block_size > 32:
                raise QuantizeError(f"{name}: rows of {n} do not fit {wanted.name}, which has no replacement")
            smaller = wanted
        return smaller if n % smaller.block_size == 0 else T.F16

    def _layer(self, name: str, seen: int) -> int:
        if self.shape.n_experts <= 1:
            return seen
        match = re.match(r"blk\.(\d+)\.", name)
        layer = int(match[1]) if match else -1
        if not 0 <= layer < self.shape.n_layers:
            raise QuantizeError(f"{name}: the name gives none of the {self.shape.n_layers} layers")
        return layer

    def _count(self, what: str) -> int:
        self._seen[what] += 1
        return self._seen[what] - 1

    def _select_type(self, name: str, ne: Sequence[int], role: TensorRole) -> T:
        kind, shape = self.kind.name, self.shape
        kind = {"Q3_K": "Q3_K_M", "Q4_K": "Q4_K_M", "Q5_K": "Q5_K_M"}.get(kind, kind)
        default = self.kind.default
        if shape.architecture == "glm5-next" and any(p in name for p in ("attn_q_a", "attn_q_b", "nextn.eh_proj")):
            return T.Q8_0
        if role is TensorRole.OUTPUT or (self._tied and role is TensorRole.EMBEDDING):
            if self.type_options.output is not None:
                return self.type_options.output
            if kind == "MXFP4_MOE" or shape.architecture == "falcon" or ne[0] % default.block_size:
                return T.Q8_0
            if kind in (*_LOW, "IQ3_XXS"):
                return T.Q5_K
            return default if default is T.Q8_0 else T.Q6_K
        if kind == "MXFP4_MOE":
            many = len(ne) > 2 and ne[2] > 1
            expert = shape.architecture != "bailingmoe3" or role in (TensorRole.UP, TensorRole.GATE, TensorRole.DOWN)
            return T.MXFP4 if many and expert else T.Q8_0
        if role is TensorRole.EMBEDDING:
            if kind in ("IQ2_XXS", "IQ2_XS", "IQ1_S", "IQ1_M"):
                return T.Q2_K
            if kind in ("IQ2_S", "IQ2_M", "IQ3_XXS"):
                return T.IQ3_S
            return T.Q4_K if kind in ("TQ1_0", "TQ2_0", "Q2_0") else default
        if kind in _LOW:
            return self._of_low(kind, role)
        if role in _LIKE_V:
            return self._of_v(kind)
        if role in (TensorRole.K, TensorRole.Q):
            if shape.n_experts == 8 and role is TensorRole.K:
                return T.Q8_0
            return {"IQ3_XS": T.IQ3_XXS, "IQ3_XXS": T.IQ2_S}.get(kind, default)
        if role is TensorRole.DOWN:
            return self._of_down(kind, self._layer(name, self._count("down")))
        if role is TensorRole.ATTENTION_OUTPUT:
            return self._of_attention_output(kind)
        if role in (TensorRole.GATE, TensorRole.UP):
            layer, n = self._layer(name, self._count("gate" if role is TensorRole.GATE else "up")), shape.n_layers
            return T.IQ3_XXS if kind == "IQ3_XS" and n // 8 <= layer < 7 * n // 8 else default
        return default

    def _of_low(self, kind: str, role: TensorRole) -> T:
        """Return the type in files of one or two bits."""
        more = T.IQ3_S if kind in ("IQ2_S", "IQ2_M") else T.Q2_K
        experts = self.shape.n_experts
        if role in _LIKE_V:
            return T.Q4_K if self.shape.heads_per_kv >= 4 or experts >= 4 else more
        if role is TensorRole.K and experts == 8:
            return T.Q4_K
        if role is TensorRole.DOWN:
            return more if self._count("down") < self.shape.n_layers // 8 else self.kind.default
        if role is TensorRole.ATTENTION_OUTPUT:
            if experts == 8:
                return T.Q5_K
            return {"IQ1_S": T.IQ2_XXS, "IQ1_M": T.IQ2_XXS, "IQ2_S": T.IQ3_S, "IQ2_M": T.IQ3_S}.get(
                kind, self.kind.default
            )
        return self.kind.default

    def _of_v(self, kind: str) -> T:
        shape, i = self.shape, self._count("v")
        grouped = shape.heads_per_kv >= 4
        chosen = self.kind.default
        if kind == "Q2_K":
            chosen = T.Q4_K if grouped else T.Q3_K
        elif kind == "IQ3_XXS":
            chosen = T.Q4_K if grouped else T.IQ3_XXS if self.has_imatrix else T.IQ3_S
        elif kind == "IQ3_M" or (kind in ("Q2_K_S", "IQ3_XS", "IQ3_S") and grouped):
            chosen = T.Q4_K
        elif kind == "Q3_K_M":
            chosen = T.Q5_K if i < 2 else T.Q4_K
        elif kind == "Q3_K_L" or (kind in ("IQ4_NL", "IQ4_XS") and grouped) or (kind == "Q4_K_S" and i < 4):
            chosen = T.Q5_K
        elif kind in ("Q4_K_M", "Q5_K_M") and _more_bits(i, self._n_v):
            chosen = T.Q6_K
        if shape.is_70b and chosen in (T.Q3_K, T.Q4_K):
            chosen = T.Q5_K
        return T.Q8_0 if shape.n_experts == 8 else chosen

    def _of_down(self, kind: str, i: int) -> T:
        n, falcon = self.shape.n_layers, self.shape.architecture == "falcon"
        first, more, default = i < n // 8, _more_bits(i, n), self.kind.default
        match kind:
            case "Q2_K":
                return T.Q3_K
            case "Q2_K_S":
                return T.Q4_K if first else default
            case "IQ3_XXS" if not self.has_imatrix:
                return T.Q4_K if first else T.Q3_K
            case "Q3_K_M":
                return T.Q5_K if i < n // 16 else T.Q4_K if not falcon or more else T.Q3_K
            case "IQ3_M":
                return T.Q4_K if first or (self.shape.n_experts == 8 and more) else default
            case "Q3_K_L":
                return T.Q4_K if falcon else T.Q5_K
            case "Q4_K_M" if falcon:
                return T.Q6_K if i < n // 16 else T.Q5_K if more else T.Q4_K
            case "Q4_K_M" | "Q5_K_M":
                return T.Q6_K if more else default
            case "IQ4_NL" | "IQ4_XS":
                return T.Q5_K if first and not self.has_imatrix else default
            case "Q4_K_S":
                return T.Q5_K if first and not falcon else default
            case "Q4_0":
                return T.Q4_1 if self.has_imatrix and first else default
            case "Q5_0":
                return T.Q5_1 if self.has_imatrix and first else default
        return default

    def _of_attention_output(self, kind: str) -> T:
        if self.shape.architecture == "falcon":
            return T.Q4_K if kind == "Q3_K_L" else self.kind.default
        if self.shape.n_experts == 8:
            more = set("Q2_K IQ3_XS IQ3_XXS Q3_K_S Q3_K_M IQ4_NL Q4_K_S Q4_K_M IQ3_S IQ3_M IQ4_XS".split())  # noqa: SIM905
            return T.Q5_K if kind in more else self.kind.default
        chosen = {"Q2_K": T.Q3_K, "IQ3_XXS": T.IQ3_S, "Q3_K_M": T.Q4_K, "Q3_K_L": T.Q5_K, "IQ3_M": T.Q4_K}
        return chosen.get(kind, self.kind.default)


def needs_imatrix(name: str, type_: T, kind: FileType) -> bool:
    """Return True if the tensor is useless in this type without an importance matrix."""
    if name in EMBEDDINGS or name == OUTPUT:
        return False
    few = (T.IQ3_XXS, T.IQ2_XXS, T.IQ2_XS, T.IQ2_S, T.IQ1_M, T.IQ1_S)
    return type_ in few or (type_ is T.Q2_K and kind.name == "Q2_K_S")


def _more_bits(i: int, n: int) -> bool:
    """Return True for the first and last eighth of the layers, and every third layer in between."""
    return i < n // 8 or i >= 7 * n // 8 or (i - n // 8) % 3 == 2
