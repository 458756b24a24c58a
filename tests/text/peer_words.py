"""Word splits of llama.cpp, and the other properties that it ties to the names of pre-tokenizers.

Run as a program, it writes them to `pretokenizer_words.json` and `pretokenizer_flags.json`.

llama.cpp shows tokens, not words. So it gets a vocabulary in which every stretch of the texts is a token and every two
neighboring stretches merge: each word becomes one token, whatever it is.

usage: peer_words.py FOLDER_OF_THE_PROGRAMS
"""

from __future__ import annotations

import ctypes
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from llamado.text.tokenizer.pretokenizers import PRE_TOKENIZERS

FILE = Path(__file__).with_name("pretokenizer_words.json")
FLAGS_FILE = Path(__file__).with_name("pretokenizer_flags.json")
BORDER = "¦"
RUN = " " * 1024 + "x"
"""Only for jais-2, which cuts it into 1, 2, 4, 8 … spaces: those are tokens, and not all that lies between them."""

Words = dict[str, dict[str, str]]
"""By text, then by the text with its borders shown: the names of the pre-tokenizers that cut so."""
Flags = dict[str, list[str]]
"""By the name of a pre-tokenizer: what holds for a vocabulary of it that says nothing about it itself.

add_bos, add_sep   what stands around a text, and between two that are ranked
has_bos            there is a token for the beginning
clean_spaces       `SPACED` is decoded without its space
ignore_merges      `UNMERGED` is one token, though nothing merges to it
"""
SPACED, UNMERGED = "x .", "qj"


def spelling() -> dict[int, str]:
    """GPT-2's character for each byte."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = iter(range(256, 512))
    return {byte: chr(byte) if byte in plain else chr(next(rest)) for byte in range(256)}


def _merges(text: str, spell: dict[int, str] | None) -> dict[tuple[str, str], None]:
    """Merges that make any part of `text` one token."""
    merges: dict[tuple[str, str], None] = {}
    units = []
    for character in text:
        if spell is None:
            units.append("▁" if character == " " else character)
            continue
        letters = [spell[byte] for byte in character.encode()]
        for i in range(1, len(letters)):
            merges["".join(letters[:i]), letters[i]] = None
        units.append("".join(letters))
    for size in range(2, len(units) + 1):
        for start in range(len(units) - size + 1):
            part = units[start : start + size]
            for cut in range(1, size):
                merges["".join(part[:cut]), "".join(part[cut:])] = None
    return merges


def write_vocabulary(
    path: Path, texts: list[str], *, bytes_spelled: bool, name: str = "gpt-2", unmerged: Sequence[str] = ()
) -> list[str]:
    """A model file of a vocabulary alone; its tokens as texts. Files with `unmerged` tokens name no BOS."""
    spell = spelling() if bytes_spelled else None
    tokens = dict.fromkeys(["<|endoftext|>", *(spelling().values() if spell else (f"<0x{b:02X}>" for b in range(256)))])
    merges: dict[tuple[str, str], None] = {}
    for text in texts:
        tokens |= dict.fromkeys([] if spell else text.replace(" ", "▁"))
        merges |= _merges(text, spell)
    space = " " if spell is None else spelling()[32]
    space = "▁" if spell is None else space
    merges |= {(space * (1 << i), space * (1 << i)): None for i in range(10)}
    tokens |= dict.fromkeys([*(left + right for left, right in merges), *unmerged])
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_block_count(1)
    writer.add_feed_forward_length(32)
    writer.add_head_count(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(name)
    writer.add_token_list(list(tokens))
    writer.add_token_types([3] + [1] * (len(tokens) - 1))
    writer.add_token_merges([f"{left} {right}" for left, right in merges])
    if not unmerged:
        writer.add_bos_token_id(0)
        writer.add_eos_token_id(0)
    writer.add_tensor("token_embd.weight", np.zeros((1, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return list(tokens)


class _Override(ctypes.Structure):
    """llama_model_kv_override"""

    _fields_ = [
        ("tag", ctypes.c_int), ("key", ctypes.c_char * 128), ("gap", ctypes.c_int), ("value", ctypes.c_char * 128)
    ]  # fmt: skip


class _Parameters(ctypes.Structure):
    """llama_model_params"""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("devices", "buffer_types")),
        *((name, ctypes.c_int32) for name in ("n_gpu_layers", "split_mode", "load_mode", "lazy_mode", "main_gpu")),
        *((name, ctypes.c_void_p) for name in ("tensor_split", "progress", "progress_data", "overrides")),
        *((name, ctypes.c_bool) for name in ("vocab_only", "check", "extra", "no_host", "no_alloc", "load_mtp")),
    ]


class Peer:
    """The real llama.cpp's library."""

    def __init__(self, programs: Path) -> None:
        for name in ("ggml-base", "ggml-cpu", "ggml-rpc", "ggml", "llama"):
            self.library = ctypes.CDLL(str(programs / f"lib{name}.so"), mode=ctypes.RTLD_GLOBAL)
        self.library.llama_model_default_params.restype = _Parameters
        self.library.llama_model_load_from_file.argtypes = [ctypes.c_char_p, _Parameters]
        self.library.llama_model_load_from_file.restype = ctypes.c_void_p
        self.library.llama_model_get_vocab.argtypes = [ctypes.c_void_p]
        self.library.llama_model_get_vocab.restype = ctypes.c_void_p
        self.library.llama_model_free.argtypes = [ctypes.c_void_p]
        self.library.llama_tokenize.argtypes = [
            ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int32, ctypes.c_void_p, ctypes.c_int32, ctypes.c_bool,
            ctypes.c_bool,
        ]  # fmt: skip
        for name in ("bos", "get_add_bos", "get_add_sep"):
            getattr(self.library, f"llama_vocab_{name}").argtypes = [ctypes.c_void_p]
        for name in ("get_add_bos", "get_add_sep"):
            getattr(self.library, f"llama_vocab_{name}").restype = ctypes.c_bool
        self.library.llama_detokenize.argtypes = [
            ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int32, ctypes.c_char_p, ctypes.c_int32, ctypes.c_bool,
            ctypes.c_bool,
        ]  # fmt: skip
        self._silence = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)(lambda *_: None)
        self.library.llama_log_set(self._silence, None)

    @contextmanager
    def vocabulary(self, path: Path, name: str) -> Iterator[int]:
        """A file's vocabulary, with the pre-tokenizer `name`."""
        overrides = (_Override * 2)()
        overrides[0].tag = 3  # LLAMA_KV_OVERRIDE_TYPE_STR
        overrides[0].key, overrides[0].value = b"tokenizer.ggml.pre", name.encode()
        parameters = self.library.llama_model_default_params()
        parameters.vocab_only, parameters.overrides = True, ctypes.addressof(overrides)
        model = self.library.llama_model_load_from_file(str(path).encode(), parameters)
        assert model, name
        yield self.library.llama_model_get_vocab(model)
        self.library.llama_model_free(model)

    def ids(self, vocabulary: int, text: str) -> list[int]:
        """Token ids of a text, without those that are put around it."""
        data = text.encode()
        ids = (ctypes.c_int32 * (len(data) + 8))()
        n = self.library.llama_tokenize(vocabulary, data, len(data), ids, len(ids), False, False)
        assert n >= 0
        return ids[:n]

    def decoded(self, vocabulary: int, ids: list[int]) -> str:
        """The text of tokens."""
        text = ctypes.create_string_buffer(256)
        n = self.library.llama_detokenize(
            vocabulary, (ctypes.c_int32 * len(ids))(*ids), len(ids), text, len(text), False, False
        )
        assert n >= 0
        return text.raw[:n].decode()

    def flags(self, path: Path, name: str) -> list[str]:
        """Return the flags of the vocabulary of a file made by `flag_file`."""
        with self.vocabulary(path, name) as vocabulary:
            holds = {
                "add_bos": self.library.llama_vocab_get_add_bos(vocabulary),
                "add_sep": self.library.llama_vocab_get_add_sep(vocabulary),
                "has_bos": self.library.llama_vocab_bos(vocabulary) >= 0,
                "clean_spaces": self.decoded(vocabulary, self.ids(vocabulary, SPACED)) != SPACED,
                "ignore_merges": len(self.ids(vocabulary, UNMERGED)) == 1,
            }
        return [flag for flag, holding in holds.items() if holding]


def read() -> Words:
    """The stored words."""
    words: Words = json.loads(FILE.read_text())
    return words


def peer_words(programs: Path, texts: list[str], folder: Path) -> Words:
    """Return llama.cpp's splits of texts for every pre-tokenizer that we support."""
    peer = Peer(programs)
    back = {letter: byte for byte, letter in spelling().items()}
    words: Words = {text: {} for text in texts}
    for bytes_spelled in (True, False):
        path = folder / f"vocabulary{bytes_spelled:d}.gguf"
        tokens = write_vocabulary(path, [text for text in texts if text != RUN] + ["x"], bytes_spelled=bytes_spelled)
        for name, rule in PRE_TOKENIZERS.items():
            if rule.byte_encode is not bytes_spelled:
                continue
            with peer.vocabulary(path, name or "default") as vocabulary:
                found = [peer.ids(vocabulary, text) for text in texts]
            for text, ids in zip(texts, found, strict=True):
                parts = [tokens[i] for i in ids]
                if bytes_spelled:
                    shown = [bytes(back[letter] for letter in part).decode() for part in parts]
                else:
                    shown = [part.replace("▁", " ") for part in parts]
                assert "".join(shown) == text, (name, text, shown)
                if text == RUN and name != "jais-2":
                    continue
                cut = BORDER.join(shown)
                names = [*words[text].get(cut, "").split(), name or "default"]
                words[text][cut] = " ".join(dict.fromkeys(names))
    return words


def flag_file(folder: Path, name: str) -> Path:
    """A small vocabulary of a pre-tokenizer that says nothing about its flags."""
    path = folder / f"{name}.gguf"
    spelled = PRE_TOKENIZERS[name].byte_encode
    write_vocabulary(path, [SPACED, *UNMERGED], bytes_spelled=spelled, name=name, unmerged=[UNMERGED])
    return path


def read_flags() -> Flags:
    """The stored flags."""
    flags: Flags = json.loads(FLAGS_FILE.read_text())
    return flags


def peer_flags(programs: Path, folder: Path) -> Flags:
    """Return the properties that llama.cpp ties to every name that we support."""
    peer = Peer(programs)
    return {name: peer.flags(flag_file(folder, name), name) for name in sorted(PRE_TOKENIZERS) if name}


def main(arguments: list[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        words: Any = peer_words(Path(arguments[0]), [*dict.fromkeys([*read(), RUN])], Path(folder))
        flags = peer_flags(Path(arguments[0]), Path(folder))
    FILE.write_text(json.dumps(words, ensure_ascii=True, indent=1) + "\n")
    lines = ",\n".join(f" {json.dumps(name)}: {json.dumps(holding)}" for name, holding in flags.items())
    FLAGS_FILE.write_text(f"{{\n{lines}\n}}\n")


if __name__ == "__main__":
    main(sys.argv[1:])
