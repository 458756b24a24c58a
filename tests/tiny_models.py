"""Tiny models with random weights, written as real GGUF files: every type, both architectures, any text tokenizes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from bits import normal
from block_types import encode
from gguf import GGMLQuantizationType as Type
from gguf_writer import GGUFWriter
from kept_files import kept
from numpy.typing import NDArray

from llamado.gguf.types import TensorType
from llamado.models import Model

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6

CORPUS = (
    "the quick brown fox jumps over the lazy dog. The capital of France is Paris, and the capital of Italy is Rome. "
    "Once upon a time there was a little model that lived in a test. It knew a few words and could say them again and "
    "again. Hello world! How are you today? I am fine, thank you. One two three four five six seven eight nine ten. "
)

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
GEMMA_CHAT = (
    "{{ bos_token }}{% for message in messages %}{{ '<start_of_turn>' + ('model' if message['role'] == 'assistant' "
    "else message['role']) + '\n' + message['content'] | trim + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)


def encode_weight(
    rng: np.random.Generator, type_name: str, rows: int, ne0: int, std: float
) -> tuple[NDArray[Any], Type]:
    """A random weight [ne0, rows] in the bytes of a type."""
    return encode(rng, TensorType[type_name], rows, ne0, std), Type[type_name]


def byte_characters() -> list[str]:
    """GPT-2's printable character for each byte."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = iter(range(256, 512))
    return [chr(b) if b in plain else chr(next(rest)) for b in range(256)]


def learn_merges(words: list[list[str]], n: int) -> list[tuple[str, str]]:
    """The `n` first merges that byte-pair encoding learns from `words`; fewer when nothing repeats."""
    return [*_learned(tuple(map(tuple, words)), n)]


@cache  # small models have the same few vocabularies
def _learned(given: tuple[tuple[str, ...], ...], n: int) -> tuple[tuple[str, str], ...]:
    words = [*map(list, given)]
    merges: list[tuple[str, str]] = []
    while len(merges) < n:
        most = Counter(pair for word in words for pair in pairwise(word)).most_common(1)
        if not most or most[0][1] < 2:
            break
        ((a, b), _), *_ = most
        merges.append((a, b))
        for word in words:
            i = 0
            while i + 1 < len(word):
                if word[i] == a and word[i + 1] == b:
                    word[i : i + 2] = [a + b]
                i += 1
    return tuple(merges)


def _pad_vocabulary(tokens: list[str], types: list[int], n_vocab: int) -> None:
    if len(tokens) > n_vocab:
        raise ValueError(f"a vocabulary of {n_vocab} is too small; at least {len(tokens)}")
    n_unused = n_vocab - len(tokens)
    tokens += [f"[UNUSED_{i}]" for i in range(n_unused)]
    types += [UNUSED] * n_unused


def add_bpe_vocabulary(writer: gguf.GGUFWriter, n_vocab: int, pre: str = "smollm") -> None:
    """A byte-level BPE vocabulary like SmolLM2's: <|endoftext|>, <|im_start|> (bos), <|im_end|> (eos), bytes from 3.

    Words are those of the pre-tokenizer `pre`.
    """
    chars = byte_characters()
    space = chars[ord(" ")]
    words = [[chars[b] for b in word.encode()] for word in CORPUS.split()]
    words = [[space, *word] if i else word for i, word in enumerate(words)]
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *chars]
    types = [CONTROL] * 3 + [NORMAL] * 256
    merges = learn_merges(words, max(0, n_vocab - len(tokens)))
    tokens += [a + b for a, b in merges]
    types += [NORMAL] * len(merges)
    _pad_vocabulary(tokens, types, n_vocab)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges([f"{a} {b}" for a, b in merges])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHATML)


def add_rwkv_vocabulary(writer: gguf.GGUFWriter, n_vocab: int) -> None:
    """A vocabulary of bytes like that of RWKV's World models: <s> (bos and eos), bytes from 1, then parts of words."""
    texts = [bytes([i]) for i in range(256)]
    found = {f" {word}"[:n].encode() for word in [*CORPUS.split(), "\n\n", "it's", "déjà", "a\\b"] for n in range(2, 9)}
    texts += sorted(found)[: n_vocab - 257]
    tokens = ["<s>", *(repr(text)[2:-1] for text in texts)]
    types = [CONTROL] + [NORMAL] * len(texts)
    _pad_vocabulary(tokens, types, n_vocab)
    writer.add_tokenizer_model("rwkv")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    writer.add_eot_token_id(11)
    writer.add_chat_template("rwkv-world")


def add_spm_vocabulary(writer: gguf.GGUFWriter, n_vocab: int) -> None:
    """A SentencePiece vocabulary like Gemma's: <pad> <eos> <bos> <unk>, turns 4 and 5, bytes from 6, then pieces."""
    tokens = ["<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>"]
    types = [CONTROL, CONTROL, CONTROL, UNKNOWN, CONTROL, CONTROL]
    tokens += [f"<0x{b:02X}>" for b in range(256)]
    types += [BYTE] * 256
    words = [["▁", *word] if i else [*word] for i, word in enumerate(CORPUS.split())]
    letters = sorted({c for word in words for c in word} | set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"))
    merges = learn_merges(words, max(0, n_vocab - len(tokens) - len(letters)))
    pieces = [a + b for a, b in merges]
    # Pieces first, the most frequent with the highest score, then single letters, as SentencePiece sorts them.
    scores = [0.0] * len(tokens) + [-float(i) for i in range(len(pieces) + len(letters))]
    tokens += pieces + letters
    types += [NORMAL] * (len(pieces) + len(letters))
    _pad_vocabulary(tokens, types, n_vocab)
    scores += [0.0] * (n_vocab - len(scores))
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_scores(scores)
    writer.add_token_types(types)
    writer.add_bos_token_id(2)
    writer.add_eos_token_id(1)
    writer.add_unk_token_id(3)
    writer.add_pad_token_id(0)
    writer.add_eot_token_id(5)
    writer.add_add_bos_token(True)
    writer.add_add_eos_token(False)
    writer.add_add_space_prefix(False)
    writer.add_chat_template(GEMMA_CHAT)


class _Writer:
    """A GGUF file with the keys every decoder has, and random weights added by name."""

    def __init__(
        self, path: Path, arch: str, wtype: str, types: Mapping[str, str] | None, seed: int, **sizes: int
    ) -> None:
        self.gguf = GGUFWriter(path, arch)
        self._path, self._wtype, self._types = path, wtype, dict(types or {})
        self._rng = np.random.default_rng(seed)
        self.gguf.add_name(f"tiny {arch}")
        self.gguf.add_context_length(sizes["n_ctx"])
        self.gguf.add_embedding_length(sizes["n_embd"])
        self.gguf.add_block_count(sizes["n_layer"])
        self.gguf.add_feed_forward_length(sizes["n_ff"])
        self.gguf.add_head_count(sizes["n_head"])
        self.gguf.add_head_count_kv(sizes["n_head_kv"])
        self.gguf.add_vocab_size(sizes["n_vocab"])

    def matrix(self, name: str, ne0: int, ne1: int, std: float | None = None) -> None:
        type_name = next((t for part, t in self._types.items() if part in name), self._wtype)
        data, type = encode_weight(self._rng, type_name, ne1, ne0, ne0**-0.5 if std is None else std)
        self.gguf.add_tensor(f"{name}.weight", data, raw_dtype=type)

    def vector(self, name: str, n: int, mean: float = 1.0, std: float = 0.1) -> None:
        self.gguf.add_tensor(name, (mean + std * normal(self._rng, (n,))).astype(np.float32))

    def close(self) -> Path:
        self.gguf.write_header_to_file()
        self.gguf.write_kv_data_to_file()
        self.gguf.write_tensors_to_file()
        self.gguf.close()
        return self._path


@kept
def make_llama(
    path: Path,
    *,
    n_embd: int = 128,
    n_layer: int = 2,
    n_head: int = 4,
    n_head_kv: int = 2,
    n_ff: int = 256,
    n_vocab: int = 320,
    n_ctx: int = 512,
    wtype: str = "Q4_0",
    types: Mapping[str, str] | None = None,
    seed: int = 0,
    tied: bool = False,
    biases: bool = False,
    freq_factors: bool = False,
    rope_scaling: tuple[str, float] | None = None,
    freq_base: float = 10000.0,
    edit: Callable[[gguf.GGUFWriter], None] = lambda writer: None,
) -> Path:
    """A llama model; `types` overrides `wtype` for tensors whose name contains the key (`{"ffn_down": "Q6_K"}`).

    K-quants need `n_embd` and `n_ff` in multiples of 256. `rope_scaling` is a type ("linear", "yarn") and a factor.
    `edit` may change the metadata at last.
    """
    sizes = {"n_ctx": n_ctx, "n_embd": n_embd, "n_layer": n_layer, "n_ff": n_ff, "n_vocab": n_vocab}
    w = _Writer(path, "llama", wtype, types, seed, n_head=n_head, n_head_kv=n_head_kv, **sizes)
    head_dim = n_embd // n_head
    w.gguf.add_layer_norm_rms_eps(1e-5)
    w.gguf.add_rope_dimension_count(head_dim)
    w.gguf.add_rope_freq_base(freq_base)
    if rope_scaling is not None:
        w.gguf.add_rope_scaling_type(gguf.RopeScalingType(rope_scaling[0]))
        w.gguf.add_rope_scaling_factor(rope_scaling[1])
        w.gguf.add_rope_scaling_orig_ctx_len(n_ctx)
    add_bpe_vocabulary(w.gguf, n_vocab)
    w.matrix("token_embd", n_embd, n_vocab, std=3 * n_embd**-0.5 if tied else 1.0)
    w.vector("output_norm.weight", n_embd)
    if not tied:
        w.matrix("output", n_embd, n_vocab, std=3 * n_embd**-0.5)
    if freq_factors:
        w.gguf.add_tensor("rope_freqs.weight", np.linspace(1, 8, head_dim // 2, dtype=np.float32))
    for i in range(n_layer):
        w.vector(f"blk.{i}.attn_norm.weight", n_embd)
        w.vector(f"blk.{i}.ffn_norm.weight", n_embd)
        for name, n_in, n_out in (
            ("attn_q", n_embd, n_embd),
            ("attn_k", n_embd, head_dim * n_head_kv),
            ("attn_v", n_embd, head_dim * n_head_kv),
            ("attn_output", n_embd, n_embd),
            ("ffn_gate", n_embd, n_ff),
            ("ffn_up", n_embd, n_ff),
            ("ffn_down", n_ff, n_embd),
        ):
            w.matrix(f"blk.{i}.{name}", n_in, n_out)
            if biases:
                w.vector(f"blk.{i}.{name}.bias", n_out, mean=0.0)
    edit(w.gguf)
    return w.close()


def hold_experts(model: Model, name: str, experts: int, used: int) -> None:
    """Tells a model that in each layer the matrix of that name is those of several experts."""
    for weight, roles in model.roles.items():
        if weight.endswith(f".{name}.weight"):
            model.roles[weight] = tuple(replace(role, experts=experts, used=used) for role in roles)


@kept
def make_gemma3(
    path: Path,
    *,
    n_embd: int = 128,
    n_layer: int = 2,
    n_head: int = 4,
    n_head_kv: int = 1,
    head_dim: int = 64,
    n_ff: int = 256,
    n_vocab: int = 512,
    n_ctx: int = 512,
    n_swa: int = 32,
    swa_period: int = 2,
    softcap: float = 0.0,
    wtype: str = "Q4_0",
    types: Mapping[str, str] | None = None,
    seed: int = 0,
    tied: bool = True,
) -> Path:
    """A gemma3 model; every `swa_period`-th layer is global, the others see `n_swa` tokens."""
    sizes = {"n_ctx": n_ctx, "n_embd": n_embd, "n_layer": n_layer, "n_ff": n_ff, "n_vocab": n_vocab}
    w = _Writer(path, "gemma3", wtype, types, seed, n_head=n_head, n_head_kv=n_head_kv, **sizes)
    w.gguf.add_layer_norm_rms_eps(1e-6)
    w.gguf.add_key_length(head_dim)
    w.gguf.add_value_length(head_dim)
    w.gguf.add_rope_freq_base(1000000.0)
    w.gguf.add_sliding_window(n_swa)
    w.gguf.add_uint32("gemma3.attention.sliding_window_pattern", swa_period)
    if softcap:
        w.gguf.add_final_logit_softcapping(softcap)
    add_spm_vocabulary(w.gguf, n_vocab)
    # Embeddings weaker than the layers, or a tied head would only ever repeat the token.
    w.matrix("token_embd", n_embd, n_vocab, std=n_embd**-0.5)
    w.vector("output_norm.weight", n_embd, mean=3.0)
    if not tied:
        w.matrix("output", n_embd, n_vocab, std=3 * n_embd**-0.5)
    for i in range(n_layer):
        for name in ("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm"):
            w.vector(f"blk.{i}.{name}.weight", n_embd)
        for name in ("attn_q_norm", "attn_k_norm"):
            w.vector(f"blk.{i}.{name}.weight", head_dim)
        w.matrix(f"blk.{i}.attn_q", n_embd, head_dim * n_head)
        w.matrix(f"blk.{i}.attn_k", n_embd, head_dim * n_head_kv)
        w.matrix(f"blk.{i}.attn_v", n_embd, head_dim * n_head_kv)
        w.matrix(f"blk.{i}.attn_output", head_dim * n_head, n_embd)
        w.matrix(f"blk.{i}.ffn_gate", n_embd, n_ff)
        w.matrix(f"blk.{i}.ffn_up", n_embd, n_ff)
        w.matrix(f"blk.{i}.ffn_down", n_ff, n_embd)
    return w.close()
